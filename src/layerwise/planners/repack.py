"""repack: full attention stays on the wide parents of `dynamic`, all else moves to node-local children.

The change of layout rides on the two exchanges that a full-attention layer has anyway. A parent falls back to
its wide layout where the cost model predicts that children would be slower, or where a sample does not fit
into a node.
"""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.cost import MicrobatchPrediction
from layerwise.plan import MicrobatchPlan, Parent
from layerwise.planners.children import solve_children
from layerwise.planners.layout import Placement, lay_out
from layerwise.planners.problem import GroupOptions, StepProblem


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


def plan_repack(problem: StepProblem, dynamic: tuple[MicrobatchPlan, ...], options: RepackOptions) -> Planned:
    """The micro-batches of `dynamic` with children, and how many parents were repacked and fell back."""
    results = [repack_microbatch(problem, microbatch.parents, options) for microbatch in dynamic]
    if options.fallback:
        results = keep_if_faster(problem, results, [_lay_out(problem, m.parents, {}, options) for m in dynamic])
    return tuple(result.microbatch for result in results), count_parents(results)


def keep_if_faster(problem: StepProblem, new: list[Repacked], old: list[Repacked]) -> list[Repacked]:
    """`new`, unless the whole step got slower: with sync "step", gains of micro-batches need not add up."""
    seconds = [problem.cost.step_s([result.prediction for result in results]) for results in (new, old)]
    return new if seconds[0] <= seconds[1] else old


def count_parents(results: list[Repacked]) -> dict[str, int]:
    """Counters for the notes of a plan."""
    parents, repacked = (sum(getattr(r, name) for r in results) for name in ("num_parents", "num_repacked"))
    return {"parents": parents, "repacked": repacked, "fallbacks": parents - repacked}


def is_wide(problem: StepProblem, parent: Parent, options: RepackOptions) -> bool:
    """Whether children can help this parent."""
    return parent.sp_degree > (1 if options.repack_within_node else problem.cluster.ranks_per_node)


def repack_microbatch(problem: StepProblem, parents: tuple[Parent, ...], options: RepackOptions) -> Repacked:
    """The best choice of which parents to repack: all that can be, less those that do better without."""
    solutions = {p: solve_children(problem, p) for p in parents if is_wide(problem, p, options)}
    children = {parent: placement for parent, placement in solutions.items() if placement is not None}
    best = _lay_out(problem, parents, children, options)
    if not options.fallback:
        return best
    for parent in list(children) if len(children) > 1 else []:
        fewer = {p: placement for p, placement in children.items() if p is not parent}
        attempt = _lay_out(problem, parents, fewer, options)
        if attempt.beats(best):
            best, children = attempt, fewer
    unchanged = _lay_out(problem, parents, {}, options)
    return best if best.beats(unchanged) else unchanged


def _lay_out(
    problem: StepProblem,
    parents: tuple[Parent, ...],
    children: dict[Parent, Placement],
    options: RepackOptions,
) -> Repacked:
    microbatch = lay_out(problem.lengths, problem.cost.attention, parents, children)
    return Repacked(
        microbatch=microbatch,
        prediction=problem.cost.predict_microbatch(microbatch),
        num_parents=sum(is_wide(problem, parent, options) for parent in parents),
        num_repacked=len(children),
    )
