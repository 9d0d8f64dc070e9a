from collections import Counter
from itertools import chain, islice, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.data.sampler import StepSampler, group_stream
from layerwise.data.window import exchange_within_windows
from layerwise.errors import DataError, SpecError

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=30)


@settings(deadline=None, max_examples=40)
@given(lengths_lists, st.integers(1, 120), st.integers(0, 3))
def test_steps_stay_in_budget_and_lose_no_sample(lengths, tokens_per_step, seed):
    epochs, drawn = 3, []
    for step in StepSampler(lengths, tokens_per_step, seed=seed):
        assert step
        assert len(step) == 1 or sum(lengths[i] for i in step) <= tokens_per_step
        drawn += step
        if len(drawn) >= epochs * len(lengths):
            break
    for epoch in range(epochs):
        assert sorted(drawn[epoch * len(lengths) : (epoch + 1) * len(lengths)]) == list(range(len(lengths)))


@settings(deadline=None, max_examples=40)
@given(lengths_lists, st.integers(1, 120))
def test_a_step_ends_only_where_the_next_sample_does_not_fit(lengths, tokens_per_step):
    steps = list(islice(StepSampler(lengths, tokens_per_step), 6))
    for step, following in pairwise(steps):
        assert sum(lengths[i] for i in step) + lengths[following[0]] > tokens_per_step


@st.composite
def runs(draw):
    """Arguments of a sampler over one to three sources, with and without a window."""
    parts = draw(st.lists(st.lists(st.integers(1, 30), min_size=1, max_size=12), min_size=1, max_size=3))
    weights = draw(st.lists(st.sampled_from([0.2, 1.0, 3.0]), min_size=len(parts), max_size=len(parts)))
    return {
        "lengths": list(chain(*parts)),
        "sources": [(len(part), weight) for part, weight in zip(parts, weights, strict=True)],
        "tokens_per_step": draw(st.integers(1, 50)),
        "seed": draw(st.integers(0, 3)),
        "window_steps": draw(st.integers(1, 5)),
    }


@settings(deadline=None, max_examples=40)
@given(runs(), st.integers(0, 12))
def test_resuming_gives_the_tail_of_the_whole_run(run, first_step):
    whole = list(StepSampler(**run, num_steps=20))
    tail = list(StepSampler(**run, num_steps=20 - first_step, first_step=first_step))
    assert tail == whole[first_step:]


@settings(deadline=None, max_examples=40)
@given(runs())
def test_every_source_is_seen_once_per_epoch(run):
    """Over whole windows, so that what moves within one is all there."""
    num_steps = 12 * run["window_steps"]
    seen = Counter(chain(*StepSampler(**run, num_steps=num_steps)))
    start = 0
    for size, _ in run["sources"]:
        visits = [seen[index] for index in range(start, start + size)]
        assert max(visits) - min(visits) <= 1
        start += size


@settings(deadline=None, max_examples=40)
@given(runs())
def test_a_window_moves_samples_within_it_and_drops_none(run):
    window = run["window_steps"]
    moved = list(StepSampler(**run, num_steps=3 * window))
    unmoved = list(StepSampler(**run | {"window_steps": 1}, num_steps=3 * window))
    for first in range(0, 3 * window, window):
        before, after = unmoved[first : first + window], moved[first : first + window]
        assert Counter(chain(*before)) == Counter(chain(*after))
        assert all(after)
        for step in after:
            assert len(step) == 1 or sum(run["lengths"][i] for i in step) <= run["tokens_per_step"]


@settings(deadline=None, max_examples=40)
@given(runs())
def test_sources_have_their_shares_to_within_a_sample(run):
    run = run | {"window_steps": 1}
    drawn = list(chain(*StepSampler(**run, num_steps=15)))
    ends = np.cumsum([size for size, _ in run["sources"]])
    weights = np.array([weight for _, weight in run["sources"]])
    tokens = np.zeros(len(weights))
    longest = np.maximum.reduceat(run["lengths"], [0, *ends[:-1]])
    for index in drawn:
        tokens[np.searchsorted(ends, index, side="right")] += run["lengths"][index]
        behind = tokens / weights
        assert (behind - behind.min() <= (longest / weights) + 1e-9).all()


