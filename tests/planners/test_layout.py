"""Equal shards, equal work per tile, and turns for what does not divide."""

import itertools

import numpy as np
import pytest

from layerwise.plan import Parent
from layerwise.planners.layout import batched, head_shares, lay_out, place, query_cuts, shard_rows, tile_rows
from layerwise.spec import AttentionSpec


def _spec(num_heads: int = 8, num_kv_heads: int = 2, **mask: int) -> AttentionSpec:
    return AttentionSpec(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=4, v_head_dim=4, **mask)


def _group(degree: int, num_samples: int = 1, first_rank: int = 0) -> Parent:
    return Parent(first_rank=first_rank, sp_degree=degree, samples=tuple(range(num_samples)))


def test_thirteen_tokens_over_four_ranks() -> None:
    rows = shard_rows(batched(place([_group(4, first_rank=8)]), np.array([13])))
    assert rows.tolist() == [[0, 8, 0, 4], [0, 9, 4, 7], [0, 10, 7, 10], [0, 11, 10, 13]]


def test_short_samples_have_no_empty_shards() -> None:
    rows = shard_rows(batched(place([_group(32)]), np.array([3])))
    assert [row[2:] for row in rows.tolist()] == [[0, 1], [1, 2], [2, 3]]


def test_leftover_tokens_take_turns() -> None:
    """Samples of 1, 2 and 3 tokens over 4, many times: always giving the first ranks more would pile up."""
    lengths = np.array([5, 6, 7] * 10)
    rows = shard_rows(batched(place([_group(4, len(lengths))]), lengths))
    tokens = np.bincount(rows[:, 1], weights=rows[:, 3] - rows[:, 2])
    assert tokens.max() - tokens.min() <= 1
    assert tokens.sum() == lengths.sum()


@pytest.mark.parametrize(
    ("heads", "degree", "shares"),
    [
        ((8, 8), 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ((8, 2), 2, [(0, 4), (4, 8)]),
        ((8, 2), 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        ((6, 3), 2, [(0, 4), (4, 6)]),  # KV groups of 2 stay whole
        ((12, 12), 4, [(0, 3), (3, 6), (6, 9), (9, 12)]),  # not 4, 4, 4, 0
        ((7, 7), 4, [(0, 2), (2, 4), (4, 6), (6, 7)]),
        ((24, 6), 4, [(0, 8), (8, 16), (16, 20), (20, 24)]),
    ],
)
def test_heads_split_on_kv_groups(heads: tuple[int, int], degree: int, shares: list[tuple[int, int]]) -> None:
    assert [(s.h0, s.h1) for s in head_shares(degree, _spec(*heads))] == shares
    assert all(s.parts == 1 for s in head_shares(degree, _spec(*heads)))


def test_more_ranks_than_heads_share_queries() -> None:
    shares = head_shares(16, _spec(4, 1))
    assert len(shares) == 16
    assert {(s.h0, s.h1, s.part, s.parts) for s in shares} == {(h, h + 1, p, 4) for h in range(4) for p in range(4)}


def test_larger_shares_take_turns() -> None:
    """7 heads over 4 ranks are 2, 2, 2, 1; over four equal samples every rank gets 7."""
    lengths = np.array([10] * 4)
    rows = tile_rows(batched(place([_group(4, 4)]), lengths), _spec(7, 7))
    assert np.bincount(rows[:, 1], weights=rows[:, 6] - rows[:, 5]).tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("mask", [{}, {"window": 9}, {"chunk": 16}])
@pytest.mark.parametrize("parts", [1, 2, 3, 8])
def test_query_cuts_have_equal_pairs(mask: dict[str, int], parts: int) -> None:
    spec, length = _spec(**mask), 200
    (cuts,) = query_cuts(np.array([length]), parts, spec).tolist()
    pairs = [sum(q - int(spec.first_key(q)) + 1 for q in range(a, b)) for a, b in itertools.pairwise(cuts)]
    most_of_a_query = max(q - int(spec.first_key(q)) + 1 for q in range(length))
    assert (cuts[0], cuts[-1]) == (0, length)
    assert max(pairs) - min(pairs) <= 2 * most_of_a_query


def test_three_tokens_on_32_ranks() -> None:
    rows = tile_rows(batched(place([_group(32)]), np.array([3])), _spec(4, 1))
    covered = sorted((q, h) for _, _, q0, q1, _, h0, h1 in rows.tolist() for q in range(q0, q1) for h in range(h0, h1))
    assert covered == [(q, h) for q in range(3) for h in range(4)]


def test_tiles_start_at_the_first_key_of_the_mask() -> None:
    rows = tile_rows(batched(place([_group(8)]), np.array([100])), _spec(1, 1, window=10))
    assert {(q0, k0) for _, _, q0, _, k0, _, _ in rows.tolist()} >= {(0, 0)}
    assert all(k0 == max(q0 - 9, 0) for _, _, q0, _, k0, _, _ in rows.tolist())


def test_children_take_shards_and_sparse_tiles_only() -> None:
    parent = _group(4, 2)
    child = place([Parent(first_rank=1, sp_degree=1, samples=(0,)), Parent(first_rank=2, sp_degree=2, samples=(1,))])
    attention = {"full_attention": _spec(), "sliding_attention": _spec(window=4)}
    microbatch = lay_out(np.array([12, 8]), attention, [parent], {parent: child})
    assert microbatch.shards.rows.tolist() == [[0, 1, 0, 12], [1, 2, 0, 4], [1, 3, 4, 8]]
    assert set(microbatch.tiles["full_attention"].column("rank").tolist()) == {0, 1, 2, 3}
    assert {(t.sample, t.rank) for t in microbatch.tiles["sliding_attention"]} == {(0, 1), (1, 2), (1, 3)}
    assert microbatch.parents == (Parent(first_rank=0, sp_degree=4, samples=(0, 1), repacked=True),)
