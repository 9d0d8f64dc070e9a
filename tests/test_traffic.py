"""Who sends what: pairs against brute force, elements by hand, blocks that nest."""

from itertools import pairwise

import numpy as np
import pytest

from layerwise.plan import MicrobatchPlan, Shard, Table, Tile, shard_table, tile_table
from layerwise.spec import AttentionSpec
from layerwise.traffic import (
    Block,
    covering_block,
    elements,
    exchange_blocks,
    match,
    merge_alike,
    merge_spans,
    move_blocks,
    move_tiles,
    shard_blocks,
)
from tests.random_plans import random_step


def _spec(
    num_heads: int = 8, num_kv_heads: int = 2, head_dim: int = 4, v_head_dim: int = 4, **mask: int
) -> AttentionSpec:
    return AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, v_head_dim=v_head_dim, **mask
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("mask", [{}, {"window": 4}, {"chunk": 5}])
def test_every_row_that_a_tile_needs_comes_from_its_owner(seed: int, mask: dict[str, int]) -> None:
    spec = _spec(**mask)
    plan = random_step(np.random.default_rng(seed), [17, 1, 9, 30], {"k": spec}, 6, 3)
    shards, tiles = plan.microbatches[0].shards, plan.microbatches[0].tiles["k"]
    transfers = match(shards, tiles)
    queries, keys = set(), set()
    for s, t, src, dst, q_lo, q_hi, k_lo, k_hi in zip(
        *(column.tolist() for column in vars(transfers).values()), strict=True
    ):
        assert (src, dst) == (int(shards.column("rank")[s]), int(tiles.column("rank")[t]))
        queries |= {(s, t, token) for token in range(q_lo, q_hi)}
        keys |= {(s, t, token) for token in range(k_lo, k_hi)}
    owned = [
        (s, shard, tile_row, tile)
        for s, shard in enumerate(shards)
        for tile_row, tile in enumerate(tiles)
        if shard.sample == tile.sample
    ]
    assert queries == {
        (s, t, x) for s, shard, t, tile in owned for x in range(shard.lo, shard.hi) if tile.q0 <= x < tile.q1
    }
    assert keys == {
        (s, t, x) for s, shard, t, tile in owned for x in range(shard.lo, shard.hi) if tile.k0 <= x < tile.q1
    }


def test_kv_rows_travel_unexpanded() -> None:
    """32 query, 8 KV heads, 2 ranks: each sends the other 10 tokens x (16 + 4 + 4) head rows, not 16 x 3."""
    spec = _spec(32, 8, head_dim=2, v_head_dim=3)
    shards = shard_table([Shard(0, 0, 0, 10), Shard(0, 1, 10, 20)])
    tiles = tile_table([Tile(0, 0, 0, 20, 0, 0, 16), Tile(0, 1, 0, 20, 0, 16, 32)])
    transfers = match(shards, tiles)
    moved = elements(transfers, tiles, spec)
    assert len(transfers.src) == 4
    assert moved.to_tiles.tolist() == [10 * (16 * 2 + 4 * 2 + 4 * 3)] * 4
    assert moved.from_tiles.tolist() == [10 * 16 * 3] * 4


def test_halo_tiles_need_only_the_window() -> None:
    """Shards of 10, window 4: rank 1 needs its own keys and 3 earlier ones, and no query of rank 0."""
    spec = _spec(4, 2, window=4)
    shards = shard_table([Shard(0, 0, 0, 10), Shard(0, 1, 10, 20)])
    tiles = tile_table([Tile(0, 0, 0, 10, 0, 0, 4), Tile(0, 1, 10, 20, 7, 0, 4)])
    transfers = match(shards, tiles)
    (remote,) = np.flatnonzero(transfers.src != transfers.dst)
    assert (transfers.k_lo[remote], transfers.k_hi[remote]) == (7, 10)
    moved = elements(transfers, tiles, spec)
    assert moved.to_tiles[remote] == 3 * 2 * (4 + 4)
    assert moved.from_tiles[remote] == 0


def test_row_numbers_restrict_the_pairs() -> None:
    shards = shard_table([Shard(0, 0, 0, 5), Shard(0, 1, 5, 9), Shard(1, 1, 0, 3)])
    tiles = tile_table([Tile(0, 0, 0, 9, 0, 0, 8), Tile(1, 1, 0, 3, 0, 0, 8)])
    assert len(match(shards, tiles).src) == 3
    mine = match(shards, tiles, shard_rows=np.array([1, 2]))
    assert mine.shard.tolist() == [1, 2]
    assert match(shards, tiles, tile_rows=np.array([1])).tile.tolist() == [1]


@pytest.mark.parametrize(
    ("lo", "hi", "ranks_per_node", "block"),
    [
        (3, 3, 8, (3, 4)),
        (2, 3, 8, (2, 4)),
        (3, 4, 8, (0, 8)),
        (5, 6, 8, (4, 8)),
        (7, 8, 8, (0, 16)),
        (8, 15, 8, (8, 16)),
        (15, 16, 8, (0, 32)),
        (4, 5, 6, (4, 6)),
        (5, 6, 6, (0, 12)),
        (13, 20, 6, (12, 24)),
    ],
)
def test_covering_blocks(lo: int, hi: int, ranks_per_node: int, block: tuple[int, int]) -> None:
    assert covering_block(lo, hi, 48, ranks_per_node) == Block(*block)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(16, 8), (12, 4), (6, 6), (24, 3), (1, 1)])
