"""repack: full attention stays on wide parents, grouped as `dynamic` groups; all else moves to node-local children.

The change of layout rides on the two exchanges that a full-attention layer has anyway. Of the groupings that `dynamic`
weighs, the one that is fastest once repacked is taken. A parent falls back to its wide layout where the cost model
predicts that children would be slower, or where a sample does not fit into a node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import numpy as np

from layerwise.cost import Floats, MicrobatchTimes, Work
from layerwise.plan import Ints, MicrobatchPlan, Parent
from layerwise.planners.children import solve_children
from layerwise.planners.dynamic import ROUNDING, Division, divisions, level_s
from layerwise.planners.estimate import GroupClass
from layerwise.planners.grouping import Grouping, group_samples, seconds_with
from layerwise.planners.layout import Placement, lay_out
from layerwise.planners.partitions import partitions, widths_allowed
from layerwise.planners.problem import HANDFUL, MANY_SAMPLES, GroupOptions, StepProblem

# How many groupings besides that of `dynamic` are repacked and predicted.
NUM_OTHERS = 4
# Of two groupings whose estimates differ by more than this share, the slower is not predicted.
DOUBT = 0.02
# A sample that gives each rank of a node less than this share of a rank's mean work needs no wider group.
WIDE_SHARE = 0.4


class RepackOptions(GroupOptions):
    """repack_within_node: also form children of parents that lie inside one node.

    fallback: keep a parent's wide layout where children are predicted to be slower; false repacks wherever
    samples fit.
    """

    repack_within_node: bool = False
    fallback: bool = True


LayOut = Callable[..., MicrobatchPlan]


@dataclass(frozen=True, kw_only=True, eq=False)
class Repacked:
    """Groups of a micro-batch, and the children of some; laid out and predicted when that is asked for.

    wide: the groups that could have children. layout: makes shards and tiles, as `lay_out` does.
    """

    parents: tuple[Parent, ...]
    wide: tuple[Parent, ...]
    children: dict[Parent, Placement]
    layout: LayOut

    @property
    def num_repacked(self) -> int:
        """How many parents have children."""
        return len(self.children)

    def microbatch(self, problem: StepProblem) -> MicrobatchPlan:
        """Shards and tiles of all groups."""
        return self._laid_out(problem, self.parents)

    def times(self, problem: StepProblem) -> MicrobatchTimes:
        """The prediction. Groups share no rank, so those that never have children are predicted once for all."""

        def answer() -> MicrobatchTimes:
            narrow = tuple(parent for parent in self.parents if parent not in self.wide)
            return problem.cost.time_works([self._work(problem, part) for part in (narrow, self.wide) if part])

        return problem.once(("times", self), answer)

    def beats(self, problem: StepProblem, other: Repacked) -> bool:
        """Predicted to be faster, or as fast with fewer bytes between nodes."""
        mine, theirs = self.times(problem), other.times(problem)
        return (mine.seconds, mine.slow_bytes) < (theirs.seconds, theirs.slow_bytes)

    def _work(self, problem: StepProblem, parents: tuple[Parent, ...]) -> Work:
        return problem.once(self._about("work", parents), lambda: problem.cost.work(self._laid_out(problem, parents)))

    def _laid_out(self, problem: StepProblem, parents: tuple[Parent, ...]) -> MicrobatchPlan:
        lengths, attention = problem.lengths, problem.cost.attention
        children = {parent: self.children[parent] for parent in parents if parent in self.children}
        return problem.once(
            self._about("shards and tiles", parents), lambda: self.layout(lengths, attention, parents, children)
        )

    def _about(self, what: str, parents: tuple[Parent, ...]) -> tuple[Any, ...]:
        """A question about these groups, of which some have children."""
        return (what, parents, tuple(parent for parent in parents if parent in self.children), self.layout)


Planned = tuple[tuple[MicrobatchPlan, ...], dict[str, int]]


def plan_repack(problem: StepProblem, options: RepackOptions, layout: LayOut = lay_out) -> Planned:
    """The micro-batches of `dynamic` with children, and how many parents were repacked and fell back.

    Of the divisions and groupings that `dynamic` weighed, those are taken that are fastest once repacked. `layout`
    makes shards and tiles of parents and children, as `lay_out` does.
    """
    results = fastest_step(problem, options, lambda division: repack_step(problem, division, options, layout))
    return tuple(result.microbatch(problem) for result in results), count_parents(results)


def fastest_step(
    problem: StepProblem, options: RepackOptions, repacked: Callable[[Division], list[Repacked]]
) -> list[Repacked]:
    """The fastest of the divisions that `dynamic` weighed, once `repacked`."""
    first, *others = divisions(problem, options)
    best = repacked(first)
    for division in others:
        wide = any(wants_wide(problem, groupings[0].samples, options) for groupings in division)
        hope_s = sum(level_s(problem, groupings[0].samples) for groupings in division)
        if wide and hope_s < _step_s(problem, best):
            best = keep_if_faster(problem, best, repacked(division))
    return best


def repack_step(
    problem: StepProblem, division: Division, options: RepackOptions, layout: LayOut = lay_out
) -> list[Repacked]:
    """The best grouping of each micro-batch once it is repacked; no slower than `dynamic` where it may fall back."""
    first = [repack_microbatch(problem, groupings[0].parents(), options, layout) for groupings in division]
    results = []
    for groupings, best in zip(division, first, strict=True):
        for least_s, found in _promising(problem, groupings, options):
            best = try_grouping(problem, best, found, least_s, options, layout)
        results.append(best)
    if options.fallback and problem.cluster.sync == "step":
        unchanged = [replace(result, children={}) for result in first]
        results = keep_if_faster(problem, results, unchanged)
    return results


def try_grouping(
    problem: StepProblem,
    best: Repacked,
    found: Grouping,
    least_s: float,
    options: RepackOptions,
    layout: LayOut = lay_out,
) -> Repacked:
    """The faster of `best` and another grouping, repacked, which takes `least_s` seconds where children are level.

    Where nothing hides exchanges, one that would be slower even so is not repacked. Without fallback, all its parents
    must have been repacked.
    """
    if problem.cluster.overlap_parts == 1 and least_s > (1 + ROUNDING) * best.times(problem).seconds:
        return best
    result = repack_microbatch(problem, found.parents(), options, layout)
    is_legal = options.fallback or result.num_repacked == len(result.wide)
    return result if is_legal and result.beats(problem, best) else best


def _promising(problem: StepProblem, groupings: list[Grouping], options: RepackOptions) -> list[tuple[float, Grouping]]:
    """Groupings with wide groups, packed as `dynamic` packs them, that the loads after repacking favour; and those."""
    samples = groupings[0].samples
    if len(samples) <= MANY_SAMPLES and wants_wide(problem, samples, options):
        candidates = partitions(problem, samples, widths_allowed(problem, options.max_sp_degree))
        groupings = problem.once(
            ("all groups", options.max_sp_degree, samples.tobytes()),
            lambda: group_samples(problem, samples, candidates, GroupClass, thorough=True),
        )
    wide = [(_repacked_s(problem, found, options), found) for found in with_wide(problem, groupings, options)]
    wide.sort(key=itemgetter(0))
    close_s = (1 + DOUBT) * min((seconds for seconds, _ in wide), default=np.inf)
    return [(seconds, found) for seconds, found in wide[: num_others(problem)] if seconds <= close_s]


def with_wide(problem: StepProblem, groupings: list[Grouping], options: RepackOptions) -> list[Grouping]:
    """The groupings that have a group to repack."""
    return [found for found in groupings if found.partition.size.max() > narrowest_wide(problem, options)]


def wants_wide(problem: StepProblem, samples: Ints, options: RepackOptions) -> bool:
    """Whether some sample would give each rank of a group that is not wide a good part of a rank's mean work."""
    work = problem.work_s[samples]
    return len(samples) <= HANDFUL or bool(
        work.max() / narrowest_wide(problem, options) > WIDE_SHARE * work.sum() / problem.cluster.num_ranks
    )


