"""One rank's view of one attention site, or of one move of hidden states: which rows it sends, receives and computes.

A row is one head of one token. Local Q is [T, H, D], seen as T*H rows; the Q rows of a rank's tiles lie tile after tile
as [queries, heads, D]. A RowMap connects the two row spaces over a block of ranks, and its inverse is derived by
swapping its two sides, never built again: the way back, and both backward passes, use the same table. The table holds
pieces, a few per peer, rather than a number per row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerwise.kernels import Segments
from layerwise.kernels.pieces import Pieces
from layerwise.parts import split_tiles
from layerwise.plan import Ints, MicrobatchPlan, Shard, Table, Tile
from layerwise.route.runs import Cut, Runs, cut
from layerwise.spec import AttentionSpec
from layerwise.traffic import MOVE_SPEC, Block, Transfers, match, move_tiles


@dataclass(frozen=True, eq=False)
class Side:
    """Rows of one tensor on this rank that take part in an exchange, as blocks of tokens and heads.

    pieces: in rows; those of one peer in the order both ends agree on, this rank's own one by one as the other side's.
    peer: to or from whom each goes, int64 [pieces], numbers within the block.
    num_rows: rows of the whole tensor.
    once: every row of the tensor is named exactly once, in parts of an attention site by all of them together, so
        arriving rows are stored; otherwise they are summed.
    """

    pieces: Pieces
    peer: Ints
    num_rows: int
    once: bool

    @property
    def num_named(self) -> int:
        """Rows that take part, counted as often as they do."""
        return int(self.pieces.sizes.sum())

    def to(self, device: torch.device) -> Side:
        """The same side with its indices on another device."""
        return replace(self, pieces=self.pieces.to(device))


def listed_side(rows: Tensor, counts: tuple[int, ...], num_rows: int, *, once: bool) -> Side:
    """Rows given by their numbers, int64 [sum of counts], grouped by peer: `counts` of them each."""
    num_tokens = np.array(counts, np.int64)
    first, one, span = (np.full_like(num_tokens, value) for value in (0, 1, num_rows))
    table = np.stack([first, one, one, num_tokens, span, np.cumsum(num_tokens) - num_tokens], axis=1)
    return Side(
        pieces=Pieces(table[num_tokens > 0], rows), peer=np.flatnonzero(num_tokens), num_rows=num_rows, once=once
    )


@dataclass(frozen=True, eq=False)
class RowMap:
    """Rows that leave `src` arrive at `dst`; both are this rank's sides of the exchange."""

    src: Side
    dst: Side

    def inverse(self) -> RowMap:
        """The way back, the same object each time."""
        return self._back

    @cached_property
    def _back(self) -> RowMap:
        return RowMap(self.dst, self.src)

    @cached_property
    def wires(self) -> dict[tuple[int, ...], Any]:
        """What exchanges of this map have worked out once, by the widths of their rows."""
        return {}

    def to(self, device: torch.device) -> RowMap:
        """The same map with its indices on another device."""
        return RowMap(self.src.to(device), self.dst.to(device))

    @cached_property
    def is_identity(self) -> bool:
        """True where, on a rank without peers, nothing is reordered."""
        return self.src.once and self.dst.once and self.src.pieces.same_rows(self.dst.pieces)


@dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One varlen kernel call: the tiles of this rank that share query heads [h0, h1)."""

    h0: int
    h1: int
    num_kv_heads: int
    segments: Segments


@dataclass(frozen=True, kw_only=True, eq=False)
class Route:
    """What one rank does at the attention sites of one layer kind in one micro-batch.

    block: the ranks that exchange, or None where this rank has all it needs.
    to_tiles: row maps of Q, K and V; from_tiles: the row map of the output.
    calls: kernel calls in the order of the tile-side rows.
    """

    block: Block | None
    to_tiles: tuple[RowMap, RowMap, RowMap]
    calls: tuple[KernelCall, ...]

    def filling(self, q_once: bool, kv_once: bool) -> Route:
        """The same route as one of several that fill the same shards, each row once or not."""
        q, kv, _ = self.to_tiles
        q, kv = (RowMap(replace(m.src, once=once), m.dst) for m, once in ((q, q_once), (kv, kv_once)))
        return replace(self, to_tiles=(q, kv, kv))

    @cached_property
    def from_tiles(self) -> tuple[RowMap]:
        """The output rows return the way the Q rows came."""
        return (self.to_tiles[0].inverse(),)

    def to(self, device: torch.device) -> Route:
        """The same route with its indices on another device."""
        if device.type == "cpu":
            return self
        q, k = (row_map.to(device) for row_map in self.to_tiles[:2])
        return replace(self, to_tiles=(q, k, k))


@dataclass(frozen=True, kw_only=True, eq=False)
class Move:
    """What one rank does where hidden states pass from one table of shards to another.

    block: the ranks that exchange, or None where this rank keeps what it has. rows: of the local [T, hidden].
    """

    block: Block | None
    rows: RowMap

    def to(self, device: torch.device) -> Move:
        """The same move with its indices on another device."""
        return self if device.type == "cpu" else Move(block=self.block, rows=self.rows.to(device))

    def inverse(self) -> Move:
        """The way back."""
        return Move(block=self.block, rows=self.rows.inverse())


def build_route(
    microbatch: MicrobatchPlan, kind: str, spec: AttentionSpec, rank: int, blocks: tuple[Block, ...]
) -> Route:
    """The route of `rank` at sites of `kind`; `blocks` are the exchange blocks of the micro-batch at that kind."""
    block, shards, tiles = block_of(rank, blocks), microbatch.shards_at(kind), microbatch.tiles[kind]
    q_map, kv_map = _row_maps(shards, tiles, spec, rank, block)
    my_tiles = tiles.rows[_my_tiles(tiles, spec, rank)]
    return Route(block=block, to_tiles=(q_map, kv_map, kv_map), calls=_kernel_calls(my_tiles, spec))


def build_parts(
    microbatch: MicrobatchPlan, kind: str, spec: AttentionSpec, rank: int, blocks: tuple[Block, ...], num_parts: int
) -> tuple[Route, ...]:
    """The route in parts, each with some of the tiles: as many on all ranks of a block, one without a block."""
    if block_of(rank, blocks) is None:
        return (build_route(microbatch, kind, spec, rank, blocks),)
    parts = [
        build_route(replace(microbatch, tiles={kind: tiles}), kind, spec, rank, blocks)
        for tiles in split_tiles(microbatch.tiles[kind], spec, num_parts)
    ]
    # Parts have the shard side in common: whether its rows go out once is a matter of all of them.
    named = [sum(part.to_tiles[i].src.num_named for part in parts) for i in (0, 1)]
    q_once, kv_once = (num == parts[0].to_tiles[i].src.num_rows for i, num in enumerate(named))
    return tuple(part.filling(q_once, kv_once) for part in parts)


def build_move(source: Table[Shard], target: Table[Shard], rank: int, blocks: tuple[Block, ...]) -> Move:
    """How `rank` takes part where hidden states move; `blocks` are `move_blocks` of the two places."""
    block = block_of(rank, blocks)
    rows, _ = _row_maps(source, move_tiles(target), MOVE_SPEC, rank, block)
    return Move(block=block, rows=rows)


def block_of(rank: int, blocks: tuple[Block, ...]) -> Block | None:
    """The block that holds the rank, or None."""
    return next((b for b in blocks if b.lo <= rank < b.hi), None)


def _my_tiles(tiles: Table[Tile], spec: AttentionSpec, rank: int) -> Ints:
    """Row numbers of this rank's tiles in the order of the tile-side rows: by heads, then sample, then queries."""
    mine = np.flatnonzero(tiles.column("rank") == rank)
    return np.asarray(mine[np.argsort(_head_range(tiles, spec)[mine], kind="stable")])


def _row_maps(
    shards: Table[Shard], tiles: Table[Tile], spec: AttentionSpec, rank: int, block: Block | None
) -> tuple[RowMap, RowMap]:
    """The maps of query rows and of key rows."""
    peers = block or Block(rank, rank + 1)
    my_shards, my_tiles = np.flatnonzero(shards.column("rank") == rank), _my_tiles(tiles, spec, rank)
    leaving, to_group = _in_wire_order(match(shards, tiles, shard_rows=my_shards), tiles, spec, by="dst")
    arriving, from_group = _in_wire_order(match(shards, tiles, tile_rows=np.sort(my_tiles)), tiles, spec, by="src")
    q_map, kv_map = (
        _row_map(
            *_shard_runs(leaving, to_group, shards, tiles, my_shards, spec, is_query=is_query),
            *_tile_runs(arriving, from_group, tiles, my_tiles, spec, is_query=is_query),
            peers,
            rank,
        )
        for is_query in (True, False)
    )
    return q_map, kv_map


def _row_map(leaving: Runs, num_src_rows: int, arriving: Runs, num_dst_rows: int, peers: Block, rank: int) -> RowMap:
    """Rows that stay are cut alike on both sides. In a valid plan every row is needed, so the sum shows duplicates."""
    own = cut(leaving.of_peer(rank), arriving.of_peer(rank))
    sides = (
        _side(cut(runs.but_peer(rank))[0], own_pieces, peers, num_rows)
        for runs, own_pieces, num_rows in zip((leaving, arriving), own, (num_src_rows, num_dst_rows), strict=True)
    )
    return RowMap(*sides)


def _side(others: Cut, own: Cut, peers: Block, num_rows: int) -> Side:
    table = np.concatenate([others.table, own.table])
    begin = table[len(others.table) :, 5]
    begin[begin >= 0] += len(others.listed)
    pieces = Pieces(table, torch.from_numpy(np.concatenate([others.listed, own.listed])))
    peer = np.concatenate([others.peer, own.peer]) - peers.lo
    return Side(pieces=pieces, peer=peer, num_rows=num_rows, once=int(pieces.sizes.sum()) == num_rows)


