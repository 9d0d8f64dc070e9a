"""CPU time of planning of every strategy on one core: median and worst over steps.

    python -m benchmarks.planning [--steps N] [--strategies a,b]

Exits with status 1 where a median exceeds its limit: 20 ms for 64 ranks x 500 samples, 300 ms for 1024 ranks x 10,000.
"""

from __future__ import annotations

import argparse
import sys
from time import process_time
from typing import NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.options import count, strategies
from benchmarks.planning.steps import draw_samples, make_planner, resized, use_one_core
from layerwise.evaluate.table import narrow_table
from layerwise.planners import STRATEGIES

MAX_TOKENS_PER_RANK = 16384  # two thirds of it are used on average
WARM_UP = 1


class Size(NamedTuple):
    """A planning problem, how often each step is planned, and the most milliseconds that its median may take."""

    num_ranks: int
    num_samples: int
    repeats: int
    limit_ms: float


SIZES = (Size(64, 500, 9, 20.0), Size(1024, 10_000, 3, 300.0))


def measure_ms(strategy: str, size: Size, num_steps: int) -> np.ndarray:
    """CPU milliseconds of each step after the first, the least of `size.repeats` plannings, float64 [num_steps].

    Other programs may use the core meanwhile: CPU time leaves out their turns, the least what they do to caches.
    """
    workload = resized(size.num_ranks)
    planner = make_planner(workload, strategy, MAX_TOKENS_PER_RANK)
    seconds = []
    for lengths in draw_samples(workload, num_steps + WARM_UP, size.num_samples):
        spent = []
        for _ in range(size.repeats):
            start = process_time()
            planner(lengths)
            spent.append(process_time() - start)
        seconds.append(min(spent))
    return 1000 * np.array(seconds[WARM_UP:])


def main() -> int:
    """Print a row per strategy and size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=count, default=15)
    parser.add_argument("--strategies", type=strategies, default=",".join(STRATEGIES))
    options = parser.parse_args()
    use_one_core()
    rows, reached = [], True
    for size in SIZES:
        for strategy in options.strategies:
            spent = measure_ms(strategy, size, options.steps)
            within = bool(np.median(spent) <= size.limit_ms)
            reached &= within
            problem = f"{size.num_ranks} ranks x {size.num_samples:,} samples"
            times = (f"{np.median(spent):.1f}", f"{spent.max():.1f}", f"{size.limit_ms:g}")
            rows.append([problem, strategy, *times, "yes" if within else "NO"])
    columns = ["problem", "strategy", "median ms", "worst ms", "limit ms", "reached"]
    Console().print(narrow_table("Planning time, one core", columns, rows))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
