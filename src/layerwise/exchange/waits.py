"""How long a rank waited for exchanges: what overlap did not hide, and what late ranks cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch


class WaitClock:
    """Seconds by layer kind: of the thread that computes on a CPU, of the stream that computes on a GPU."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def around(self, kind: str, device: torch.device) -> Iterator[None]:
        """Around a wait for an exchange of this kind. A GPU is not made to wait for the host."""
        if device.type == "cuda":
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((kind, begin, end))
        else:
            begin_s = perf_counter()
            yield
            self._seconds[kind] += perf_counter() - begin_s

    def seconds(self, kind: str) -> float:
        """All waits of a kind so far. On a GPU this returns when the last of them has ended."""
        for event_kind, begin, end in self._events:
            end.synchronize()
            self._seconds[event_kind] += begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds[kind]
