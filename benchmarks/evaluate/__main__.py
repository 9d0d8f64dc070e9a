"""The paper's table: every strategy on the 200 steps of the workload, with the figures to reach checked.

    python -m benchmarks.evaluate [--workload NAME|FILE] [--steps N] [--workers N]

Exits with status 1 where a figure is missed. Every second but those of this command itself is a prediction.
"""

from __future__ import annotations

import argparse
import sys
from time import perf_counter

from rich.console import Console

from benchmarks.evaluate.figures import Check, check_figures
from benchmarks.options import count, named_workload
from layerwise.evaluate.steps import check_strategies, run_steps, step_jobs
from layerwise.evaluate.table import evaluate, narrow_table, render
from layerwise.planners import STRATEGIES


def main() -> int:
    """Print the table and the checks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", type=named_workload, default="paper")
    parser.add_argument("--steps", type=count)
    parser.add_argument("--workers", type=count)
    options = parser.parse_args()
    start = perf_counter()
    jobs = step_jobs(options.workload, check_strategies(list(STRATEGIES)), options.workload.draw_steps(options.steps))
    evaluation = evaluate(run_steps(jobs, num_workers=options.workers), options.workload.seed)
    checks = check_figures(evaluation, perf_counter() - start)
    console = Console()
    render(evaluation, console)
    rows = [[check.name, _text(check), check.limits, "yes" if check.reached else "NO"] for check in checks]
    console.print(narrow_table("Figures to reach", ["figure", "measured", "to reach", "reached"], rows))
    return 0 if all(check.reached for check in checks) else 1


def _text(check: Check) -> str:
    return "missing" if check.measured is None else f"{check.measured:.4g}"


if __name__ == "__main__":
    sys.exit(main())
