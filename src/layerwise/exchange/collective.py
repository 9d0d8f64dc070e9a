"""The one exchange: rows in, rows out, over one all-to-all.

`exchange` is the only autograd function of the runtime. Forward moves rows along a tuple of row maps; backward
moves the gradients along their inverses. Rows that a rank sends to itself never touch the wire, nothing is padded, and
a rank whose rows are all its own runs no collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.profiler import record_function

from layerwise.exchange.check_calls import CHECKS_CALLS, compare_call
from layerwise.exchange.graph_break import outside_graph
from layerwise.exchange.progress import Progress, waiting
from layerwise.exchange.staging import STAGING
from layerwise.exchange.waits import WaitClock
from layerwise.exchange.wire import wire_of
from layerwise.kernels.rows import move_rows
from layerwise.route import RowMap, Side
from layerwise.traffic import Block


class Pending(Protocol):
    """A collective that was begun."""

    def wait(self) -> Any:
        """Return when its result may be used."""


class Comm(Protocol):
    """A block of ranks that can talk to one another."""

    @property
    def block(self) -> Block:
        """The ranks."""

    @property
    def peer(self) -> int:
        """This rank's number among them."""

    def start_all_to_all(self, send: Tensor, recv: Tensor, send_splits: list[int], recv_splits: list[int]) -> Pending:
        """Begin to exchange flat buffers, by elements per peer; neither may be touched before the wait."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the block, in place."""


@dataclass(frozen=True, eq=False)
class GroupComm:
    """A block over torch.distributed; the group's ranks are the block's, in order."""

    block: Block
    peer: int
    group: Any

    def start_all_to_all(self, send: Tensor, recv: Tensor, send_splits: list[int], recv_splits: list[int]) -> Pending:
        return dist.all_to_all_single(recv, send, recv_splits, send_splits, group=self.group, async_op=True)

    def all_reduce(self, tensor: Tensor) -> None:
        dist.all_reduce(tensor, group=self.group)


def all_to_all(comm: Comm, send: Tensor, send_splits: list[int], recv_splits: list[int]) -> Tensor:
    """Exchange a flat buffer; splits are elements per peer. Returns a new flat buffer."""
    recv = send.new_empty(sum(recv_splits))
    comm.start_all_to_all(send, recv, send_splits, recv_splits).wait()
    return recv


@dataclass
class Count:
    """What one rank sent at the sites of one layer kind, or in moves: all-to-all calls, and bytes by link."""

    calls: int = 0
    fast_bytes: int = 0
    slow_bytes: int = 0


@dataclass
class Meter:
    """Counts what really goes on the wire and how long this rank waited for it, by layer kind; moves count apart."""

    ranks_per_node: int
    counts: dict[str, Count] = field(default_factory=dict)
    waits: WaitClock = field(default_factory=WaitClock)

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
    """Where an exchange takes place: the layer kind or "moves", the ranks (None: no peers) and the meter.

    progress: where this rank is; exchanges keep it.
    A profiler sees a site as layerwise.NAME.KIND, its way back through autograd as layerwise.NAME.KIND.backward.
    """

    kind: str
    comm: Comm | None
    meter: Meter
    name: str = "exchange"
    progress: Progress = field(default_factory=Progress)


def range_name(name: str, kind: str) -> str:
    """What a profiler calls a part of a layer of this kind."""
    return f"layerwise.{name}.{kind}"


