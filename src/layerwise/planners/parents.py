"""repack+parents: which samples share a parent is chosen for the balance that children can reach.

`dynamic` balanced its groups for layers that all pay the wide exchange. Once sparse layers stay inside nodes, other
samples should share a group, and other groups may be better. The parent solver groups the samples of a micro-batch
again with the loads that hold after repacking, moves samples once more after what their children were predicted to take
beyond those, and keeps a result only where the exact prediction drops.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layerwise.cost import Floats
from layerwise.plan import Parent
from layerwise.planners.dynamic import Division, group_step
from layerwise.planners.grouping import Grouping, group_samples, make_tasks
from layerwise.planners.layout import place
from layerwise.planners.packing import refine
from layerwise.planners.partitions import Partition, partitions, tile_cluster, widths_allowed
from layerwise.planners.problem import MANY_SAMPLES, StepProblem
from layerwise.planners.repack import (
    Planned,
    Repacked,
    RepackOptions,
    count_parents,
    fastest_step,
    keep_if_faster,
    layers_s,
    num_others,
    repack_step,
    repacked_class,
    slowest,
    try_grouping,
    wants_wide,
    with_wide,
)

# How often members are moved after what children were predicted to take.
NUM_SETTLED = 2


def plan_repack_parents(problem: StepProblem, options: RepackOptions) -> Planned:
    """As `plan_repack`, after rebalancing parents; `moved` counts samples that `dynamic` put into another group."""
    results = fastest_step(problem, options, lambda division: _improve_step(problem, division, options))
    before = [groupings[0].parents() for groupings in group_step(problem, options)]
    moved = _count_moved(before, [result.parents for result in results])
    return tuple(result.microbatch(problem) for result in results), {**count_parents(results), "moved": moved}


def _improve_step(problem: StepProblem, division: Division, options: RepackOptions) -> list[Repacked]:
    before = repack_step(problem, division, options)
    after = [
        _improve(problem, result, options) if wants_wide(problem, groupings[0].samples, options) else result
        for groupings, result in zip(division, before, strict=True)
    ]
    return before if after == before else keep_if_faster(problem, after, before)


def _improve(problem: StepProblem, best: Repacked, options: RepackOptions) -> Repacked:
    """The best of other groups and memberships, found with the loads that hold after repacking."""
    parents, cluster = best.parents, problem.cluster
    samples = np.sort(np.concatenate([parent.samples for parent in parents])).astype(np.int64)
    few = len(samples) <= MANY_SAMPLES
    candidates = [
        tile_cluster(tuple(parent.sp_degree for parent in parents), cluster.num_ranks, cluster.ranks_per_node)
    ]
    if few:  # many samples balance in the groups that they have, if in any
        candidates += partitions(problem, samples, widths_allowed(problem, options.max_sp_degree))
    class_of = repacked_class(problem, options)
    found = with_wide(problem, group_samples(problem, samples, candidates, class_of, thorough=few), options)
    for grouping in found[: num_others(problem)]:
        best = try_grouping(problem, best, grouping, grouping.estimate_s, options)
    return _settle(problem, best, options) if few and best.num_repacked else best


def _settle(problem: StepProblem, best: Repacked, options: RepackOptions) -> Repacked:
    """The same groups with other members, after what children were predicted to take beyond the estimate.

    Children are whole samples on few ranks, so not level, and some of them exchange.
    """
    parents = best.parents
    samples = np.concatenate([parent.samples for parent in parents]).astype(np.int64)
    partition = Partition(*np.array([(parent.first_rank, parent.sp_degree) for parent in parents], dtype=np.int64).T)
    (task,) = make_tasks(problem, samples, [partition], repacked_class(problem, options))
    bin_of = np.repeat(np.arange(len(parents)), [len(parent.samples) for parent in parents])
    for _ in range(NUM_SETTLED):
        packing = task.packing
        beyond_s = _group_loads(problem, best, parents) - packing.heights(packing.bin_loads(bin_of))
        beyond_s = np.concatenate([beyond_s, beyond_s[list(packing.second_of)]])
        moved = refine(replace(packing, base=packing.base + beyond_s), bin_of)
        if np.array_equal(moved, bin_of):
            break
        found = Grouping(task.seconds(moved), partition, samples, task, moved)
        settled = try_grouping(problem, best, found, 0.0, options)
        if settled is best:
            break
        best, bin_of = settled, moved
    return best


def _group_loads(problem: StepProblem, result: Repacked, groups: tuple[Parent, ...]) -> Floats:
    """Predicted seconds of the slowest rank of each group, float64 [dims, groups]; dims as of `group_loads`.

    The result has the same groups, but for those that lost all their samples.
    """
    head_s = problem.cost.head_token_s * result.times(problem).tokens
    rank_s = np.concatenate([layers_s(problem, result), head_s[None]])
    by_dim = rank_s if problem.cluster.sync == "layer" else rank_s.sum(axis=0, keepdims=True)
    return slowest(by_dim, groups)


def _count_moved(before: list[tuple[Parent, ...]], after: list[tuple[Parent, ...]]) -> int:
    """Samples in another micro-batch, or in a group that begins elsewhere."""
    tables = []
    for step in (before, after):
        placements = [place(parents) for parents in step]
        rows = [np.stack([p.sample, np.full_like(p.first, i), p.first], axis=1) for i, p in enumerate(placements)]
        table = np.concatenate(rows)
        tables.append(table[np.argsort(table[:, 0])])
    return int((tables[0] != tables[1]).any(axis=1).sum())
