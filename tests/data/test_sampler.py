from itertools import chain, islice, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.data.sampler import StepSampler, group_stream
from layerwise.errors import DataError, SpecError

lengths_lists = st.lists(st.integers(1, 50), min_size=1, max_size=30)


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


@given(lengths_lists, st.integers(1, 120))
def test_a_step_ends_only_where_the_next_sample_does_not_fit(lengths, tokens_per_step):
    steps = list(islice(StepSampler(lengths, tokens_per_step), 6))
    for step, following in pairwise(steps):
        assert sum(lengths[i] for i in step) + lengths[following[0]] > tokens_per_step


def test_an_epoch_ends_inside_a_step():
    steps = list(StepSampler([3, 3, 3], 6, num_steps=3, seed=1))
    assert [len(step) for step in steps] == [2, 2, 2]
    assert sorted(chain(*steps)) == [0, 0, 1, 1, 2, 2]


def test_same_seed_same_steps_other_seed_other_steps():
    lengths = np.random.default_rng(0).integers(1, 100, 200)
    first = list(StepSampler(lengths, 500, seed=7, num_steps=20))
    assert first == list(StepSampler(lengths, 500, seed=7, num_steps=20))
    assert first != list(StepSampler(lengths, 500, seed=8, num_steps=20))


def test_epochs_differ_in_order():
    steps = list(StepSampler([1] * 50, 50, num_steps=2))
    assert steps[0] != steps[1]
    assert sorted(steps[0]) == sorted(steps[1])


def test_first_step_resumes():
    whole = list(StepSampler([5, 9, 2, 7], 12, num_steps=10))
    assert list(StepSampler([5, 9, 2, 7], 12, first_step=4, num_steps=6)) == whole[4:]


def test_indices_are_plain_ints():
    assert {type(i) for i in next(iter(StepSampler([1, 2, 3], 10)))} == {int}


def test_bad_input():
    with pytest.raises(DataError, match="no samples"):
        StepSampler([], 10)
    with pytest.raises(SpecError, match="tokens_per_step=0"):
        next(iter(StepSampler([1], 0)))
    with pytest.raises(DataError, match="has 0 tokens"):
        next(iter(StepSampler([0, 0], 10)))


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
