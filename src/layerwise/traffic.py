"""Who sends what to whom: the pairs of shards and tiles that share tokens, and the bytes that follow.

Where hidden states move from shards to other shards, the new shards are taken as tiles of one head (`move_tiles`).

The runtime builds its routes from these pairs and the cost model counts bytes from them, so a prediction and a real
step cannot disagree. Ranks that share traffic at a site form an exchange group: an aligned block of ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerwise.plan import Ints, MicrobatchPlan, Shard, Table, Tile, shard_table, tile_table
from layerwise.spec import AttentionSpec


@dataclass(frozen=True, eq=False)
class Transfers:
    """Pairs of one shard and one tile of the same sample that share keys; every field is int64 [pairs].

    `shard` and `tile` are row numbers; the shard's rank `src` sends queries [q_lo, q_hi) (maybe none) and keys
    [k_lo, k_hi) to the tile's rank `dst`, and gets the output rows of the queries back.
    """

    shard: Ints
    tile: Ints
    src: Ints
    dst: Ints
    q_lo: Ints
    q_hi: Ints
    k_lo: Ints
    k_hi: Ints


def match(
    shards: Table[Shard], tiles: Table[Tile], shard_rows: Ints | None = None, tile_rows: Ints | None = None
) -> Transfers:
    """All shard-tile pairs that share tokens, or those among the given row numbers (ascending)."""
    s_index = np.arange(len(shards)) if shard_rows is None else shard_rows
    t_index = np.arange(len(tiles)) if tile_rows is None else tile_rows
    # Both tables are sorted by sample, so the shards of a tile's sample are one run.
    s_sample, t_sample = shards.column("sample")[s_index], tiles.column("sample")[t_index]
    start = np.searchsorted(s_sample, t_sample, side="left")
    count = np.searchsorted(s_sample, t_sample, side="right") - start
    tile = np.repeat(t_index, count)
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    shard = s_index[np.repeat(start, count) + within]

    lo, hi = shards.column("lo")[shard], shards.column("hi")[shard]
    q0, q1, k0 = (tiles.column(name)[tile] for name in ("q0", "q1", "k0"))
    k_lo, k_hi = np.maximum(lo, k0), np.minimum(hi, q1)
    keep = k_lo < k_hi
    shard, tile, lo, q0, k_lo, k_hi = (a[keep] for a in (shard, tile, lo, q0, k_lo, k_hi))
    q_lo = np.minimum(np.maximum(lo, q0), k_hi)
    src, dst = shards.column("rank")[shard], tiles.column("rank")[tile]
    return Transfers(shard, tile, src, dst, q_lo, k_hi, k_lo, k_hi)


def merge_alike(shards: Table[Shard], tiles: Table[Tile]) -> tuple[Table[Shard], Table[Tile]]:
    """Fewer, longer samples with the same traffic between the same ranks: to count bytes by, not to run.

    Samples that stay on one rank send nothing and are left out. Where every tile takes all queries and keys of its
    sample, what a shard sends it is proportional to its own size. So samples whose heads are divided over ranks in the
    same way send together what one sample of their total length would. Other samples stay as they are.
    """
    shards, tiles = _spread(shards, tiles)
    sample, q0, q1, k0 = (tiles.column(name) for name in ("sample", "q0", "q1", "k0"))
    begins = np.flatnonzero(np.diff(sample, prepend=-1))
    samples = sample[begins]
    length = np.zeros(int(sample.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(length, shards.column("sample"), shards.column("hi"))
    whole = np.zeros(len(length), dtype=bool)
    whole[samples] = np.logical_and.reduceat((q0 == 0) & (k0 == 0) & (q1 == length[sample]), begins)
    if not whole.any():
        return shards, tiles
    leader = _leaders(tiles, begins, whole)

    mine = whole[shards.column("sample")]
    width = int(shards.column("rank").max()) + 1
    owner = leader[shards.column("sample")[mine]] * width + shards.column("rank")[mine]
    owners, where = np.unique(owner, return_inverse=True)
    sizes = np.bincount(where, weights=(shards.column("hi") - shards.column("lo"))[mine]).astype(np.int64)
    group, rank = np.divmod(owners, width)
    ends, starts = np.cumsum(sizes), np.flatnonzero(np.diff(group, prepend=-1))
    before = np.repeat((ends - sizes)[starts], np.diff(starts, append=len(group)))
    pooled = np.stack([group, rank, ends - sizes - before, ends - before], axis=1)

    total = np.bincount(leader[samples], weights=length[samples], minlength=len(length)).astype(np.int64)
    rows = tiles.rows[leader[sample] == sample].copy()
    rows[:, 3] = np.where(whole[rows[:, 0]], total[rows[:, 0]], rows[:, 3])
    return shard_table(np.concatenate([pooled, shards.rows[~mine]])), tile_table(rows)


def _spread(shards: Table[Shard], tiles: Table[Tile]) -> tuple[Table[Shard], Table[Tile]]:
    """The shards and tiles of samples that lie on more than one rank."""
    tables = [(table.column("sample"), table.column("rank")) for table in (shards, tiles)]
    size = max(int(sample.max(initial=-1)) for sample, _ in tables) + 1
    some_rank, spread = np.full(size, -1), np.zeros(size, dtype=bool)
    for sample, rank in tables:
        some_rank[sample] = rank
    for sample, rank in tables:
        spread[sample[rank != some_rank[sample]]] = True
    mine, theirs = (spread[sample] for sample, _ in tables)
    return shards.take(mine), tiles.take(theirs)


def _leaders(tiles: Table[Tile], begins: Ints, whole: NDArray[np.bool_]) -> Ints:
    """For each sample, the first whose tiles have the same ranks and heads; itself unless it is `whole`."""
    leader = np.arange(len(whole))
    samples, num_tiles = tiles.column("sample")[begins], np.diff(begins, append=len(tiles))
    shared = whole[samples]
    rows, seen = np.ascontiguousarray(tiles.rows[:, [1, 5, 6]]), dict[bytes, int]()
    for sample, lo, count in zip(
        samples[shared].tolist(), begins[shared].tolist(), num_tiles[shared].tolist(), strict=True
    ):
        leader[sample] = seen.setdefault(rows[lo : lo + count].tobytes(), sample)
    return leader


class SiteElements(NamedTuple):
    """Elements that each transfer moves at one attention site, int64 [pairs]."""

    to_tiles: Ints  # Q, K and V rows forward, and their gradients backward
    from_tiles: Ints  # output rows forward, and their gradients backward


def elements(transfers: Transfers, tiles: Table[Tile], spec: AttentionSpec) -> SiteElements:
    """Elements (not bytes) that each transfer moves; K and V rows travel once per KV head, never expanded.

    A mixer in one piece has hidden states for Q rows, and no K and V rows.
    """
    h0, h1 = tiles.column("h0")[transfers.tile], tiles.column("h1")[transfers.tile]
    kv0, kv1 = spec.kv_range(h0, h1)
    queries, keys = transfers.q_hi - transfers.q_lo, transfers.k_hi - transfers.k_lo
    q_rows, kv_rows = queries * (h1 - h0), keys * (kv1 - kv0) * (spec.mixer is None)
    return SiteElements(q_rows * spec.head_dim + kv_rows * (spec.head_dim + spec.v_head_dim), q_rows * spec.v_head_dim)


# Hidden states as the rows of one head: what `move_tiles` are tiles of, whatever the hidden size.
MOVE_SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=1, v_head_dim=1, window=1)


def move_tiles(shards: Table[Shard]) -> Table[Tile]:
    """These shards as the tiles that hidden states go to: one row per token, on the shard's rank."""
    sample, rank, lo, hi = shards.rows.T
    return tile_table(np.stack([sample, rank, lo, hi, lo, np.zeros_like(lo), np.ones_like(lo)], axis=1))


