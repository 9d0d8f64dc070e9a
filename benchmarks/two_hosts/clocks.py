"""When ranks began all-to-alls and waited for them, and what of that was waiting for a rank that came late."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from torch import Tensor

from layerwise.exchange import Comm, Meter, Pending
from layerwise.groups import World
from layerwise.traffic import Block


class Call(NamedTuple):
    """One all-to-all on one rank: what for, among which ranks, and when, on a clock that all ranks share.

    Between `begin_s` and `wait_s` the rank did something else.
    """

    kind: str
    block: tuple[int, int]
    begin_s: float
    wait_s: float
    end_s: float


@dataclass
class TimedMeter(Meter):
    """A meter that also logs the calls of a TimedWorld."""

    calls: list[Call] = field(default_factory=list)
    kind: str = ""

    def add(self, kind: str, comm: Comm, sent_bytes: Sequence[int]) -> None:
        """Count, and remember the kind of the call that follows."""
        super().add(kind, comm, sent_bytes)
        self.kind = kind


class TimedWorld:
    """A World whose all-to-alls are logged; `after_exchange` is called after each."""

    def __init__(self, inner: World, meter: TimedMeter, after_exchange: Callable[[], None]) -> None:
        self.inner, self.meter, self.after_exchange = inner, meter, after_exchange
        self.rank, self.num_ranks, self.ranks_per_node = inner.rank, inner.num_ranks, inner.ranks_per_node
        self.prepare, self.gather_ints, self.all_reduce = inner.prepare, inner.gather_ints, inner.all_reduce
        self.device, self.progress = inner.device, inner.progress

    def comm(self, block: Block | None) -> Comm | None:
        """The block's Comm with a clock on it."""
        inner = self.inner.comm(block)
        return None if inner is None else _TimedComm(inner, self.meter, self.after_exchange)


@dataclass(frozen=True, eq=False)
class _TimedComm:
    inner: Comm
    meter: TimedMeter
    after_exchange: Callable[[], None]

    @property
    def block(self) -> Block:
        return self.inner.block

    @property
    def peer(self) -> int:
        return self.inner.peer

    def all_reduce(self, tensor: Tensor) -> None:
        self.inner.all_reduce(tensor)

    def start_all_to_all(self, send: Tensor, recv: Tensor, send_splits: list[int], recv_splits: list[int]) -> Pending:
        begin_s = time.monotonic()
        pending = self.inner.start_all_to_all(send, recv, send_splits, recv_splits)
        return _TimedPending(pending, partial(self._log, self.meter.kind, begin_s))

    def _log(self, kind: str, begin_s: float, wait_s: float) -> None:
        self.meter.calls.append(Call(kind, (self.block.lo, self.block.hi), begin_s, wait_s, time.monotonic()))
        self.after_exchange()


@dataclass(frozen=True, eq=False)
class _TimedPending:
    inner: Pending
    after: Callable[[float], None]

    def wait(self) -> None:
        wait_s = time.monotonic()
        self.inner.wait()
        self.after(wait_s)


def messages_between_hosts(calls: Iterable[Call], rank: int, ranks_per_host: int) -> int:
    """Messages that a rank sent to other hosts: an all-to-all sends one to each of its peers, be it empty."""
    lo = rank // ranks_per_host * ranks_per_host
    blocks = (call.block for call in calls)
    return sum(max(0, lo - b_lo) + max(0, b_hi - lo - ranks_per_host) for b_lo, b_hi in blocks)


class Spent(NamedTuple):
    """Seconds that one rank waited in exchanges of one kind: in all, and of these before the last rank had come."""

    exchange_s: float
    wait_s: float


def spent_by_kind(calls_of: Sequence[Iterable[Call]]) -> list[dict[str, Spent]]:
    """For each rank, the seconds of its calls by kind; `calls_of[rank]` in the order in which they were made.

    The n-th call of a block on one rank is the n-th on the block's others.
    """
    numbered = [list(_number(calls)) for calls in calls_of]
    last_s: dict[tuple[tuple[int, int], int], float] = defaultdict(float)
    for calls in numbered:
        for number, call in calls:
            last_s[call.block, number] = max(last_s[call.block, number], call.begin_s)
    spent = []
    for calls in numbered:
        by_kind: dict[str, Spent] = defaultdict(lambda: Spent(0.0, 0.0))
        for number, call in calls:
            late_s = max(min(last_s[call.block, number], call.end_s) - call.wait_s, 0.0)
            exchange_s, wait_s = by_kind[call.kind]
            by_kind[call.kind] = Spent(exchange_s + call.end_s - call.wait_s, wait_s + late_s)
        spent.append(dict(by_kind))
    return spent


def _number(calls: Iterable[Call]) -> Iterable[tuple[int, Call]]:
    seen: dict[tuple[int, int], int] = defaultdict(int)
    for call in calls:
        yield seen[call.block], call
        seen[call.block] += 1
