"""repack+parents: which samples share a parent is chosen for the balance that children can reach.

`dynamic` balanced its groups for layers that all pay the wide exchange. Once sparse layers stay inside nodes,
the same groups should hold other samples. The parent solver moves and swaps samples between the groups of a
micro-batch with the loads that hold after repacking, and keeps the result only where the exact prediction
drops.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layerwise.plan import Ints, MicrobatchPlan, Parent
from layerwise.planners.estimate import GroupClass, group_base, group_loads
from layerwise.planners.packing import Packing, pack_longest_first, refine
from layerwise.planners.problem import StepProblem
from layerwise.planners.repack import (
    Planned,
    Repacked,
    RepackOptions,
    count_parents,
    is_wide,
    keep_if_faster,
    repack_microbatch,
)


def plan_repack_parents(problem: StepProblem, dynamic: tuple[MicrobatchPlan, ...], options: RepackOptions) -> Planned:
    """As `plan_repack`, after rebalancing parents; `moved` counts samples that changed their group."""
    before = [repack_microbatch(problem, microbatch.parents, options) for microbatch in dynamic]
    after = [_improve(problem, result, options) if result.num_parents else result for result in before]
    after = keep_if_faster(problem, after, before)
    moved = sum(_count_moved(a.microbatch.parents, b.microbatch.parents) for a, b in zip(before, after, strict=True))
    return tuple(result.microbatch for result in after), {**count_parents(after), "moved": moved}


def _improve(problem: StepProblem, best: Repacked, options: RepackOptions) -> Repacked:
    for candidate in _candidates(problem, best.microbatch.parents, options):
        attempt = repack_microbatch(problem, candidate, options)
        if attempt.beats(best) and (options.fallback or attempt.num_repacked == attempt.num_parents):
            best = attempt
    return best


def _candidates(problem: StepProblem, parents: tuple[Parent, ...], options: RepackOptions) -> list[tuple[Parent, ...]]:
    """Other memberships of the same groups: the present one refined, and one packed from scratch."""
    samples = np.array(sorted(sample for parent in parents for sample in parent.samples), dtype=np.int64)
    packing = _packing(problem, parents, samples, options)
    present = np.zeros(len(problem.lengths), dtype=np.int64)
    for index, parent in enumerate(parents):
        present[list(parent.samples)] = index
    starts = [present[samples], pack_longest_first(packing)]
    refined = [refine(packing, bin_of) for bin_of in starts if bin_of is not None]
    return [_with_members(parents, samples, bin_of) for bin_of in refined]


def _packing(problem: StepProblem, parents: tuple[Parent, ...], samples: Ints, options: RepackOptions) -> Packing:
    """Groups are bins; wide ones communicate in full-attention layers only."""
    of_parent = [GroupClass(parent.sp_degree, is_wide(problem, parent, options)) for parent in parents]
    classes = sorted(set(of_parent))
    lengths, node_tokens = (
        problem.lengths[samples],
        problem.cluster.ranks_per_node * problem.max_tokens_per_rank,
    )
    return Packing(
        loads=group_loads(problem.cost, lengths, classes),
        base=group_base(problem.cost, classes),
        bin_class=np.array([classes.index(group) for group in of_parent]),
        tokens=lengths,
        capacity_tokens=np.array([parent.sp_degree for parent in parents]) * problem.max_tokens_per_rank,
        allowed=np.stack([lengths <= node_tokens if c.repacked else lengths == lengths for c in classes], axis=1),
    )


def _with_members(parents: tuple[Parent, ...], samples: Ints, bin_of: Ints) -> tuple[Parent, ...]:
    members = [tuple(samples[bin_of == index].tolist()) for index in range(len(parents))]
    return tuple(
        replace(parent, samples=own, repacked=False) for parent, own in zip(parents, members, strict=True) if own
    )


def _count_moved(before: tuple[Parent, ...], after: tuple[Parent, ...]) -> int:
    home = {sample: parent.first_rank for parent in before for sample in parent.samples}
    return sum(home[sample] != parent.first_rank for parent in after for sample in parent.samples)
