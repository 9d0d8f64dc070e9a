"""How far the clocks of ranks are apart, measured by two meetings of all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from layerwise.groups import World

ROUNDS = 8


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """A rank's clock is `offset_s` ahead of rank 0's, give or take `error_s`."""

    offset_s: float
    error_s: float


def measure_offsets(world: World, now_ns: Callable[[], int] = time.time_ns) -> list[ClockOffset]:
    """Every rank's offset to rank 0, by rank. Every rank calls this.

    Between two meetings a rank reads its clock: after rank 0 came to the first, before rank 0 left the second. Each
    round bounds the offset from both sides, by how long the two meetings took on rank 0; all rounds hold.
    """
    bounds = [(-(2**62), 2**62)] * world.num_ranks
    for _ in range(ROUNDS):
        begin = now_ns()
        world.gather_ints([0])
        between = now_ns()
        world.gather_ints([0])
        rows = world.gather_ints([begin, between, now_ns()])
        first, _, last = rows[0]
        bounds = [
            (max(low, mine - last), min(high, mine - first))
            for (low, high), (_, mine, _) in zip(bounds, rows, strict=True)
        ]
    return [ClockOffset(offset_s=(low + high) / 2e9, error_s=max(high - low, 0) / 2e9) for low, high in bounds]
