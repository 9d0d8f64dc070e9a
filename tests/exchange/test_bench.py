"""What the bench of the exchange makes of its measurements."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.exchange.figures import Figure
from benchmarks.exchange.measure import ratio


def test_quotients_are_taken_within_a_repetition() -> None:
    """Repetitions take 1, 2, 4, 8 and 16 s on a machine that gets busier, and ours a tenth more or less of that."""
    seconds = 2.0 ** np.arange(5)
    assert ratio(seconds * [1.1, 0.9, 1.0, 1.1, 0.9], seconds) == pytest.approx((1.0, 0.1))


@pytest.mark.parametrize(
    ("measured", "tolerance", "reached"), [(1.04, 0.05, True), (1.06, 0.05, False), (1.01, 0.0, False)]
)
def test_a_tie_within_the_spread_is_reached(measured: float, tolerance: float, reached: bool) -> None:
    assert Figure("time over another", measured, 1.0, "x", tolerance=tolerance).reached == reached