def test_covering_blocks_nest(num_ranks: int, ranks_per_node: int) -> None:
    spans = [(lo, hi) for lo in range(num_ranks) for hi in range(lo, num_ranks)]
    blocks = {covering_block(lo, hi, num_ranks, ranks_per_node) for lo, hi in spans}
    for lo, hi in spans:
        block = covering_block(lo, hi, num_ranks, ranks_per_node)
        assert block.lo <= lo <= hi < block.hi <= num_ranks
    for a in blocks:
        for b in blocks:
            assert a.hi <= b.lo or b.hi <= a.lo or (a.lo <= b.lo and b.hi <= a.hi) or (b.lo <= a.lo and a.hi <= b.hi)
    if (num_ranks, ranks_per_node) == (16, 8):
        assert len([block for block in blocks if block.size > 1]) == 15


def test_exchange_blocks_are_disjoint_and_only_where_ranks_share() -> None:
    microbatch = MicrobatchPlan(
        shards=shard_table([Shard(0, 0, 0, 9), Shard(1, 5, 0, 4), Shard(1, 6, 4, 8), Shard(2, 12, 0, 3)]),
        tiles={"k": tile_table([Tile(0, 0, 0, 9, 0, 0, 8), Tile(1, 5, 0, 8, 0, 0, 8), Tile(2, 13, 0, 3, 0, 0, 8)])},
    )
    assert exchange_blocks(microbatch, "k", 16, 8) == (Block(4, 8), Block(12, 14))
    assert shard_blocks(microbatch, 16, 8) == (Block(4, 8),)


def test_moves_concern_only_samples_that_change_owners() -> None:
    """Sample 0 leaves rank 0 for ranks 0 and 1; sample 1 stays; sample 2 is cut otherwise but stays on its rank."""
    home = [Shard(0, 0, 0, 9), Shard(1, 8, 0, 4), Shard(1, 9, 4, 8), Shard(2, 12, 0, 3)]
    other = [Shard(0, 0, 0, 5), Shard(0, 1, 5, 9), *home[1:3], Shard(2, 12, 0, 2), Shard(2, 12, 2, 3)]
    microbatch = MicrobatchPlan(shards=shard_table(home), tiles={}, shards_by_kind={"k": shard_table(other)})
    assert move_blocks(microbatch, "home", "k", 16, 8) == move_blocks(microbatch, "k", "home", 16, 8) == (Block(0, 2),)
    assert move_blocks(microbatch, "home", "another", 16, 8) == ()
    moved = match(microbatch.shards, move_tiles(microbatch.shards_at("k")))
    rows = zip(moved.src.tolist(), moved.dst.tolist(), moved.q_lo.tolist(), moved.q_hi.tolist(), strict=True)
    assert [row for row in rows if row[0] != row[1]] == [(0, 1, 5, 9)]
    assert shard_blocks(microbatch, 16, 8) == (Block(0, 2), Block(8, 10))


def test_overlapping_spans_merge() -> None:
    blocks = merge_spans(np.array([0, 2, 9, 4]), np.array([1, 5, 9, 5]), 16, 8)
    assert blocks == (Block(0, 8),)
    assert all(a.hi <= b.lo for a, b in pairwise(merge_spans(np.array([0, 8]), np.array([7, 15]), 16, 8)))


@pytest.mark.parametrize("seed", range(20))
def test_merged_samples_send_what_they_sent_apart(seed: int) -> None:
    """Bytes between every two ranks, of samples that share heads alike and of samples that do not."""
    rng = np.random.default_rng(seed)
    spec = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=3, v_head_dim=5)
    shards, tiles = [], []
    for sample in range(12):
        length = int(rng.integers(1, 40))
        cuts = np.sort(rng.integers(0, length + 1, 2)).tolist()
        for rank, (lo, hi) in enumerate(pairwise([0, *cuts, length])):
            shards += [Shard(sample, rank, lo, hi)] if lo < hi else []
        if rng.random() < 0.7:
            tiles += [
                Tile(sample, int(r), 0, length, 0, h, h + 4) for h, r in zip((0, 4), rng.permutation(2), strict=True)
            ]
        else:
            middle = length // 2
            tiles += [Tile(sample, 0, 0, middle, 0, 0, 8)] if middle else []
            tiles += [Tile(sample, 2, middle, length, 0, 0, 8)]

    def between_ranks(shard_rows: Table[Shard], tile_rows: Table[Tile]) -> list[list[int]]:
        transfers = match(shard_rows, tile_rows)
        link = transfers.src * 3 + transfers.dst
        moved = elements(transfers, tile_rows, spec)
        return [np.bincount(link, weights=column, minlength=9).tolist() for column in moved]

    apart = (shard_table(shards), tile_table(tiles))
    merged = merge_alike(*apart)
    assert between_ranks(*merged) == between_ranks(*apart)
    assert len(merged[1]) < len(apart[1])


def test_samples_on_one_rank_send_nothing() -> None:
    """Sample 0 stays on rank 1; sample 1's tile is elsewhere; sample 2's shards are on two ranks."""
    shards = shard_table([Shard(0, 1, 0, 5), Shard(1, 0, 0, 7), Shard(2, 0, 0, 4), Shard(2, 1, 4, 8)])
    tiles = tile_table([Tile(0, 1, 0, 5, 0, 0, 8), Tile(1, 1, 0, 7, 0, 0, 8), Tile(2, 0, 0, 8, 0, 0, 8)])
    lain, computed = merge_alike(shards, tiles)
    assert set(computed.column("sample").tolist()) == {1, 2}
    assert int((lain.column("hi") - lain.column("lo")).sum()) == 7 + 8
    alone = merge_alike(shard_table([Shard(0, 1, 0, 5)]), tile_table([Tile(0, 1, 0, 5, 0, 0, 8)]))
    assert [len(table) for table in alone] == [0, 0]
