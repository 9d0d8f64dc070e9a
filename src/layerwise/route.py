"""One rank's view of one attention site, or of one move of hidden states: which rows it sends, receives and computes.

A row is one head of one token. Local Q is [T, H, D], seen as T*H rows; the Q rows of a rank's tiles lie tile after tile
as [queries, heads, D]. A RowMap connects the two row spaces over a block of ranks, and its inverse is derived by
swapping its two sides, never built again: the way back, and both backward passes, use the same table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from layerwise.kernels import Segments
from layerwise.plan import Ints, MicrobatchPlan, Shard, Table, Tile
from layerwise.spec import AttentionSpec
from layerwise.traffic import MOVE_SPEC, Block, Transfers, match, move_tiles


@dataclass(frozen=True, eq=False)
class Side:
    """Rows of one tensor on this rank that take part in a site.

    rows: int64 [sum of counts], row numbers grouped by peer, each peer's in the order both ends agree on.
    counts: rows per peer of the block.
    num_rows: rows of the whole tensor.
    once: every row of the tensor is named exactly once, so arriving rows are stored; otherwise they are summed.
    """

    rows: Tensor
    counts: tuple[int, ...]
    num_rows: int
    once: bool

    def by_peer(self) -> tuple[Tensor, ...]:
        """The row numbers for each peer."""
        return self.rows.split(self.counts)


@dataclass(frozen=True, eq=False)
class RowMap:
    """Rows that leave `src` arrive at `dst`; both are this rank's sides of the exchange."""

    src: Side
    dst: Side

    def inverse(self) -> RowMap:
        """The way back."""
        return RowMap(self.dst, self.src)

    @cached_property
    def is_identity(self) -> bool:
        """True where nothing moves and nothing is reordered."""
        src, dst = self.src, self.dst
        return src.once and dst.once and len(src.counts) == 1 and torch.equal(src.rows, dst.rows)

    def to(self, device: torch.device) -> RowMap:
        """The same map with its row numbers on another device."""
        return RowMap(*(replace(side, rows=side.rows.to(device, non_blocking=True)) for side in (self.src, self.dst)))


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

    @cached_property
    def from_tiles(self) -> tuple[RowMap]:
        """The output rows return the way the Q rows came."""
        return (self.to_tiles[0].inverse(),)

    def to(self, device: torch.device) -> Route:
        """The same route with its row numbers on another device."""
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
        """The same move with its row numbers on another device."""
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
    my_tiles = tiles.rows[_my_tiles(tiles, rank)]
    return Route(block=block, to_tiles=(q_map, kv_map, kv_map), calls=_kernel_calls(my_tiles, spec))


def build_move(source: Table[Shard], target: Table[Shard], rank: int, blocks: tuple[Block, ...]) -> Move:
    """How `rank` takes part where hidden states move; `blocks` are `move_blocks` of the two places."""
    block = block_of(rank, blocks)
    rows, _ = _row_maps(source, move_tiles(target), MOVE_SPEC, rank, block)
    return Move(block=block, rows=rows)


def block_of(rank: int, blocks: tuple[Block, ...]) -> Block | None:
    """The block that holds the rank, or None."""
    return next((b for b in blocks if b.lo <= rank < b.hi), None)


def _my_tiles(tiles: Table[Tile], rank: int) -> Ints:
    """Row numbers of this rank's tiles in the order of the tile-side rows."""
    mine = np.flatnonzero(tiles.column("rank") == rank)
    return np.asarray(mine[np.lexsort([tiles.column(name)[mine] for name in ("q0", "sample", "h1", "h0")])])


def _row_maps(
    shards: Table[Shard], tiles: Table[Tile], spec: AttentionSpec, rank: int, block: Block | None
) -> tuple[RowMap, RowMap]:
    """The maps of query rows and of key rows."""
    peers = block or Block(rank, rank + 1)
    my_shards, my_tiles = np.flatnonzero(shards.column("rank") == rank), _my_tiles(tiles, rank)
    leaving = _in_wire_order(match(shards, tiles, shard_rows=my_shards), shards, tiles, by="dst")
    arriving = _in_wire_order(match(shards, tiles, tile_rows=np.sort(my_tiles)), shards, tiles, by="src")
    q_map, kv_map = (
        RowMap(
            _shard_side(leaving, shards, tiles, my_shards, spec, peers, is_query=is_query),
            _tile_side(arriving, tiles, my_tiles, spec, peers, is_query=is_query),
        )
        for is_query in (True, False)
    )
    return q_map, kv_map


def _in_wire_order(transfers: Transfers, shards: Table[Shard], tiles: Table[Tile], by: str) -> Transfers:
    """Sorted by peer, then by the tile order of the receiver, then by position: the same order at both ends."""
    keys = [shards.column("lo")[transfers.shard]]
    keys += [tiles.column(name)[transfers.tile] for name in ("q0", "sample", "h1", "h0")]
    order = np.lexsort([*keys, getattr(transfers, by)])
    return Transfers(**{name: column[order] for name, column in vars(transfers).items()})


