"""The paper's table with one setting changed at a time: where repacking pays, and where it does not.

    python -m benchmarks.evaluate.sensitivity [--steps N] [--strategies a,b] [--png FILE] [LENGTH_FILE ...]

Exits with status 1 where a repacking strategy is slower than `dynamic` on a step, which its fallback rules out.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console

from benchmarks.evaluate.figures import ROUNDING_PCT
from benchmarks.options import count, length_file, named_workload, picture, strategies
from layerwise.evaluate.drawings import draw_sensitivity
from layerwise.evaluate.sensitivity import (
    DEFAULT_STEPS,
    REPACKING,
    VariantResult,
    make_variants,
    render_sensitivity,
    run_variants,
)
from layerwise.evaluate.steps import check_strategies
from layerwise.planners import STRATEGIES


def main() -> int:
    """Print the table and the verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("length_files", nargs="*", type=length_file)
    parser.add_argument("--workload", type=named_workload, default="paper")
    parser.add_argument("--steps", type=count, default=DEFAULT_STEPS)
    parser.add_argument("--strategies", type=strategies, default=",".join(STRATEGIES))
    parser.add_argument("--png", type=picture)
    options = parser.parse_args()
    variants = make_variants(options.workload, options.length_files)
    results = run_variants(variants, check_strategies(options.strategies), num_steps=options.steps)
    console = Console()
    render_sensitivity(results, console)
    if options.png:
        draw_sensitivity(results).savefig(options.png, dpi=200)
    slower = [f"{r.axis} {r.value}" for r in results if _worst_pct(r) < -ROUNDING_PCT]
    if slower:
        console.print(f"a repacking strategy is slower than dynamic on a step with: {', '.join(slower)}")
    return 1 if slower else 0


def _worst_pct(result: VariantResult) -> float:
    rows = result.evaluation.all
    return min((rows[name].worst_step_saving_pct for name in REPACKING if name in rows), default=0.0)


if __name__ == "__main__":
    sys.exit(main())
