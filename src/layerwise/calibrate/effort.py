"""How much work one measurement may be, so that a calibration takes seconds on any machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter

import numpy as np
import torch


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Sizes of one timed call, and how often it is repeated after one call that is not timed.

    linear_flops, attention_flops: at most, forward and backward; sample_flops: of the longest single sample.
    max_tokens: rows of one call at most. message_bytes: sizes of a message between two ranks, ascending.
    """

    repeats: int
    linear_flops: float
    attention_flops: float
    sample_flops: float
    max_tokens: int
    message_bytes: tuple[int, ...]


KIB, MIB = 1 << 10, 1 << 20
# By device type, and whether it is a quick calibration.
EFFORTS = {
    ("cpu", False): Effort(
        repeats=5,
        linear_flops=1e8,
        attention_flops=3e7,
        sample_flops=1.5e8,
        max_tokens=4096,
        message_bytes=(KIB, 64 * KIB, MIB, 8 * MIB),
    ),
    ("cpu", True): Effort(
        repeats=3,
        linear_flops=1e7,
        attention_flops=5e6,
        sample_flops=1e7,
        max_tokens=512,
        message_bytes=(KIB, 128 * KIB, 4 * MIB),
    ),
    ("cuda", False): Effort(
        repeats=15,
        linear_flops=5e12,
        attention_flops=1e13,
        sample_flops=1e14,
        max_tokens=65536,
        message_bytes=(64 * KIB, MIB, 8 * MIB, 32 * MIB),
    ),
    ("cuda", True): Effort(
        repeats=5,
        linear_flops=5e11,
        attention_flops=1e12,
        sample_flops=4e12,
        max_tokens=16384,
        message_bytes=(64 * KIB, MIB, 8 * MIB),
    ),
}


def median_s(call: Callable[[], object], device: torch.device, repeats: int, before: Callable[[], object]) -> float:
    """Median seconds of call(), whose kernels have ended; before() runs ahead of each call, untimed."""
    seconds = []
    for _ in range(1 + repeats):
        before()
        _wait(device)
        start = perf_counter()
        call()
        _wait(device)
        seconds.append(perf_counter() - start)
    return float(np.median(seconds[1:]))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
