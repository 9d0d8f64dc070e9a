"""What a planning window saves: steps whose samples changed places within a few steps, planned and predicted.

    python -m benchmarks.planning.window [--steps N] [--windows 2,4,8,16] [--strategies a,b]

Seconds are predicted by the cost model; nothing runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np
from rich.console import Console

from benchmarks.options import count, each, strategies, whole
from layerwise.cost import predict
from layerwise.data.window import MAX_WINDOW_STEPS, exchange_within_windows
from layerwise.evaluate.table import narrow_table
from layerwise.evaluate.workload import Workload, load_workload
from layerwise.planners import Planner

# The `paper` workload as it is, and half web, half code, whose longest samples fill more of a step.
MIXTURES = {"web and chat": {}, "web and code": {"mixture": {"web": 0.5, "code": 0.5}, "cap_tokens": 131072}}


def step_seconds(workload: Workload, strategy: str, steps: list[list[int]], window_steps: int) -> float:
    """Predicted seconds of all steps."""
    planner = Planner(
        strategy=strategy,
        cluster=workload.cluster_spec,
        model=workload.model_spec,
        max_tokens_per_rank=workload.max_tokens_per_rank,
    )
    regrouped = exchange_within_windows(steps, window_steps, workload.step_tokens, length=int)
    return sum(predict(planner(step), workload.cluster_spec, workload.model_spec).seconds for step in regrouped)


def saved_pct(workload: Workload, strategy: str, steps: list[list[int]], windows: Sequence[int]) -> list[float]:
    """Percent of the seconds without a window that each window saves."""
    base = step_seconds(workload, strategy, steps, 1)
    return [100 * (1 - step_seconds(workload, strategy, steps, window) / base) for window in windows]


def main() -> None:
    """Print a row per window."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=count, default=32)
    parser.add_argument("--windows", type=each(whole(2, MAX_WINDOW_STEPS)), default="2,4,8,16")
    parser.add_argument("--strategies", type=strategies, default="dynamic,repack+parents,joint")
    options = parser.parse_args()
    for name, settings in MIXTURES.items():
        workload = load_workload("paper").change(**settings)
        steps = [step.tolist() for step in workload.draw_steps(options.steps)]
        saved = np.array([saved_pct(workload, s, steps, options.windows) for s in options.strategies]).T
        rows = [[f"{w} steps", *(f"{x:.1f}" for x in row)] for w, row in zip(options.windows, saved, strict=True)]
        title = f"Saved % by a planning window, {name}, predicted, {options.steps} steps"
        Console().print(narrow_table(title, ["window", *options.strategies], rows))


if __name__ == "__main__":
    main()
