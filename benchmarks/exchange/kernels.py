"""Attention on the CPU: packed documents beside one call per document, and memory as documents get longer.

    python -m benchmarks.exchange.kernels [--repeats 5] [--json FILE]

Forward and backward in float32 on one core. Exits with status 1 where a figure is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import process_time

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.exchange.figures import Figure, report
from benchmarks.exchange.measure import peak_bytes
from benchmarks.options import count, target
from layerwise.kernels import Segments, varlen_attention

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
MAX_OVER_SINGLE = 1.3
MAX_GROWTH = 2.2  # of memory, where tokens double
LONG = 8192
PACKS = {
    "64 documents of 16 to 250": np.linspace(16, 250, 64).astype(int).tolist(),
    "8 documents of 512": [512] * 8,
    "one of 4096 and 40 of 50": [4096] + [50] * 40,
}


def rows(num_tokens: int) -> list[Tensor]:
    """q, k and v."""
    make = torch.Generator().manual_seed(num_tokens)
    shapes = [(num_tokens, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return [torch.randn(*shape, generator=make).requires_grad_() for shape in shapes]


def packed(lengths: Sequence[int], window: int | None) -> Callable[[], None]:
    """All documents in one call."""
    qkv, segments = rows(sum(lengths)), Segments(tuple(lengths), tuple(lengths))

    def run() -> None:
        torch.autograd.grad(varlen_attention(*qkv, segments, window=window, backend="sdpa").sum(), qkv)

    return run


def one_by_one(lengths: Sequence[int], window: int | None) -> Callable[[], None]:
    """A call per document: torch's own where it has the mask, ours for a window."""
    documents = [(length, rows(length)) for length in lengths]

    def run() -> None:
        for length, qkv in documents:
            if window is None:
                q, k, v = (x.transpose(0, 1)[None] for x in qkv)
                out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            else:
                out = varlen_attention(*qkv, Segments((length,), (length,)), window=window, backend="sdpa")
            torch.autograd.grad(out.sum(), qkv)

    return run


def interleaved_cpu_s(runs: Sequence[Callable[[], None]], repeats: int) -> list[float]:
    """Median CPU seconds of each: other programs may use the core meanwhile."""
    seconds: list[list[float]] = [[] for _ in runs]
    for repetition in range(repeats + 1):
        for run, spent in zip(runs, seconds, strict=True):
            start = process_time()
            run()
            if repetition:
                spent.append(process_time() - start)
    return [median(spent) for spent in seconds]


def main() -> int:
    """Measure, print and judge."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange.kernels", description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=count, default=5)
    parser.add_argument("--json", type=target, help="file for all figures")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = []
    for window in (None, 256):
        mask = "causal" if window is None else f"window {window}"
        for name, lengths in PACKS.items():
            together, apart = interleaved_cpu_s([packed(lengths, window), one_by_one(lengths, window)], options.repeats)
            detail = f"{1000 * together:.0f} ms; one by one {1000 * apart:.0f}"
            figures.append(Figure(f"{mask}, {name}", together / apart, MAX_OVER_SINGLE, "x one by one", detail))
        short, long = (peak_bytes(packed([length], window)) for length in (LONG // 2, LONG))
        detail = f"{long / 1e6:.0f} MB for {LONG} tokens"
        figures.append(Figure(f"{mask}, memory as tokens double", long / short, MAX_GROWTH, "x", detail))
    return report("Attention on the CPU, forward and backward", figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
