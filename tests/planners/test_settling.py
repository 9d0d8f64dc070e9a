"""Local search over a handful of samples, on tables small enough to check by hand."""

from __future__ import annotations

import numpy as np

from layerwise.cost import Floats
from layerwise.planners.settling import Choices, settle

# Two ranks; blocks: rank 0, rank 1, both.
INSIDE = np.array([[True, False], [False, True], [True, True]])


def fullest_s(tables: Floats) -> Floats:
    return np.asarray(tables.max(axis=-1).sum(axis=-1))


def choices(lengths: list[int], capacity: int) -> Choices:
    """Seconds are tokens; a shared sample takes half of them on each rank, and 1 s to exchange."""
    tokens = np.array(lengths)
    seconds = np.stack([tokens, tokens, tokens / 2 + 1], axis=1)
    shares = np.stack([tokens, tokens, -(-tokens // 2)], axis=1)
    return Choices(
        inside=INSIDE,
        added=np.stack([seconds, shares]).astype(float),
        capacity_tokens=capacity,
        exchanged=np.array([[1, 0, 2]]),
    )


def test_samples_move_until_both_ranks_are_level() -> None:
    question = choices([6, 4, 3, 3], 100)
    found = settle(question, np.array([0, 0, 0, 0]), fullest_s)
    assert fullest_s(question.table(found)[:-1]) == 9  # 6+3 | 4+3; sharing a sample adds what it would save


def test_two_samples_change_places_where_no_move_helps() -> None:
    # 9+2 | 8+1: moving any sample makes a rank higher than 11; exchanging 2 and 1 gives 10 | 10.
    found = settle(choices([9, 2, 8, 1], 11), np.array([0, 0, 1, 1]), fullest_s)
    assert found[0] == found[3] != found[1] == found[2]


def test_a_placement_over_capacity_is_never_taken() -> None:
    # The seconds asked for are least where both samples are on one rank, which holds 6 tokens.
    found = settle(choices([4, 6], 6), np.array([0, 1]), lambda tables: -fullest_s(tables))
    assert choices([4, 6], 6).table(found)[-1].max() <= 6


def test_nodes_change_places_where_their_ranks_have_other_work() -> None:
    # Rank 0 has 5 s of its own: what was on it belongs on rank 1, and one sample alone cannot make that change.
    own = np.array([[5.0, 0.0]])
    found = settle(choices([4, 1, 2], 100), np.array([0, 0, 1]), lambda tables: fullest_s(tables + own))
    assert fullest_s(choices([4, 1, 2], 100).table(found)[:-1] + own) == 6.0
