"""Wall-clock of functions that all ranks run together, and the memory that one of them takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from time import perf_counter

import numpy as np
import torch
import torch.distributed as dist

from layerwise.cost import Floats
from layerwise.train.profile import silence_kineto


def interleaved_s(functions: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, Floats]:
    """Seconds from one barrier to the next, float64 [repeats]; one function after the other in every repetition."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for repetition in range(repeats + 1):
        for name, run in functions.items():
            dist.barrier()
            start = perf_counter()
            run()
            dist.barrier()
            if repetition:  # the first warms up
                seconds[name].append(perf_counter() - start)
    return {name: np.array(spent) for name, spent in seconds.items()}


def ratio(ours: Floats, theirs: Floats) -> tuple[float, float]:
    """Median over repetitions of the quotient within one, and half the distance of its quartiles."""
    low, middle, high = np.percentile(ours / theirs, [25, 50, 75]).tolist()
    return middle, (high - low) / 2


def peak_bytes(run: Callable[[], object]) -> int:
    """The most bytes that tensors made while `run` runs hold at a time, what it returns included."""
    silence_kineto()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
