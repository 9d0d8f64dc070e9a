"""Bin packing against planted optima, exhaustive search and its own promises."""

from itertools import product

import numpy as np
import pytest

from layerwise.planners.packing import Packing, pack_longest_first, refine, split_parts


def _packing(sizes: list[int], num_bins: int, capacity: int = 10**9) -> Packing:
    """Equal bins, one load."""
    return Packing(
        loads=np.array(sizes, dtype=float)[None, :, None],
        base=np.zeros((1, num_bins)),
        bin_class=np.zeros(num_bins, dtype=np.int64),
        tokens=np.array(sizes),
        capacity_tokens=np.full(num_bins, capacity),
    )


def _best_makespan(packing: Packing) -> float:
    num_bins, num_items = len(packing.bin_class), len(packing.tokens)
    return min(packing.makespan(np.array(bins)) for bins in product(range(num_bins), repeat=num_items))


def test_longest_first_is_near_the_optimum() -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        packing = _packing(rng.integers(1, 50, 8).tolist(), 3)
        bin_of = pack_longest_first(packing)
        assert bin_of is not None
        assert packing.makespan(bin_of) <= _best_makespan(packing) * (4 / 3 - 1 / 9) + 1e-9  # Graham 1969


def test_refining_finds_a_planted_optimum() -> None:
    packing = _packing([5, 5, 4, 4, 3, 3, 3], 2)  # 5 + 4 + 3 + 3 longest first; 5 + 5 + 4 at best
    start = pack_longest_first(packing)
    assert start is not None
    assert packing.makespan(start) == 15.0
    assert packing.makespan(refine(packing, start)) == 14.0
    worst = np.zeros(7, dtype=np.int64)
    assert packing.makespan(refine(packing, worst)) == 14.0


def test_refining_levels_many_bins_one_small_gain_at_a_time() -> None:
    sizes = (np.exp(np.random.default_rng(0).normal(6, 1, 200)).astype(int) + 1).tolist()
    packing, mean = _packing(sizes, 16), sum(sizes) / 16
    start = pack_longest_first(packing)
    assert start is not None
    assert packing.makespan(start) > 1.005 * mean
    assert packing.makespan(refine(packing, start)) < 1.001 * mean


def test_refining_never_makes_it_higher_and_keeps_capacity() -> None:
    rng = np.random.default_rng(1)
    for _ in range(10):
        tokens = rng.integers(1, 100, 40)
        loads = rng.random((3, 40, 2)) * tokens[None, :, None]
        packing = Packing(
            loads=loads,
            base=rng.random((3, 5)),
            bin_class=np.array([0, 0, 0, 1, 1]),
            tokens=tokens,
            capacity_tokens=np.full(5, int(tokens.sum() / 3)),
            allowed=np.stack([np.ones(40, dtype=bool), tokens < 60], axis=1),
        )
        start = pack_longest_first(packing)
        assert start is not None
        end = refine(packing, start)
        assert packing.makespan(end) <= packing.makespan(start)
        for bin_of in (start, end):
            assert np.bincount(bin_of, weights=tokens, minlength=5).max() <= packing.capacity_tokens[0]
            assert packing.allowed is not None
            assert packing.allowed[np.arange(40), packing.bin_class[bin_of]].all()


def test_refining_trades_one_dimension_for_another() -> None:
    """One item moves: the second dimension falls by 3 of 99, the first rises by 1.4 of 56, and neither is tied.

    A smooth norm sees the lower bin of the second dimension rise too, and would stay.
    """
    loads = np.array([[15.0] + [1.4] * 63, [0.0] + [3.0] * 63])[:, :, None]
    packing = Packing(
        loads=loads,
        base=np.zeros((2, 2)),
        bin_class=np.zeros(2, dtype=np.int64),
        tokens=np.ones(64, dtype=np.int64),
        capacity_tokens=np.full(2, 100),
    )
    bin_of = np.array([0] * 31 + [1] * 33)
    assert packing.makespan(bin_of) == pytest.approx(15 + 30 * 1.4 + 99)
    assert packing.makespan(refine(packing, bin_of)) == pytest.approx(15 + 31 * 1.4 + 96)


def test_refining_returns_the_start_where_smoothing_misleads() -> None:
    """Moving item 0 makes one of two equal bins half as high, the other 2% higher: a worse maximum."""
    packing = Packing(
        loads=np.array([[[0.5, 0.02], [0.5, 5.0], [5.0, 1.0]]]),
        base=np.zeros((1, 2)),
        bin_class=np.array([0, 1]),
        tokens=np.ones(3, dtype=np.int64),
        capacity_tokens=np.full(2, 10),
    )
    assert refine(packing, np.array([0, 0, 1])).tolist() == [0, 0, 1]


@pytest.mark.filterwarnings("error")
def test_refining_bins_of_very_unlike_heights() -> None:
    """Changes that leave next to nothing in one dimension, or multiply the height of another, stay finite."""
    loads = np.array([[1.0, 1e-4, 1e-4], [1e-3, 5.0, 1.0]])[:, :, None]
    packing = Packing(
        loads=np.concatenate([loads, loads / 100], axis=2),
        base=np.zeros((2, 4)),
        bin_class=np.array([0, 0, 1, 1]),
        tokens=np.ones(3, dtype=np.int64),
        capacity_tokens=np.full(4, 3),
    )
    for start in product(range(4), repeat=3):
        for is_near in (True, False):
            end = refine(packing, np.array(start), is_near)
            assert packing.makespan(end) <= packing.makespan(np.array(start))
    assert packing.makespan(refine(packing, np.zeros(3, dtype=np.int64))) < 0.1 * packing.makespan(
        np.zeros(3, np.int64)
    )


def test_an_item_that_fits_nowhere() -> None:
    assert pack_longest_first(_packing([6, 6, 6], 2, capacity=10)) is None
    assert pack_longest_first(_packing([6, 4, 6], 2, capacity=10)) is not None


@pytest.mark.parametrize("longest_together", [True, False])
def test_parts_respect_the_capacity(longest_together: bool) -> None:
    tokens = np.random.default_rng(2).integers(1, 1000, 60)
    capacity = int(tokens.sum() / 3 * 1.1)
    parts = split_parts(tokens, tokens.astype(float) ** 2, 3, capacity, longest_together=longest_together)
    assert parts is not None
    assert np.bincount(parts, weights=tokens).max() <= capacity
    assert set(parts.tolist()) == {0, 1, 2}
    assert split_parts(tokens, tokens * 1.0, 3, int(tokens.sum() / 4), longest_together=longest_together) is None
