"""repack: full attention stays on wide parents, grouped as `dynamic` groups; all else moves to node-local children.

The change of layout rides on the two exchanges that a full-attention layer has anyway. Of the groupings that `dynamic`
weighs, the one that is fastest once repacked is taken. A parent falls back to its wide layout where the cost model
predicts that children would be slower, or where a sample does not fit into a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerwise.cost import MicrobatchPrediction
from layerwise.plan import MicrobatchPlan, Parent
from layerwise.planners.children import solve_children
from layerwise.planners.estimate import GroupClass, group_base, group_loads
from layerwise.planners.grouping import Grouping, may_join
from layerwise.planners.layout import Placement, lay_out
from layerwise.planners.problem import GroupOptions, StepProblem

# How many groupings besides that of `dynamic` are repacked and predicted.
NUM_OTHERS = 2


class RepackOptions(GroupOptions):
    """repack_within_node: also form children of parents that lie inside one node.

    fallback: keep a parent's wide layout where children are predicted to be slower; false repacks wherever
    samples fit.
    """

    repack_within_node: bool = False
    fallback: bool = True


@dataclass(frozen=True, kw_only=True, eq=False)
class Repacked:
    """A micro-batch and its prediction, with the number of parents that could have been and were repacked."""

    microbatch: MicrobatchPlan
    prediction: MicrobatchPrediction
    num_parents: int
    num_repacked: int

    def beats(self, other: Repacked) -> bool:
        """Predicted to be faster, or as fast with fewer bytes between nodes."""
        mine, theirs = self.prediction, other.prediction
        return (mine.seconds, mine.slow_bytes) < (theirs.seconds, theirs.slow_bytes)


Planned = tuple[tuple[MicrobatchPlan, ...], dict[str, int]]
LayOut = Callable[..., MicrobatchPlan]


def plan_repack(
    problem: StepProblem, step: list[list[Grouping]], options: RepackOptions, layout: LayOut = lay_out
) -> Planned:
    """The micro-batches of `dynamic` with children, and how many parents were repacked and fell back.

    `step` are the groupings that `dynamic` weighed: its own choice, and others that may be faster once repacked.
    `layout` makes shards and tiles of parents and children, as `lay_out` does.
    """
    results = repack_step(problem, step, options, layout)
    return tuple(result.microbatch for result in results), count_parents(results)


def repack_step(
    problem: StepProblem, step: list[list[Grouping]], options: RepackOptions, layout: LayOut = lay_out
) -> list[Repacked]:
    """The best grouping of each micro-batch once it is repacked; no slower than `dynamic` where it may fall back."""
    results = []
    for groupings in step:
        candidates = [groupings[0], *_promising(problem, groupings[1:], options)]
        attempts = [repack_microbatch(problem, found.parents(), options, layout) for found in candidates]
        results.append(fastest(attempts))
    if options.fallback:
        unchanged = [_lay_out(problem, groupings[0].parents(), {}, options, layout) for groupings in step]
        results = keep_if_faster(problem, results, unchanged)
    return results


def _promising(problem: StepProblem, groupings: list[Grouping], options: RepackOptions) -> list[Grouping]:
    """Those groupings with wide groups that the loads after repacking favour."""
    wide = [found for found in groupings if found.partition.size.max() > narrowest_wide(problem, options)]
    return sorted(wide, key=lambda found: _repacked_s(problem, found, options))[:NUM_OTHERS]


def _repacked_s(problem: StepProblem, found: Grouping, options: RepackOptions) -> float:
    degrees = np.unique(found.partition.size).tolist()
    classes = [repacked_class(problem, degree, options) for degree in degrees]
    lengths = problem.lengths[found.samples]
    if not may_join(problem, lengths, classes)[
        np.arange(len(lengths)), np.searchsorted(degrees, found.partition.size)[found.bin_of]
    ].all():
        return float("inf")
    packing = replace(
        found.packing,
        loads=group_loads(problem.cost, lengths, classes),
        base=group_base(problem.cost, classes),
        bin_class=np.searchsorted(degrees, found.partition.size),
    )
    return packing.makespan(found.bin_of)


def repacked_class(problem: StepProblem, degree: int, options: RepackOptions) -> GroupClass:
    """The loads of a group of `degree` ranks after repacking."""
    return GroupClass(degree, degree > narrowest_wide(problem, options))


def fastest(results: Sequence[Repacked]) -> Repacked:
    """The one that no other beats; the first of equals."""
    best = results[0]
    for result in results[1:]:
        best = result if result.beats(best) else best
    return best


def keep_if_faster(problem: StepProblem, new: list[Repacked], old: list[Repacked]) -> list[Repacked]:
    """`new`, unless the whole step got slower: with sync "step", gains of micro-batches need not add up."""
    seconds = [problem.cost.step_s([result.prediction for result in results]) for results in (new, old)]
    return new if seconds[0] <= seconds[1] else old


def count_parents(results: list[Repacked]) -> dict[str, int]:
    """Counters for the notes of a plan."""
    parents, repacked = (sum(getattr(r, name) for r in results) for name in ("num_parents", "num_repacked"))
    return {"parents": parents, "repacked": repacked, "fallbacks": parents - repacked}


def narrowest_wide(problem: StepProblem, options: RepackOptions) -> int:
    """Children can help parents of more ranks than this."""
    return 1 if options.repack_within_node else problem.cluster.ranks_per_node


def is_wide(problem: StepProblem, parent: Parent, options: RepackOptions) -> bool:
    """Whether children can help this parent."""
    return parent.sp_degree > narrowest_wide(problem, options)


def repack_microbatch(
    problem: StepProblem, parents: tuple[Parent, ...], options: RepackOptions, layout: LayOut = lay_out
) -> Repacked:
    """The best choice of which parents to repack: all that can be, less those that do better without."""
    solutions = {p: solve_children(problem, p) for p in parents if is_wide(problem, p, options)}
    children = {parent: placement for parent, placement in solutions.items() if placement is not None}
    best = _lay_out(problem, parents, children, options, layout)
    if not options.fallback:
        return best
    for parent in list(children) if len(children) > 1 else []:
        fewer = {p: placement for p, placement in children.items() if p is not parent}
        attempt = _lay_out(problem, parents, fewer, options, layout)
        if attempt.beats(best):
            best, children = attempt, fewer
    unchanged = _lay_out(problem, parents, {}, options, layout)
    return best if best.beats(unchanged) else unchanged


def _lay_out(
    problem: StepProblem,
    parents: tuple[Parent, ...],
    children: dict[Parent, Placement],
    options: RepackOptions,
    layout: LayOut,
) -> Repacked:
    microbatch = layout(problem.lengths, problem.cost.attention, parents, children)
    return Repacked(
        microbatch=microbatch,
        prediction=problem.cost.predict_microbatch(microbatch),
        num_parents=sum(is_wide(problem, parent, options) for parent in parents),
        num_repacked=len(children),
    )
