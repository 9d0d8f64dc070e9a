"""Samples into disjoint groups of ranks: many partitions scored, a few packed, the best refined.

Which loads a group gives its ranks is the caller's: those of one layout for all layers, or those that hold after its
samples are repacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from layerwise.cost import Floats
from layerwise.plan import Ints, Parent
from layerwise.planners.estimate import GroupClass, exposed_s, group_base, group_loads
from layerwise.planners.packing import Packing, pack_longest_first, refine
from layerwise.planners.partitions import Partition
from layerwise.planners.problem import MANY_SAMPLES, StepProblem

ClassOf = Callable[[int], GroupClass]

# How many partitions are packed, and how many of those refined: all that there are for a handful of samples.
FEW_SAMPLES = 64
NUM_PACKED, NUM_PACKED_OF_MANY = 3, 2
NUM_REFINED, NUM_REFINED_FAR, NUM_REFINED_OF_FEW = 1, 3, 6
# Where the best is further than this above level work, the scores misled, and all partitions are packed.
FAR_FROM_LEVEL = 0.05
# Children are whole samples on few ranks, so a group that is to be repacked must leave a little room.
CHILD_FILL = 0.995


class Grouping(NamedTuple):
    """Samples of a micro-batch in the groups of a partition, and the estimate of its seconds."""

    estimate_s: float
    partition: Partition
    samples: Ints
    packing: Packing
    bin_of: Ints

    def parents(self) -> tuple[Parent, ...]:
        """The groups that hold samples."""
        order = np.argsort(self.bin_of, kind="stable")
        cuts = np.searchsorted(self.bin_of[order], np.arange(len(self.partition.first) + 1)).tolist()
        members = self.samples[order].tolist()
        groups = zip(self.partition.first.tolist(), self.partition.size.tolist(), cuts, cuts[1:], strict=False)
        return tuple(
            Parent(first_rank=first, sp_degree=size, samples=tuple(members[lo:hi]))
            for first, size, lo, hi in groups
            if lo < hi
        )


def group_samples(
    problem: StepProblem, samples: Ints, candidates: Sequence[Partition], class_of: ClassOf, thorough: bool = False
) -> list[Grouping]:
    """The samples in those partitions that suit them best, fastest first; [] where they fit into none.

    Only the most promising partitions are packed, all of them if `thorough` and not too many samples, and fewer still
    refined.
    """
    packings = _packings(problem, samples, candidates, class_of)
    scores = _scores(packings)
    count, lengths = len(samples), problem.lengths[samples]
    extra_s = exposed_s(problem.cost, lengths)
    good_s = (1 + FAR_FROM_LEVEL) * problem.cost.ideal_s(lengths) + extra_s

    def packed_once(index: int) -> Grouping | None:
        question = ("packed", class_of, samples.tobytes(), candidates[index].size.tobytes())
        return problem.once(question, lambda: _packed(candidates[index], samples, packings[index], extra_s))

    def refined_once(found: Grouping) -> Grouping:
        question = ("refined", class_of, samples.tobytes(), found.partition.size.tobytes())
        return problem.once(question, lambda: _refined(found, extra_s))

    packed: list[Grouping] = []
    best_s = np.inf
    for index in np.argsort(scores, kind="stable").tolist():
        if scores[index] == np.inf or _is_enough(
            len(packed), count, thorough, best_s <= good_s, scores[index] + extra_s >= best_s
        ):
            break
        found = packed_once(index)
        if found is not None:
            packed.append(found)
            best_s = min(best_s, found.estimate_s)
    packed.sort(key=lambda found: found.estimate_s)
    num_refined = NUM_REFINED_FAR if best_s > good_s else NUM_REFINED
    num_refined = NUM_REFINED_OF_FEW if count <= FEW_SAMPLES else num_refined
    refined = [refined_once(found) for found in packed[:num_refined]]
    return sorted([*refined, *packed[num_refined:]], key=lambda found: found.estimate_s)


def _packed(partition: Partition, samples: Ints, packing: Packing, extra_s: float) -> Grouping | None:
    bin_of = pack_longest_first(packing)
    return None if bin_of is None else Grouping(packing.makespan(bin_of) + extra_s, partition, samples, packing, bin_of)


def _is_enough(num_packed: int, num_samples: int, thorough: bool, is_good: bool, is_hopeless: bool) -> bool:
    """Whether to pack no further partition; `is_hopeless`: the next one's score is no better than the best so far."""
    if num_samples <= FEW_SAMPLES:
        return False
    if num_samples > MANY_SAMPLES:
        return num_packed >= (NUM_PACKED if thorough else NUM_PACKED_OF_MANY)
    return not thorough and (is_hopeless or (is_good and num_packed >= NUM_PACKED))