def _repacked_s(problem: StepProblem, found: Grouping, options: RepackOptions) -> float:
    return seconds_with(problem, found, repacked_class(problem, options))


@dataclass(frozen=True)
class RepackedClass:
    """Groups of more than `narrowest` ranks are repacked: their loads after that, by width."""

    narrowest: int

    def __call__(self, degree: int) -> GroupClass:
        """The class of groups of so many ranks."""
        return GroupClass(degree, degree > self.narrowest)


def repacked_class(problem: StepProblem, options: RepackOptions) -> RepackedClass:
    """The loads of groups after repacking. It is equal for equal steps, and holds on to none: steps remember by it."""
    return RepackedClass(narrowest_wide(problem, options))


def num_others(problem: StepProblem) -> int:
    """How many groupings are worth a prediction, which takes long for many samples."""
    count = len(problem.lengths)
    return 2 * NUM_OTHERS if count <= HANDFUL else NUM_OTHERS if count <= MANY_SAMPLES else 1


def fastest(problem: StepProblem, results: Sequence[Repacked]) -> Repacked:
    """The one that no other beats; the first of equals."""
    best = results[0]
    for result in results[1:]:
        best = result if result.beats(problem, best) else best
    return best


def keep_if_faster(problem: StepProblem, new: list[Repacked], old: list[Repacked]) -> list[Repacked]:
    """`new`, unless the whole step got slower: with sync "step", gains of micro-batches need not add up."""
    return new if _step_s(problem, new) <= _step_s(problem, old) else old


