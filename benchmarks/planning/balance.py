"""Token balance on files of real lengths, at 64 ranks: how often the fullest rank is within 1% of the lower bound.

    python -m benchmarks.planning.balance FILE ... [--steps N] [--strategies a,b]

Where a step has several micro-batches, the fullest rank of each counts. No plan has fewer tokens on its fullest ranks
than the mean, rounded up, or than a sample that stays in a node has over all ranks of the node: that sample forbids the
mean. A strategy that spreads it over several nodes can get below that. Exits with status 1 where the last strategy is
within 1% on fewer than 95% of the other steps of a file.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

import numpy as np
from rich.console import Console

from benchmarks.options import count, length_file, strategies
from benchmarks.planning.steps import make_planner, resized
from layerwise.evaluate.table import narrow_table
from layerwise.evaluate.workload import Workload
from layerwise.plan import Ints, StepPlan
from layerwise.planners import STRATEGIES

NUM_RANKS = 64
WITHIN, SHARE = 1.01, 0.95


def bound_tokens(lengths: Ints, workload: Workload) -> tuple[int, bool]:
    """The lower bound of the fullest rank's tokens, and whether a single sample sets it."""
    cluster = workload.cluster_spec
    level = -(-int(lengths.sum()) // cluster.num_ranks)
    in_a_node = lengths[lengths <= cluster.ranks_per_node * workload.max_tokens_per_rank]
    longest = -(-int(in_a_node.max(initial=0)) // cluster.ranks_per_node)
    return max(level, longest), longest > level


def fullest_tokens(plan: StepPlan) -> int:
    """Tokens of the fullest rank, summed over micro-batches."""
    return sum(int(microbatch.tokens_per_rank(plan.num_ranks).max()) for microbatch in plan.microbatches)


class Balance(NamedTuple):
    """Tokens of the fullest rank over the bound, of steps that a single sample forbids the mean, and of the others."""

    forbidden: np.ndarray
    free: np.ndarray

    @property
    def reached(self) -> bool:
        """Whether enough of the other steps are within 1%."""
        return len(self.free) == 0 or float((self.free <= WITHIN).mean()) >= SHARE


def measure(workload: Workload, strategy: str, steps: list[Ints]) -> Balance:
    """Plan every step."""
    planner = make_planner(workload, strategy, workload.max_tokens_per_rank)
    bounds = [bound_tokens(lengths, workload) for lengths in steps]
    ratios = np.array([fullest_tokens(planner(x)) / bound for x, (bound, _) in zip(steps, bounds, strict=True)])
    single = np.array([single for _, single in bounds])
    return Balance(forbidden=ratios[single], free=ratios[~single])


def cells(ratios: np.ndarray) -> list[str]:
    """Steps, how many percent of them are within 1% of the bound, and the worst excess in percent."""
    if len(ratios) == 0:
        return ["0", "-", "-"]
    return [str(len(ratios)), f"{100 * (ratios <= WITHIN).mean():.0f}", f"{100 * (ratios.max() - 1):.2f}"]


def main() -> int:
    """Print a row per file and strategy."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=length_file)
    parser.add_argument("--steps", type=count, default=20)
    parser.add_argument("--strategies", type=strategies, default="dynamic," + list(STRATEGIES)[-1])
    options = parser.parse_args()
    base = resized(NUM_RANKS)
    rows, reached = [], True
    for path in options.files:
        name = path.name.partition(".")[0]
        budget = int(base.fill * NUM_RANKS * base.max_tokens_per_rank)
        workload = base.change(mixture={name: 1.0}, lengths={name: str(path)}, cap_tokens=budget)
        steps = workload.draw_steps(options.steps)
        for strategy in options.strategies:
            balance = measure(workload, strategy, steps)
            reached &= strategy != options.strategies[-1] or balance.reached
            rows.append([name, strategy, *cells(balance.free), *cells(balance.forbidden)])
    columns = ["file", "strategy", "free steps", "within 1%, %", "worst %", "other steps", "within 1%, %", "worst %"]
    Console().print(narrow_table(f"Fullest rank over its lower bound, {NUM_RANKS} ranks", columns, rows))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
