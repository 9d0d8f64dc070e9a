"""Megatron-Core's hybrid context parallelism: its own BalancedCPScheduler, from the megatron-core wheel.

What we assume, always in its favour: docs/peers.md says why.
- One "group" of its schedule, which ends at a barrier, is one micro-batch, whose samples a rank runs one by one.
- Its limit holds for one sample and rank, since it runs them one by one; all that a rank holds may exceed our budget.
- Its ranks share a sample by context parallelism; we judge the same groups as Ulysses groups.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import Any

from benchmarks.peers.task import Groups, Task
from layerwise.plan import Parent, StepPlan

NUM_SETTINGS = 6
# What it raises where its refilling of empty ranks finds no group that it can widen.
FAULTS = (AssertionError, IndexError, TypeError)


class _FakeGroup:
    """As much of a process group as the scheduler asks for."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks

    def size(self) -> int:
        return self.num_ranks


@cache
def scheduler_class() -> Any:
    """BalancedCPScheduler. Raises ImportError where megatron-core is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it reports the optional kernels that it does not find
        from megatron.core.pipeline_parallel.hybrid_cp_schedule import BalancedCPScheduler
    return BalancedCPScheduler


def plan_at_budget(task: Task) -> StepPlan | None:
    """Its setting max_seqlen_per_dp_cp_rank is our budget: the narrowest groups that hold each sample."""
    return _best(task, [task.max_tokens_per_rank])


def plan_tuned(task: Task) -> StepPlan | None:
    """The best setting for each step by our cost model: the budget, or a half, a quarter, ... of it."""
    return _best(task, [task.max_tokens_per_rank >> i for i in range(NUM_SETTINGS)])


def _best(task: Task, settings: list[int]) -> StepPlan | None:
    answers = [microbatches for setting in settings if (microbatches := _schedule(task, setting)) is not None]
    formed = [group for microbatches in answers for groups in microbatches for group in groups]
    fullest = [sum(-(-int(task.lengths[i]) // group.sp_degree) for i in group.samples) for group in formed]
    return task.fastest(answers, max([task.max_tokens_per_rank, *fullest]))


def _schedule(task: Task, max_seqlen_per_rank: int) -> list[Groups] | None:
    """Its micro-batches; None where a sample exceeds all ranks or where it gives up."""
    scheduler = scheduler_class()(max_seqlen_per_rank, _FakeGroup(task.num_ranks))
    if max(scheduler.gpus_needed(length) for length in task.lengths.tolist()) > task.num_ranks:
        return None
    try:
        _, schedule = scheduler.get_groups_and_subsamples(list(enumerate(task.lengths.tolist())), None)
    except FAULTS:
        return None
    return [_groups(ids_of_rank) for ids_of_rank in schedule]


def _groups(ids_of_rank: list[list[int]]) -> Groups:
    """Ranks that hold the same samples, as groups."""
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, ids in enumerate(ids_of_rank):
        if ids:
            ranks.setdefault(tuple(ids), []).append(rank)
    for shared, held_by in ranks.items():
        assert held_by == list(range(held_by[0], held_by[-1] + 1)), f"samples {shared} on ranks {held_by}, with gaps"
    return [Parent(first_rank=held[0], sp_degree=len(held), samples=shared) for shared, held in ranks.items()]