def _step_s(problem: StepProblem, results: list[Repacked]) -> float:
    return problem.cost.step_s([result.times(problem) for result in results])


def count_parents(results: list[Repacked]) -> dict[str, int]:
    """Counters for the notes of a plan."""
    parents, repacked = sum(len(r.wide) for r in results), sum(r.num_repacked for r in results)
    return {"parents": parents, "repacked": repacked, "fallbacks": parents - repacked}


def narrowest_wide(problem: StepProblem, options: RepackOptions) -> int:
    """Children can help parents of more ranks than this."""
    return 1 if options.repack_within_node else problem.cluster.ranks_per_node


def repack_microbatch(
    problem: StepProblem, parents: tuple[Parent, ...], options: RepackOptions, layout: LayOut = lay_out
) -> Repacked:
    """The best choice of which parents to repack: all that can be, those that gain by it, or none."""
    question = ("repacked", parents, options.fallback, options.repack_within_node, layout)
    return problem.once(question, lambda: _repack_microbatch(problem, parents, options, layout))


def _repack_microbatch(
    problem: StepProblem, parents: tuple[Parent, ...], options: RepackOptions, layout: LayOut
) -> Repacked:
    wide = tuple(parent for parent in parents if parent.sp_degree > narrowest_wide(problem, options))
    solutions = {parent: solve_children(problem, parent) for parent in wide}
    children = {parent: placement for parent, placement in solutions.items() if placement is not None}
    everywhere = Repacked(parents=parents, wide=wide, children=children, layout=layout)
    if not options.fallback or not children:
        return everywhere
    nowhere = replace(everywhere, children={})
    attempts = [nowhere, everywhere]
    gain = _gainers(problem, nowhere, everywhere, tuple(children))
    if 0 < len(gain) < len(children):
        attempts.insert(1, replace(everywhere, children={parent: children[parent] for parent in gain}))
    return fastest(problem, attempts)


def _gainers(problem: StepProblem, wide: Repacked, repacked: Repacked, parents: tuple[Parent, ...]) -> list[Parent]:
    """The parents whose slowest ranks, kind by kind, take less time once repacked; parents share no rank."""
    before, after = (slowest(layers_s(problem, found), parents).sum(axis=0) for found in (wide, repacked))
    return [parent for parent, gained in zip(parents, after < before, strict=True) if gained]


def layers_s(problem: StepProblem, result: Repacked) -> Floats:
    """Predicted seconds of all layers of each kind, float64 [kinds, ranks]."""
    times = result.times(problem).times
    return np.stack([layer.num_layers * times[layer.kind].total_s for layer in problem.cost.layers])


def slowest(rank_s: Floats, parents: tuple[Parent, ...]) -> Floats:
    """Of seconds [rows, ranks], those of each parent's slowest rank, float64 [rows, parents]."""
    return np.stack([rank_s[:, p.first_rank : p.first_rank + p.sp_degree].max(axis=1) for p in parents], axis=1)