def _ranges(transfers: Transfers, is_query: bool) -> tuple[Ints, Ints]:
    return (transfers.q_lo, transfers.q_hi) if is_query else (transfers.k_lo, transfers.k_hi)


def _heads(h0: Ints, h1: Ints, spec: AttentionSpec, is_query: bool) -> tuple[Ints, Ints]:
    return (h0, h1) if is_query else spec.kv_range(h0, h1)


def _shard_side(
    leaving: Transfers,
    shards: Table[Shard],
    tiles: Table[Tile],
    my_shards: Ints,
    spec: AttentionSpec,
    peers: Block,
    *,
    is_query: bool,
) -> Side:
    """Rows of the local [T, heads] that go to each peer."""
    lengths = shards.column("hi")[my_shards] - shards.column("lo")[my_shards]
    first_token = np.zeros(len(shards), np.int64)
    first_token[my_shards] = np.cumsum(lengths) - lengths
    lo, hi = _ranges(leaving, is_query)
    h0, h1 = _heads(tiles.column("h0")[leaving.tile], tiles.column("h1")[leaving.tile], spec, is_query)
    num_heads = spec.num_heads if is_query else spec.num_kv_heads
    token = first_token[leaving.shard] + lo - shards.column("lo")[leaving.shard]
    rows = _block_rows(token, hi - lo, num_heads, h0, h1 - h0)
    return _side(rows, (hi - lo) * (h1 - h0), leaving.dst, peers, int(lengths.sum()) * num_heads)


def _tile_side(
    arriving: Transfers,
    tiles: Table[Tile],
    my_tiles: Ints,
    spec: AttentionSpec,
    peers: Block,
    *,
    is_query: bool,
) -> Side:
    """Rows of this rank's tiles that come from each peer; each tile's rows are [tokens, heads], tile after tile."""
    mine = {name: tiles.column(name)[my_tiles] for name in Tile._fields}
    begin = mine["q0"] if is_query else mine["k0"]
    h0, h1 = _heads(mine["h0"], mine["h1"], spec, is_query)
    sizes = (mine["q1"] - begin) * (h1 - h0)
    base, heads, start = (np.zeros(len(tiles), np.int64) for _ in range(3))
    base[my_tiles], heads[my_tiles], start[my_tiles] = np.cumsum(sizes) - sizes, h1 - h0, begin
    lo, hi = _ranges(arriving, is_query)
    width = heads[arriving.tile]
    first_row = base[arriving.tile] + (lo - start[arriving.tile]) * width
    rows = _block_rows(first_row, np.ones_like(lo), 1, np.zeros_like(lo), (hi - lo) * width)
    return _side(rows, (hi - lo) * width, arriving.src, peers, int(sizes.sum()))


def _block_rows(first: Ints, num: Ints, stride: int, offset: Ints, width: Ints) -> Ints:
    """Rows (first + i) * stride + offset + j for i < num, j < width of every block, block after block."""
    sizes = num * width
    within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    i, j = np.divmod(within, np.repeat(width, sizes))
    return (np.repeat(first, sizes) + i) * stride + np.repeat(offset, sizes) + j


def _side(rows: Ints, sizes: Ints, peer: Ints, peers: Block, num_rows: int) -> Side:
    counts = np.bincount(peer - peers.lo, weights=sizes, minlength=peers.size).astype(np.int64)
    once = len(rows) == num_rows and bool((np.bincount(rows, minlength=num_rows) == 1).all())
    return Side(torch.from_numpy(rows), tuple(counts.tolist()), num_rows, once)


def _kernel_calls(rows: Ints, spec: AttentionSpec) -> tuple[KernelCall, ...]:
    """Tiles in tile order, grouped by head range; a rank without tiles still makes one call, of no segments."""
    tiles = [Tile(*row) for row in rows.tolist()]
    heads = dict.fromkeys((tile.h0, tile.h1) for tile in tiles) or {(0, spec.num_heads): None}
    calls = []
    for h0, h1 in heads:
        pieces = [piece for tile in tiles if (tile.h0, tile.h1) == (h0, h1) for piece in _segments(tile, spec.chunk)]
        kv0, kv1 = spec.kv_range(h0, h1)
        segments = Segments(tuple(q for q, _ in pieces), tuple(k for _, k in pieces))
        calls.append(KernelCall(h0=h0, h1=h1, num_kv_heads=kv1 - kv0, segments=segments))
    return tuple(calls)


def _segments(tile: Tile, chunk: int | None) -> Iterator[tuple[int, int]]:
    """(queries, keys) of a tile's kernel segments: one, or one per chunk of positions."""
    for lo in range(tile.k0, tile.q1, chunk or tile.q1):
        hi = min(lo + chunk, tile.q1) if chunk else tile.q1
        yield hi - max(lo, tile.q0), hi - lo
