"""Every strategy on one step, and many steps on several processes. Each result is small: tables are made of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

from layerwise.cost import CostModel
from layerwise.errors import SpecError
from layerwise.evaluate.gaps import Gap, split_gap
from layerwise.evaluate.workload import Workload
from layerwise.plan import Ints, StepPlan
from layerwise.planners import STRATEGIES, Planner
from layerwise.spec import ClusterSpec, ModelSpec

# Repacking switched off: what every saving is measured against.
BASELINE = "dynamic"


@dataclass(frozen=True, kw_only=True, eq=False)
class StrategyStep:
    """What one strategy makes of one step.

    step_s, ideal_s, mfu: predicted.
    parents, fallbacks: wide parents that could be repacked, and those left wide; 0 where the strategy reports none.
    tokens_per_rank: int64 [num_microbatches, num_ranks]. gaps: by layer kind, and the LM head.
    """

    step_s: float
    ideal_s: float
    mfu: float
    slow_bytes: int
    parents: int
    fallbacks: int
    tokens_per_rank: Ints
    gaps: dict[str, Gap]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """One step under every strategy; `wide` where the baseline has a parent wider than a node."""

    num_samples: int
    num_tokens: int
    longest_tokens: int
    wide: bool
    strategies: dict[str, StrategyStep]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepJob:
    """A step to plan: `lengths` in tokens, int64 [samples]; `options`: those of a strategy, by its name."""

    cluster: ClusterSpec
    model: ModelSpec
    max_tokens_per_rank: int
    strategies: tuple[str, ...]
    options: Mapping[str, dict[str, Any]]
    lengths: Ints


def step_jobs(workload: Workload, strategies: tuple[str, ...], steps: Iterable[Ints]) -> list[StepJob]:
    """One job per step. Raises SpecError where the workload's cluster or model is not legal."""
    options = {"static": {"sp_degree": static_degree(workload)}}
    return [
        StepJob(
            cluster=workload.cluster_spec,
            model=workload.model_spec,
            max_tokens_per_rank=workload.max_tokens_per_rank,
            strategies=strategies,
            options=options,
            lengths=lengths,
        )
        for lengths in steps
    ]


def static_degree(workload: Workload) -> int:
    """The fixed SP degree of `static`: one node, or as few whole nodes as hold the longest sample that can be drawn."""
    cluster = workload.cluster_spec
    legal = [nodes for nodes in range(1, cluster.num_nodes + 1) if cluster.num_nodes % nodes == 0]
    node_tokens = cluster.ranks_per_node * workload.max_tokens_per_rank
    return cluster.ranks_per_node * next(nodes for nodes in legal if nodes * node_tokens >= workload.cap_tokens)


def check_strategies(names: Sequence[str]) -> tuple[str, ...]:
    """The names with the baseline first, which every saving needs. Raises SpecError."""
    for name in names:
        if name not in STRATEGIES:
            raise SpecError(f"strategy {name!r} is unknown; legal values: {', '.join(STRATEGIES)}")
    return tuple(dict.fromkeys([BASELINE, *names]))


def run_step(job: StepJob) -> StepResult:
    """Plan the step with every strategy and predict it. Raises InfeasibleError where a sample fits nowhere."""
    planners = {
        name: Planner(
            strategy=name,
            cluster=job.cluster,
            model=job.model,
            max_tokens_per_rank=job.max_tokens_per_rank,
            options=job.options.get(name, {}),
        )
        for name in job.strategies
    }
    problem = planners[BASELINE].pose(job.lengths)
    plans = {name: planner.plan(problem) for name, planner in planners.items()}
    cost = problem.cost
    return StepResult(
        num_samples=len(job.lengths),
        num_tokens=int(job.lengths.sum()),
        longest_tokens=int(job.lengths.max()),
        wide=has_wide_parent(plans[BASELINE]),
        strategies={name: _strategy_step(plan, cost) for name, plan in plans.items()},
    )


def has_wide_parent(plan: StepPlan) -> bool:
    """Whether the samples of some parent are shared by more ranks than a node has."""
    parents = [parent for microbatch in plan.microbatches for parent in microbatch.parents if parent.samples]
    return any(parent.sp_degree > plan.ranks_per_node for parent in parents)


def _strategy_step(plan: StepPlan, cost: CostModel) -> StrategyStep:
    prediction = cost.predict(plan)
    return StrategyStep(
        step_s=prediction.seconds,
        ideal_s=prediction.ideal_s,
        mfu=prediction.mfu,
        slow_bytes=sum(kind.slow_bytes for kind in prediction.kinds.values()),
        parents=plan.notes.get("parents", 0),
        fallbacks=plan.notes.get("fallbacks", 0),
        tokens_per_rank=prediction.tokens_per_rank,
        gaps=split_gap(plan, prediction, cost),
    )


def run_steps(
    jobs: Sequence[StepJob],
    *,
    num_workers: int | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[StepResult]:
    """The results of all jobs, in order; equal for any number of processes, by default one per core.

    `on_step` is called after each, for progress. An error in any step ends the rest.
    """
    results = []
    with _mapper(min(num_workers or len(os.sched_getaffinity(0)), len(jobs))) as run:
        for result in run(jobs):
            results.append(result)
            on_step()
    return results


@contextmanager
def _mapper(num_workers: int) -> Iterator[Callable[[Iterable[StepJob]], Iterator[StepResult]]]:
    if num_workers <= 1:
        yield lambda jobs: map(run_step, jobs)
        return
    # Progress bars run threads, which a forked process would inherit in an unknown state.
    with ProcessPoolExecutor(num_workers, mp_context=get_context("spawn")) as pool:
        yield lambda jobs: pool.map(run_step, jobs)
