"""The one exchange: rows in, rows out, over one all-to-all.

`exchange` is the only autograd function of the runtime. Forward moves rows along a tuple of row maps; backward
moves the
gradients along their inverses. Rows that a rank sends to itself never touch the wire, nothing is padded, and a rank
whose rows are all its own runs no collective.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.route import RowMap, Side
from layerwise.traffic import Block


class Comm(Protocol):
    """A block of ranks that can talk to one another."""

    @property
    def block(self) -> Block:
        """The ranks."""

    @property
    def peer(self) -> int:
        """This rank's number among them."""

    def all_to_all(self, send: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        """Exchange a flat buffer; splits are elements per peer. Returns a flat contiguous buffer."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the block, in place."""


@dataclass(frozen=True, eq=False)
class GroupComm:
    """A block over torch.distributed; the group's ranks are the block's, in order."""

    block: Block
    peer: int
    group: Any

    def all_to_all(self, send: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
        recv = send.new_empty(sum(recv_splits))
        dist.all_to_all_single(recv, send, recv_splits, send_splits, group=self.group)
        return recv

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


@dataclass
class Count:
    """What one rank sent at the sites of one layer kind, or in moves: all-to-all calls, and bytes by link."""

    calls: int = 0
    fast_bytes: int = 0
    slow_bytes: int = 0


@dataclass
class Meter:
    """Counts what really goes on the wire, by layer kind; moves of hidden states count apart."""

    ranks_per_node: int
    counts: dict[str, Count] = field(default_factory=dict)

    def add(self, kind: str, comm: Comm, sent_bytes: Sequence[int]) -> None:
        """Record one all-to-all that sends `sent_bytes` to each peer."""
        count = self.counts.setdefault(kind, Count())
        count.calls += 1
        my_node = (comm.block.lo + comm.peer) // self.ranks_per_node
        for peer, num_bytes in enumerate(sent_bytes):
            if (comm.block.lo + peer) // self.ranks_per_node == my_node:
                count.fast_bytes += num_bytes
            else:
                count.slow_bytes += num_bytes


@dataclass(frozen=True, eq=False)
class Site:
    """Where an exchange takes place: the layer kind or "moves", the ranks (None: no peers) and the meter."""

    kind: str
    comm: Comm | None
    meter: Meter


def exchange(tensors: tuple[Tensor, ...], maps: tuple[RowMap, ...], site: Site) -> tuple[Tensor, ...]:
    """Move rows of several tensors in one all-to-all.

    tensors: one [num_rows, width] tensor per map, of one dtype and device; widths may differ (V dim unlike QK dim).
    Returns one [map.dst.num_rows, width] tensor per map, contiguous. Differentiable: where a source row went to
    several places, its gradient is their sum, accumulated in float32 or better.
    """
    if site.comm is None and all(row_map.is_identity for row_map in maps):
        return tensors
    return _Exchange.apply(maps, site, *tensors)


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, maps: tuple[RowMap, ...], site: Site, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.inverse_maps, ctx.site = tuple(row_map.inverse() for row_map in maps), site
        return _move(tensors, maps, site)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return (None, None, *_move(grads, ctx.inverse_maps, ctx.site))


def _move(tensors: tuple[Tensor, ...], maps: tuple[RowMap, ...], site: Site) -> tuple[Tensor, ...]:
    me = 0 if site.comm is None else site.comm.peer
    sources, targets = [m.src for m in maps], [m.dst for m in maps]
    outs = [_new_output(x, side) for x, side in zip(tensors, targets, strict=True)]
    for x, out, source, target in zip(tensors, outs, sources, targets, strict=True):
        _store(out, target.by_peer()[me], x.index_select(0, source.by_peer()[me]), target)
    if site.comm is not None:
        widths = [x.shape[1] for x in tensors]
        send_splits, recv_splits = _splits(widths, sources, me), _splits(widths, targets, me)
        send = tensors[0].new_empty(sum(send_splits))
        for index, rows, part in _wire_parts(send, widths, sources, me):
            torch.index_select(tensors[index], 0, rows, out=part)
        site.meter.add(site.kind, site.comm, [n * send.dtype.itemsize for n in send_splits])
        recv = site.comm.all_to_all(send, send_splits, recv_splits)
        for index, rows, part in _wire_parts(recv, widths, targets, me):
            _store(outs[index], rows, part, targets[index])
    return tuple(out.to(x.dtype) for x, out in zip(tensors, outs, strict=True))


def _new_output(x: Tensor, side: Side) -> Tensor:
    """Uninitialised where every row arrives once; otherwise zeros to sum into, in float32 or better."""
    shape = (side.num_rows, x.shape[1])
    return x.new_empty(shape) if side.once else x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))


def _store(out: Tensor, rows: Tensor, values: Tensor, side: Side) -> None:
    if side.once:
        out.index_copy_(0, rows, values)
    else:
        out.index_add_(0, rows, values.to(out.dtype))


def _splits(widths: list[int], sides: list[Side], me: int) -> list[int]:
    """Elements on the wire per peer; none to ourselves."""
    per_peer = zip(*(side.counts for side in sides), strict=True)
    totals = [sum(width * count for width, count in zip(widths, counts, strict=True)) for counts in per_peer]
    return [0 if peer == me else total for peer, total in enumerate(totals)]


def _wire_parts(flat: Tensor, widths: list[int], sides: list[Side], me: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(tensor, its row numbers, their [rows, width] view of the flat buffer), in wire order: by peer, then tensor."""
    rows = [side.by_peer() for side in sides]
    offset = 0
    for peer in range(len(sides[0].counts)):
        if peer == me:
            continue
        for index, width in enumerate(widths):
            count = sides[index].counts[peer]
            if count:
                yield index, rows[index][peer], flat[offset : offset + count * width].view(count, width)
            offset += count * width
