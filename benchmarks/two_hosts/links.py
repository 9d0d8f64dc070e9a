"""What the shaped links do: rates and latency of all-to-alls inside hosts and between them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from layerwise.cost import Floats
from layerwise.errors import DataError
from layerwise.exchange import all_to_all
from layerwise.groups import World
from layerwise.traffic import Block

NUM_CALLS = 8
# How long the larger all-to-all takes that shows a rate: long beside the milliseconds that a busy machine adds.
CALL_S = 0.2
# Bytes of a message between two ranks as in the steps, for the latency. Smaller ones would show how long two cores take
# to wake 16 processes, which larger ones hide behind their bytes.
MESSAGE_BYTES = 32 << 10


@dataclass(frozen=True, kw_only=True)
class Links:
    """A rank's links in all-to-alls of all ranks at once: bytes/s inside its host and between hosts, and the latency.

    latency_s: what an all-to-all over both takes the mean rank beyond the bytes of the slower one, for each message.
    """

    fast_bytes_per_s: float
    slow_bytes_per_s: float
    latency_s: float

    @property
    def ratio(self) -> float:
        """How much faster the link inside is."""
        return self.fast_bytes_per_s / self.slow_bytes_per_s

    def describe(self) -> str:
        """For people."""
        fast, slow = (rate / 1e6 for rate in (self.fast_bytes_per_s, self.slow_bytes_per_s))
        latency_ms = 1e3 * self.latency_s
        return (
            f"{fast:.2f} MB/s inside a host, {slow:.2f} between, ratio {self.ratio:.2f}, {latency_ms:.2f} ms a message"
        )


def measure_links(world: World, wanted: Links) -> Links:
    """The same on all ranks. The fastest calls count, since other work on the machine only adds time."""
    node, everyone = world.ranks_per_node, Block(0, world.num_ranks)
    blocks = [Block(lo, lo + node) for lo in range(0, world.num_ranks, node)]
    world.prepare([*blocks, everyone])
    mine = blocks[world.rank // node]
    others = [peer != world.rank for peer in range(world.num_ranks)]
    between = [not mine.lo <= peer < mine.hi for peer in range(world.num_ranks)]
    slow = _rate(world, everyone, between, wanted.slow_bytes_per_s)
    both_s = float(_call_s(world, everyone, others, MESSAGE_BYTES).mean(axis=0).min())
    return Links(
        fast_bytes_per_s=_rate(world, mine, others[mine.lo : mine.hi], wanted.fast_bytes_per_s),
        slow_bytes_per_s=slow,
        latency_s=max(0.0, both_s - sum(between) * MESSAGE_BYTES / slow) / sum(others),
    )


def _rate(world: World, block: Block, peers: list[bool], wanted_bytes_per_s: float) -> float:
    """Bytes/s of a rank, by how much longer calls get with more bytes."""
    size = round(CALL_S * wanted_bytes_per_s / sum(peers))
    less_s, more_s = (float(_call_s(world, block, peers, n).max(axis=0).min()) for n in (size // 2, size))
    if more_s <= less_s:
        raise DataError(
            f"all-to-alls take no longer with more bytes ({size // 2} bytes per message: {less_s:.2e} s, {size}: "
            f"{more_s:.2e} s): run on an idle machine"
        )
    return sum(peers) * (size - size // 2) / (more_s - less_s)


def _call_s(world: World, block: Block, peers: list[bool], size: int) -> Floats:
    """Seconds of each rank in each of NUM_CALLS all-to-alls, float64 [ranks, NUM_CALLS]."""
    comm, splits = world.comm(block), [size if talks else 0 for talks in peers]
    assert comm is not None
    send = torch.zeros(sum(splits), dtype=torch.uint8)
    nanoseconds = []
    for _ in range(1 + NUM_CALLS):
        world.all_reduce(torch.zeros(1))
        begin = time.monotonic_ns()
        all_to_all(comm, send, splits, splits)
        nanoseconds.append(time.monotonic_ns() - begin)
    return np.array(world.gather_ints(nanoseconds[1:])) / 1e9


def adjust(
    measure: Callable[[], Links],
    set_slow: Callable[[float], None],
    start_bytes_per_s: float,
    ratio: float,
    tolerance: float,
    attempts: int = 8,
) -> Links:
    """Set the slow link until the measured ratio is within `tolerance` of the wanted one; the last measurement.

    set_slow: shapes the hosts' DEVICE to bytes/s. Raises DataError where `attempts` do not get there.
    """
    rate, tried = start_bytes_per_s, []
    for _ in range(attempts):
        set_slow(rate)
        links = measure()
        tried.append(links.ratio)
        if abs(links.ratio / ratio - 1) <= tolerance:
            return links
        rate *= links.ratio / ratio
    raise DataError(
        f"the links did not settle at a ratio of {ratio:g} within {tolerance:.0%}: measured "
        f"{', '.join(f'{r:.2f}' for r in tried)}; run on an idle machine, or ask for another --ratio"
    )
