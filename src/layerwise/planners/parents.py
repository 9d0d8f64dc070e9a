"""repack+parents: which samples share a parent is chosen for the balance that children can reach.

`dynamic` balanced its groups for layers that all pay the wide exchange. Once sparse layers stay inside nodes, other
samples should share a group, and other groups may be better. The parent solver groups the samples of a micro-batch
again with the loads that hold after repacking, and keeps the result only where the exact prediction drops.
"""

from __future__ import annotations

import numpy as np

from layerwise.plan import Parent
from layerwise.planners.estimate import GroupClass
from layerwise.planners.grouping import Grouping, group_samples
from layerwise.planners.partitions import partitions, tile_cluster, widths_allowed
from layerwise.planners.problem import StepProblem
from layerwise.planners.repack import (
    Planned,
    Repacked,
    RepackOptions,
    count_parents,
    fastest,
    keep_if_faster,
    num_others,
    repack_microbatch,
    repack_step,
    repacked_class,
    wants_wide,
    with_wide,
)


def plan_repack_parents(problem: StepProblem, step: list[list[Grouping]], options: RepackOptions) -> Planned:
    """As `plan_repack`, after rebalancing parents; `moved` counts samples that `dynamic` put into another group."""
    before = repack_step(problem, step, options)
    after = [
        _improve(problem, result, options) if wants_wide(problem, groupings[0].samples, options) else result
        for groupings, result in zip(step, before, strict=True)
    ]
    after = keep_if_faster(problem, after, before)
    moved = sum(_count_moved(a[0].parents(), b.microbatch.parents) for a, b in zip(step, after, strict=True))
    return tuple(result.microbatch for result in after), {**count_parents(after), "moved": moved}


def _improve(problem: StepProblem, best: Repacked, options: RepackOptions) -> Repacked:
    """The best of other groups and memberships, found with the loads that hold after repacking."""
    parents = best.microbatch.parents
    samples = np.sort(np.concatenate([parent.samples for parent in parents])).astype(np.int64)
    candidates = [
        tile_cluster([parent.sp_degree for parent in parents], problem.cluster),
        *partitions(problem, samples, widths_allowed(problem, options.max_sp_degree)),
    ]

    def class_of(degree: int) -> GroupClass:
        return repacked_class(problem, degree, options)

    found = with_wide(problem, group_samples(problem, samples, candidates, class_of, thorough=True), options)
    attempts = [repack_microbatch(problem, grouping.parents(), options) for grouping in found[: num_others(problem)]]
    legal = [a for a in attempts if options.fallback or a.num_repacked == a.num_parents]
    return fastest([best, *legal])


def _count_moved(before: tuple[Parent, ...], after: tuple[Parent, ...]) -> int:
    home = {sample: parent.first_rank for parent in before for sample in parent.samples}
    return sum(home[sample] != parent.first_rank for parent in after for sample in parent.samples)
