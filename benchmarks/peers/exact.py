"""The best layout of one step that is one for all layers, proven by CP-SAT; for a few ranks and samples only."""

from __future__ import annotations

from benchmarks.peers.task import Task
from layerwise.plan import Parent, StepPlan
from layerwise.traffic import Block
from tests.exact.instances import Instance
from tests.exact.search import group_choices, solve


def plan_exact(task: Task) -> StepPlan:
    """The optimum of the planners' estimate over aligned groups of power-of-two ranks, in one micro-batch."""
    instance = Instance(
        seed=0,
        lengths=tuple(task.lengths.tolist()),
        cluster=task.cost.cluster,
        model=task.cost.model,
        budget=task.max_tokens_per_rank,
    )
    (chosen,) = solve(instance, group_choices(instance))
    members: dict[Block, list[int]] = {}
    for sample, choice in chosen.items():
        members.setdefault(choice.parent, []).append(sample)
    groups = [Parent(first_rank=b.lo, sp_degree=b.size, samples=tuple(samples)) for b, samples in members.items()]
    return task.plan([groups])
