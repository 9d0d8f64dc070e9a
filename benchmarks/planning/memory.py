"""Peak memory of planning many small steps: it must not grow with the number of steps.

    python -m benchmarks.planning.memory [--steps 10000] [--strategies a,b]

Each strategy plans its steps in a process of its own. Exits with status 1 where the peak after all steps exceeds the
peak after the first tenth by more than 4 MiB.
"""

from __future__ import annotations

import argparse
import resource
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
from rich.console import Console

from benchmarks.options import count, strategies
from benchmarks.planning.steps import make_planner, resized
from layerwise.evaluate.table import narrow_table
from layerwise.planners import STRATEGIES

NUM_RANKS, NUM_SAMPLES, MAX_TOKENS_PER_RANK = 16, 24, 16384
LIMIT_MIB = 4.0


def peaks_mib(strategy: str, num_steps: int) -> tuple[float, float]:
    """Peak resident MiB of this process after a tenth of the steps, and after all of them."""
    workload = resized(NUM_RANKS)
    pool = np.concatenate(workload.draw_steps(2))
    random = np.random.default_rng(0)
    planner = make_planner(workload, strategy, MAX_TOKENS_PER_RANK)
    peaks = []
    for step in range(1, num_steps + 1):
        planner(random.choice(pool, NUM_SAMPLES))
        if step in (max(num_steps // 10, 1), num_steps):
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    return peaks[0], peaks[-1]


def main() -> int:
    """Print a row per strategy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=count, default=10_000)
    parser.add_argument("--strategies", type=strategies, default=",".join(STRATEGIES))
    options = parser.parse_args()
    rows, reached = [], True
    for strategy in options.strategies:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            early, late = pool.submit(peaks_mib, strategy, options.steps).result()
        flat = late - early <= LIMIT_MIB
        reached &= flat
        rows.append([strategy, f"{early:.1f}", f"{late:.1f}", f"{late - early:+.1f}", "yes" if flat else "NO"])
    columns = ["strategy", "early MiB", "late MiB", "growth MiB", "flat"]
    Console().print(narrow_table(f"Peak memory over {options.steps:,} steps", columns, rows))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