def test_a_window_gathers_long_samples_and_levels_tokens():
    steps = [[9, 1, 1, 1], [9, 1, 1, 1], [4, 4, 4]]
    moved = list(exchange_within_windows(steps, 3, 18, length=int))
    assert [sum(step) for step in moved] == [12, 12, 12]
    steps = [[6, 1, 1, 1, 1, 1, 1], [6, 1, 1, 1, 1, 1, 1]]
    assert list(exchange_within_windows(steps, 2, 12, length=int)) == [[6, 6], [1] * 12]
    assert list(exchange_within_windows(steps, 1, 12, length=int)) == steps


@pytest.mark.parametrize(
    "steps",
    [
        [[9], [1], [1]],  # the ones would meet and leave a step empty
        [[5, 2, 2], [3, 3, 3]],  # a step would exceed its tokens
    ],
)
def test_a_window_that_cannot_be_filled_anew_stays_as_it_is(steps):
    assert list(exchange_within_windows(steps, len(steps), 9, length=int)) == steps


def test_counts_of_a_mixture():
    sampler = StepSampler([10] * 6 + [5] * 4, 20, num_steps=9, sources=[(6, 1.0), (4, 2.0)])
    web, code = sampler.visits()
    assert (web.samples, web.tokens, web.epochs) == (6, 60, 1.0)
    assert (code.samples, code.tokens, code.epochs) == (24, 120, 6.0)
    with pytest.raises(SpecError, match="num_steps=None"):
        StepSampler([1], 1).visits()


def test_an_epoch_ends_inside_a_step():
    steps = list(StepSampler([3, 3, 3], 6, num_steps=3, seed=1))
    assert [len(step) for step in steps] == [2, 2, 2]
    assert sorted(chain(*steps)) == [0, 0, 1, 1, 2, 2]


def test_same_seed_same_steps_other_seed_other_steps():
    lengths = np.random.default_rng(0).integers(1, 100, 200)
    first = list(StepSampler(lengths, 500, seed=7, num_steps=20))
    assert first == list(StepSampler(lengths, 500, seed=7, num_steps=20))
    assert first != list(StepSampler(lengths, 500, seed=8, num_steps=20))


def test_epochs_and_sources_differ_in_order():
    steps = list(StepSampler([1] * 50, 50, num_steps=2))
    assert steps[0] != steps[1]
    assert sorted(steps[0]) == sorted(steps[1])
    (both,) = StepSampler([1] * 100, 100, num_steps=1, sources=[(50, 1.0), (50, 1.0)])
    assert [i for i in both if i < 50] != [i - 50 for i in both if i >= 50]


def test_indices_are_plain_ints():
    assert {type(i) for i in next(iter(StepSampler([1, 2, 3], 10)))} == {int}


def test_bad_input():
    with pytest.raises(DataError, match="no samples"):
        StepSampler([], 10)
    with pytest.raises(SpecError, match="tokens_per_step=0"):
        next(iter(StepSampler([1], 0)))
    with pytest.raises(DataError, match="has 0 tokens"):
        next(iter(StepSampler([0, 0], 10)))
    with pytest.raises(SpecError, match="sources= have 3 samples, but there are 2 lengths"):
        StepSampler([1, 1], 10, sources=[(3, 1.0)])
    with pytest.raises(DataError, match="no samples"):
        StepSampler([1, 1], 10, sources=[(2, 1.0), (0, 1.0)])
    with pytest.raises(SpecError, match="weights are greater than 0"):
        StepSampler([1, 1], 10, sources=[(2, 0.0)])
    with pytest.raises(SpecError, match="planning_window_steps=0"):
        next(iter(StepSampler([1], 1, window_steps=0)))


def test_group_stream_takes_what_comes():
    stream = iter([[1, 2], [3], [4, 5, 6, 7], [8], [9]])
    assert list(group_stream(stream, 3)) == [[[1, 2], [3]], [[4, 5, 6, 7]], [[8], [9]]]
    assert list(group_stream([], 3)) == []


def test_group_stream_is_lazy():
    def endless():
        while True:
            yield [0, 0]

    assert list(islice(group_stream(endless(), 4), 2)) == [[[0, 0]] * 2] * 2


def test_group_stream_measures_as_told():
    pairs = [("a", [1, 2]), ("b", [3]), ("c", [4])]
    assert list(group_stream(pairs, 2, length=lambda pair: len(pair[1]))) == [pairs[:1], pairs[1:]]


def test_group_stream_names_an_empty_sample():
    with pytest.raises(DataError, match="sample 1 of the stream"):
        list(group_stream([[1], []], 3))