def _in_wire_order(transfers: Transfers, tiles: Table[Tile], spec: AttentionSpec, by: str) -> tuple[Transfers, Ints]:
    """Sorted by peer, then by the tile order of the receiver, then by position: the same order at both ends.

    Also the number of each transfer's peer and heads. `match` has sorted by sample, queries and position already.
    """
    group = getattr(transfers, by) * (spec.num_heads + 1) ** 2 + _head_range(tiles, spec)[transfers.tile]
    order = np.argsort(group, kind="stable")
    return Transfers(**{name: column[order] for name, column in vars(transfers).items()}), group[order]


def _head_range(tiles: Table[Tile], spec: AttentionSpec) -> Ints:
    """A number for the heads of each tile, ascending with h0, then h1."""
    return tiles.column("h0") * (spec.num_heads + 1) + tiles.column("h1")


def _ranges(transfers: Transfers, is_query: bool) -> tuple[Ints, Ints]:
    return (transfers.q_lo, transfers.q_hi) if is_query else (transfers.k_lo, transfers.k_hi)


def _heads(h0: Ints, h1: Ints, spec: AttentionSpec, is_query: bool) -> tuple[Ints, Ints]:
    return (h0, h1) if is_query else spec.kv_range(h0, h1)


def _shard_runs(
    leaving: Transfers,
    group: Ints,
    shards: Table[Shard],
    tiles: Table[Tile],
    my_shards: Ints,
    spec: AttentionSpec,
    *,
    is_query: bool,
) -> tuple[Runs, int]:
    """Rows of the local [T, heads] that go to each peer, and how many the tensor has."""
    lengths = shards.column("hi")[my_shards] - shards.column("lo")[my_shards]
    first_token = np.zeros(len(shards), np.int64)
    first_token[my_shards] = np.cumsum(lengths) - lengths
    lo, hi = _ranges(leaving, is_query)
    h0, h1 = _heads(tiles.column("h0")[leaving.tile], tiles.column("h1")[leaving.tile], spec, is_query)
    num_heads = spec.num_heads if is_query else spec.num_kv_heads
    token = first_token[leaving.shard] + lo - shards.column("lo")[leaving.shard]
    runs = Runs(
        peer=leaving.dst,
        group=group,
        first=token * num_heads + h0,
        stride=np.full_like(token, num_heads),
        width=h1 - h0,
        length=hi - lo,
    )
    return runs.nonempty(), int(lengths.sum()) * num_heads


def _tile_runs(
    arriving: Transfers, group: Ints, tiles: Table[Tile], my_tiles: Ints, spec: AttentionSpec, *, is_query: bool
) -> tuple[Runs, int]:
    """Rows of this rank's tiles that come from each peer, and how many there are.

    Each tile's rows are [tokens, heads], tile after tile.
    """
    mine = {name: tiles.column(name)[my_tiles] for name in Tile._fields}
    begin = mine["q0"] if is_query else mine["k0"]
    h0, h1 = _heads(mine["h0"], mine["h1"], spec, is_query)
    sizes = (mine["q1"] - begin) * (h1 - h0)
    base, heads, start = (np.zeros(len(tiles), np.int64) for _ in range(3))
    base[my_tiles], heads[my_tiles], start[my_tiles] = np.cumsum(sizes) - sizes, h1 - h0, begin
    lo, hi = _ranges(arriving, is_query)
    width = heads[arriving.tile]
    runs = Runs(
        peer=arriving.src,
        group=group,
        first=base[arriving.tile] + (lo - start[arriving.tile]) * width,
        stride=width,
        width=width,
        length=hi - lo,
    )
    return runs.nonempty(), int(sizes.sum())


def _kernel_calls(tiles: Ints, spec: AttentionSpec) -> tuple[KernelCall, ...]:
    """Tiles in tile order, grouped by head range; a rank without tiles still makes one call, of no segments."""
    _, _, q0, q1, k0, h0, h1 = tiles.T
    if not len(tiles):
        return (_kernel_call(0, spec.num_heads, [], [], spec),)
    # A tile is one kernel segment, or one per chunk of positions.
    chunk = spec.chunk or int(q1.max())
    counts = -(-(q1 - k0) // chunk)
    ends = np.cumsum(counts)
    lo = np.repeat(k0 - (ends - counts) * chunk, counts) + np.arange(ends[-1]) * chunk
    hi = np.minimum(lo + chunk, np.repeat(q1, counts))
    queries, keys = (hi - np.maximum(lo, np.repeat(q0, counts))).tolist(), (hi - lo).tolist()
    begins = np.flatnonzero(np.append(True, (h0[1:] != h0[:-1]) | (h1[1:] != h1[:-1])))
    cuts = [*(ends - counts)[begins].tolist(), len(keys)]
    heads = zip(h0[begins].tolist(), h1[begins].tolist(), pairwise(cuts), strict=True)
    return tuple(_kernel_call(a, b, queries[i:j], keys[i:j], spec) for a, b, (i, j) in heads)


def _kernel_call(h0: int, h1: int, queries: list[int], keys: list[int], spec: AttentionSpec) -> KernelCall:
    kv0, kv1 = spec.kv_range(h0, h1)
    return KernelCall(h0=h0, h1=h1, num_kv_heads=kv1 - kv0, segments=Segments(tuple(queries), tuple(keys)))
