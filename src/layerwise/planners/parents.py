"""repack+parents: which samples share a parent is chosen for the balance that children can reach.

`dynamic` balanced its groups for layers that all pay the wide exchange. Once sparse layers stay inside nodes, other
samples should share a group, and other groups may be better. The parent solver groups the samples of a micro-batch
again with the loads that hold after repacking, and keeps the result only where the exact prediction drops.
"""

from __future__ import annotations

import numpy as np

from layerwise.plan import Parent
from layerwise.planners.dynamic import Division, group_step
from layerwise.planners.estimate import GroupClass
from layerwise.planners.grouping import group_samples
from layerwise.planners.layout import place
from layerwise.planners.partitions import partitions, tile_cluster, widths_allowed
from layerwise.planners.problem import MANY_SAMPLES, StepProblem
from layerwise.planners.repack import (
    Planned,
    Repacked,
    RepackOptions,
    count_parents,
    fastest_step,
    keep_if_faster,
    num_others,
    repack_step,
    repacked_class,
    try_grouping,
    wants_wide,
    with_wide,
)


def plan_repack_parents(problem: StepProblem, options: RepackOptions) -> Planned:
    """As `plan_repack`, after rebalancing parents; `moved` counts samples that `dynamic` put into another group."""
    results = fastest_step(problem, options, lambda division: _improve_step(problem, division, options))
    microbatches = tuple(result.microbatch for result in results)
    before = [groupings[0].parents() for groupings in group_step(problem, options)]
    moved = _count_moved(before, [microbatch.parents for microbatch in microbatches])
    return microbatches, {**count_parents(results), "moved": moved}


def _improve_step(problem: StepProblem, division: Division, options: RepackOptions) -> list[Repacked]:
    before = repack_step(problem, division, options)
    after = [
        _improve(problem, result, options) if wants_wide(problem, groupings[0].samples, options) else result
        for groupings, result in zip(division, before, strict=True)
    ]
    return keep_if_faster(problem, after, before)


def _improve(problem: StepProblem, best: Repacked, options: RepackOptions) -> Repacked:
    """The best of other groups and memberships, found with the loads that hold after repacking."""
    parents, cluster = best.microbatch.parents, problem.cluster
    samples = np.sort(np.concatenate([parent.samples for parent in parents])).astype(np.int64)
    candidates = [
        tile_cluster(tuple(parent.sp_degree for parent in parents), cluster.num_ranks, cluster.ranks_per_node),
        *partitions(problem, samples, widths_allowed(problem, options.max_sp_degree)),
    ]

    def class_of(degree: int) -> GroupClass:
        return repacked_class(problem, degree, options)

    few = len(samples) <= MANY_SAMPLES
    found = with_wide(problem, group_samples(problem, samples, candidates, class_of, thorough=few), options)
    for grouping in found[: num_others(problem)]:
        best = try_grouping(problem, best, grouping, grouping.estimate_s, options)
    return best


def _count_moved(before: list[tuple[Parent, ...]], after: list[tuple[Parent, ...]]) -> int:
    """Samples in another micro-batch, or in a group that begins elsewhere."""
    tables = []
    for step in (before, after):
        placements = [place(parents) for parents in step]
        rows = [np.stack([p.sample, np.full_like(p.first, i), p.first], axis=1) for i, p in enumerate(placements)]
        table = np.concatenate(rows)
        tables.append(table[np.argsort(table[:, 0])])
    return int((tables[0] != tables[1]).any(axis=1).sum())
