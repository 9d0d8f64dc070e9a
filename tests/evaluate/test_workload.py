"""Workloads: the distributions, how steps are filled, and what is refused."""

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from layerwise.errors import SpecError
from layerwise.evaluate.workload import LengthDistribution, load_workload
from layerwise.spec import preset_names
from tests.evaluate.builders import narrow, small_workload


def test_quantiles_of_body_and_tail() -> None:
    lengths = LengthDistribution(median_tokens=1000, sigma=1.0, tail_share=0.1, tail_index=2.0)
    z90 = 1.2815515655446004  # standard normal, from tables
    start = 1000 * math.exp(z90)
    # The tail: a sixteenth of its samples exceed 16 ** (1 / index) = 4 times its start.
    got = lengths.quantile(np.array([0.5, 0.1, 0.9, 1 - 0.1 / 16]))
    assert got.tolist() == [1000, round(1000 * math.exp(-z90)), round(start), round(4 * start)]


def test_lengths_are_clipped() -> None:
    lengths = LengthDistribution(
        median_tokens=1000, sigma=2.0, tail_share=0.1, tail_index=1.0, min_tokens=300, max_tokens=5000
    )
    got = lengths.quantile(np.linspace(0, 0.9999, 50))
    assert (got.min(), got.max()) == (300, 5000)


def test_steps_are_full_and_lose_no_sample() -> None:
    workload = small_workload(fill=0.8)
    steps = workload.draw_steps(6)
    budget = int(0.8 * 16 * 2560)
    for step, following in pairwise(steps):
        assert step.sum() <= budget < step.sum() + following[0]
    assert all(np.array_equal(a, b) for a, b in zip(steps, workload.draw_steps(9), strict=False))
    assert not np.array_equal(steps[0], workload.change(seed=1).draw_steps(1)[0])


def test_mixture_shares_are_of_tokens() -> None:
    lengths = np.concatenate(small_workload().draw_steps(300))
    assert lengths[lengths > 5000].sum() / lengths.sum() == pytest.approx(0.6, abs=0.03)


def test_cap_cuts_long_samples_and_keeps_token_shares() -> None:
    lengths = np.concatenate(small_workload(cap_tokens=1000).draw_steps(100))
    assert lengths.max() == 1000
    assert lengths[lengths == 1000].sum() / lengths.sum() == pytest.approx(0.6, abs=0.03)


def test_a_file_replaces_a_distribution(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("7\n11\n13\n")
    workload = small_workload(mixture={"file": 1.0}, lengths={"file": str(path)}, cap_tokens=12)
    step = workload.draw_steps(1)[0]
    assert set(step.tolist()) == {7, 11, 12}
    assert np.bincount(step)[[7, 11, 12]].min() > 0.25 * len(step)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens_per_rank": 10**21}, "max_tokens_per_rank: .*less than or equal to 2147483647"),
        ({"mixture": {"short": 0.5, "books": 0.5}}, "books.*long.*short|books"),
        ({"mixture": {"short": 0.5, "long": 0.4}}, "add up to 1"),
        ({"fil": 0.5}, "unknown option 'fil'"),
        ({"fill": 1.5}, "fill"),
    ],
)
def test_illegal_settings_are_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        small_workload().change(**settings)


def test_illegal_distribution_is_named() -> None:
    workload = small_workload(lengths={"short": narrow(5) | {"sigma": -1.0}, "long": narrow(9)})
    with pytest.raises(SpecError, match=r"small: lengths\.short: sigma"):
        workload.draw_steps()


def test_cap_above_a_step_is_refused_with_both_numbers() -> None:
    with pytest.raises(SpecError, match="cap_tokens=50000 exceeds the 38912 tokens"):
        small_workload(cap_tokens=50_000).draw_steps()


@pytest.mark.parametrize("name", preset_names("workload"))
def test_shipped_workloads_draw_full_steps(name: str) -> None:
    workload = load_workload(name)
    lengths = workload.draw_steps(5)
    assert all(0.8 * workload.step_tokens <= step.sum() <= workload.step_tokens for step in lengths)