def _packings(problem: StepProblem, samples: Ints, candidates: Sequence[Partition], class_of: ClassOf) -> list[Packing]:
    """What is packed into each partition; classes are the sizes of groups in any of them, ascending."""
    degrees = sorted({size for partition in candidates for size in np.unique(partition.size).tolist()})
    classes = [class_of(degree) for degree in degrees]
    lengths = problem.lengths[samples]
    loads, base = _loads(problem, lengths, classes), group_base(problem.cost, classes)
    allowed = lengths[:, None] <= np.array(degrees) * problem.max_tokens_per_rank
    room = np.array([CHILD_FILL if group.repacked else 1.0 for group in classes])
    capacity = (np.array(degrees) * problem.max_tokens_per_rank * room).astype(np.int64)
    return [
        Packing(
            loads=loads,
            base=base,
            bin_class=bin_class,
            tokens=lengths,
            capacity_tokens=capacity[bin_class],
            allowed=None if allowed.all() else allowed,
        )
        for bin_class in (np.searchsorted(degrees, partition.size) for partition in candidates)
    ]


def height_with(problem: StepProblem, found: Grouping, class_of: ClassOf) -> float:
    """The makespan of the same groups with other loads."""
    degrees = np.unique(found.partition.size).tolist()
    classes = [class_of(degree) for degree in degrees]
    packing = replace(
        found.packing,
        loads=_loads(problem, problem.lengths[found.samples], classes),
        base=group_base(problem.cost, classes),
        bin_class=np.searchsorted(degrees, found.partition.size),
    )
    return packing.makespan(found.bin_of)


def _loads(problem: StepProblem, lengths: Ints, classes: list[GroupClass]) -> Floats:
    """As `group_loads`, but a sample that no node can hold keeps its group as wide as it is."""
    loads = group_loads(problem.cost, lengths, classes)
    too_long = lengths > problem.cluster.ranks_per_node * problem.max_tokens_per_rank
    if too_long.any():
        unchanged = [group._replace(repacked=False) for group in classes]
        loads[:, too_long] = group_loads(problem.cost, lengths[too_long], unchanged)
    return loads


def _scores(packings: list[Packing]) -> Floats:
    """A quick guess of each packing's height: its samples as a fluid, but no lower than its highest sample alone.

    Infinite where no group may hold some sample.
    """
    heights, base = packings[0].loads.sum(axis=0), packings[0].base.sum(axis=0)
    allowed = packings[0].allowed
    alone = heights + base if allowed is None else np.where(allowed, heights + base, np.inf)
    fluid = heights.sum(axis=0)
    scores = []
    for packing in packings:
        count = np.bincount(packing.bin_class, minlength=len(base))
        present = count > 0
        level = (1 + (count * base / fluid).sum()) / (count / fluid).sum()
        scores.append(max(level, float(alone[:, present].min(axis=1).max())))
    return np.array(scores)


def _refined(found: Grouping, extra_s: float) -> Grouping:
    bin_of = refine(found.packing, found.bin_of)
    return found._replace(estimate_s=found.packing.makespan(bin_of) + extra_s, bin_of=bin_of)