def profiler_range(name: str) -> AbstractContextManager[Any]:
    """What a profiler sees under this name. Without one it costs nothing: a range takes as long as a small copy."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()


@outside_graph
def exchange(tensors: tuple[Tensor, ...], maps: tuple[RowMap, ...], site: Site) -> tuple[Tensor, ...]:
    """Move rows of several tensors in one all-to-all.

    tensors: one [num_rows, width] tensor per map, of one dtype and device; widths may differ (V dim unlike QK dim).
    Returns one [map.dst.num_rows, width] tensor per map, contiguous. Differentiable: where a source row went to
    several places, its gradient is their sum, accumulated in float32 or better.
    """
    flights = (Flight(maps, site),)
    return land(flights, depart(flights, tensors))


# What `land` needs of a flight: an empty tensor that ties both ends in the autograd graph, or rows that stay.
Ticket = tuple[Tensor, ...]


class Flight:
    """Rows on their way: one all-to-all forward and one backward, each begun at one point and completed at another.

    Between `depart` and `land` the rank may compute. All ranks of the block must begin their flights in the same order.
    """

    def __init__(self, maps: tuple[RowMap, ...], site: Site) -> None:
        self.forward = _Leg(maps, site, range_name(site.name, site.kind), backward=False)
        inverse = tuple(row_map.inverse() for row_map in maps)
        self.backward = _Leg(inverse, site, range_name(site.name, f"{site.kind}.backward"), backward=True)


def depart(flights: tuple[Flight, ...], tensors: tuple[Tensor, ...]) -> list[Ticket]:
    """Begin all flights, each with its own rows of the same tensors. Returns a ticket per flight, for `land`."""
    if len(flights) == 1 and flights[0].forward.is_idle:
        return [tensors]
    return [(ticket,) for ticket in _Depart.apply(flights, *(x.contiguous() for x in tensors))]


def land(flights: tuple[Flight, ...], tickets: list[Ticket]) -> tuple[Tensor, ...]:
    """Complete the flights, in this order, into the same tensors. Together they fill them."""
    if len(flights) == 1 and flights[0].forward.is_idle:
        return tickets[0]
    landed: tuple[Tensor, ...] = _Land.apply(flights, *(ticket for (ticket,) in tickets))
    return landed


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flights: tuple[Flight, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.flights = flights
        for flight in flights:
            flight.forward.begin(tensors)
        return tuple(tensors[0].new_empty(0) for _ in flights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *_: Tensor) -> tuple[Any, ...]:
        return (None, *_complete([flight.backward for flight in reversed(ctx.flights)]))


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, flights: tuple[Flight, ...], *tickets: Tensor) -> tuple[Tensor, ...]:
        ctx.flights = flights
        return _complete([flight.forward for flight in flights])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        grads = tuple(grad.contiguous() for grad in grads)
        # What was begun last forward is wanted first backward.
        for flight in reversed(ctx.flights):
            flight.backward.begin(grads)
        return (None, *(grads[0].new_empty(0) for _ in ctx.flights))


class _Leg:
    """One direction of a flight. `begin` sends; `complete` waits, and puts what stayed and what came in its place."""

    def __init__(self, maps: tuple[RowMap, ...], site: Site, range_name: str, *, backward: bool) -> None:
        self.maps, self.site, self.range_name = maps, site, range_name
        self.point = site.progress.point(f"{site.name} of {site.kind}", backward=backward)
        self.is_idle = site.comm is None and all(row_map.is_identity for row_map in maps)
        self.tensors: tuple[Tensor, ...] = ()

    def begin(self, tensors: tuple[Tensor, ...]) -> None:
        self.site.progress.at = self.point
        with profiler_range(self.range_name):
            self._begin(tensors)

    def complete(self, outs: list[Tensor]) -> None:
        self.site.progress.at = self.point
        with profiler_range(self.range_name):
            self._complete(outs)

    def _begin(self, tensors: tuple[Tensor, ...]) -> None:
        comm = self.site.comm
        self.tensors = tensors
        me, num_peers = (0, 1) if comm is None else (comm.peer, comm.block.size)
        self.wire = wire = wire_of(self.maps, tuple(x.shape[1] for x in tensors), me, num_peers)
        if comm is None:
            return
        splits = wire.send_splits, wire.recv_splits
        self.send, self.recv = (STAGING.take(sum(elements), like=tensors[0]) for elements in splits)
        for x, moves in zip(tensors, wire.pack, strict=True):
            move_rows(x, self.send, moves, add=False)
        if CHECKS_CALLS:
            compare_call(comm, self.site.progress, self.send, *splits)
        self.site.meter.add(self.site.kind, comm, [n * self.send.dtype.itemsize for n in wire.send_splits])
        self.pending = comm.start_all_to_all(self.send, self.recv, *splits)

    def _complete(self, outs: list[Tensor]) -> None:
        adds = [not row_map.dst.once for row_map in self.maps]
        for x, out, moves, add in zip(self.tensors, outs, self.wire.stay, adds, strict=True):
            move_rows(x, out, moves, add=add)
        if (comm := self.site.comm) is not None:
            clock = self.site.meter.waits.around(self.site.kind, self.recv.device)
            with waiting(self.site.progress, comm.block.lo + comm.peer, comm.block), clock:
                self.pending.wait()
            for out, moves, add in zip(outs, self.wire.unpack, adds, strict=True):
                move_rows(self.recv, out, moves, add=add)
            STAGING.give(self.send, self.recv)
            del self.send, self.recv, self.pending
        self.tensors = ()


def _complete(legs: list[_Leg]) -> tuple[Tensor, ...]:
    """Complete legs that fill the same tensors."""
    tensors = legs[0].tensors
    outs = [_new_output(x, row_map.dst) for x, row_map in zip(tensors, legs[0].maps, strict=True)]
    for leg in legs:
        leg.complete(outs)
    return tuple(out.to(x.dtype) for x, out in zip(tensors, outs, strict=True))


def _new_output(x: Tensor, side: Side) -> Tensor:
    """Uninitialised where every row arrives once; otherwise zeros to sum into, in float32 or better."""
    shape = (side.num_rows, x.shape[1])
    return x.new_empty(shape) if side.once else x.new_zeros(shape, dtype=torch.promote_types(x.dtype, torch.float32))