@dataclass(frozen=True, order=True)
class Block:
    """The ranks [lo, hi): the unit in which exchange groups exist."""

    lo: int
    hi: int

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.hi - self.lo


def covering_block(lo: int, hi: int, num_ranks: int, ranks_per_node: int) -> Block:
    """The smallest aligned block with ranks lo..hi (inclusive): a power of two inside a node, or of nodes.

    Blocks nest, so few distinct groups exist however plans change: 15 for 2 nodes x 8 ranks.
    """
    size = 1
    while size < ranks_per_node and (lo // ranks_per_node == hi // ranks_per_node):
        node = lo // ranks_per_node * ranks_per_node
        first = node + (lo - node) // size * size
        if hi < first + size:
            return Block(first, min(first + size, node + ranks_per_node, num_ranks))
        size *= 2
    size = ranks_per_node
    while lo // size != hi // size:
        size *= 2
    return Block(lo // size * size, min((lo // size + 1) * size, num_ranks))


def exchange_blocks(microbatch: MicrobatchPlan, kind: str, num_ranks: int, ranks_per_node: int) -> tuple[Block, ...]:
    """The groups that exchange at sites of this kind: disjoint blocks of two ranks or more, ascending.

    A rank outside all of them has everything it needs and runs no collective.
    """
    return merge_spans(*_spans(microbatch.shards_at(kind), microbatch.tiles[kind]), num_ranks, ranks_per_node)


def shard_blocks(microbatch: MicrobatchPlan, num_ranks: int, ranks_per_node: int) -> tuple[Block, ...]:
    """The groups of ranks that hold parts of the same samples, in any layer, as `exchange_blocks`."""
    return merge_spans(*_spans(*microbatch.places.values()), num_ranks, ranks_per_node)


def move_blocks(
    microbatch: MicrobatchPlan, source: str, target: str, num_ranks: int, ranks_per_node: int
) -> tuple[Block, ...]:
    """The groups between which hidden states move from one place to another, as `exchange_blocks`.

    A place is HOME or a layer kind. Samples whose shards are the same in both add no rank.
    """
    moved = match(microbatch.shards_at(source), move_tiles(microbatch.shards_at(target)))
    return merge_spans(np.minimum(moved.src, moved.dst), np.maximum(moved.src, moved.dst), num_ranks, ranks_per_node)


def _spans(*tables: Table[Shard] | Table[Tile]) -> tuple[Ints, Ints]:
    """The lowest and the highest rank that each sample touches."""
    sample = np.concatenate([table.column("sample") for table in tables])
    rank = np.concatenate([table.column("rank") for table in tables])
    order = np.argsort(sample, kind="stable")
    sample, rank = sample[order], rank[order]
    starts = np.flatnonzero(np.diff(sample, prepend=-1))
    if not len(starts):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    return np.minimum.reduceat(rank, starts), np.maximum.reduceat(rank, starts)


def merge_spans(lo: Ints, hi: Ints, num_ranks: int, ranks_per_node: int) -> tuple[Block, ...]:
    """The largest covering blocks of the rank spans lo..hi (inclusive), int64 [spans] each."""
    spans = [divmod(span, num_ranks) for span in np.unique(lo * num_ranks + hi).tolist()]
    blocks = sorted({covering_block(a, b, num_ranks, ranks_per_node) for a, b in spans}, key=lambda b: (b.lo, -b.hi))
    outer: list[Block] = []
    for block in blocks:
        if block.size > 1 and (not outer or block.lo >= outer[-1].hi):
            outer.append(block)
    return tuple(outer)
