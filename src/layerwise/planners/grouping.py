"""Samples into disjoint groups of ranks: many partitions scored, a few packed, the best refined.

Which loads a group gives its ranks is the caller's: those of one layout for all layers, or those that hold after its
samples are repacked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from layerwise.cost import CostModel, Floats
from layerwise.plan import Ints, Parent
from layerwise.planners.estimate import (
    GroupClass,
    GroupLoads,
    exposed_loads,
    exposed_s,
    group_base,
    group_loads,
    with_traffic,
)
from layerwise.planners.packing import Packing, pack_longest_first, refine
from layerwise.planners.partitions import Partition
from layerwise.planners.problem import MANY_SAMPLES, StepProblem

ClassOf = Callable[[int], GroupClass]

# How many partitions are packed, and how many of those refined: all that there are for a handful of samples.
FEW_SAMPLES = 64
NUM_PACKED = 3
NUM_REFINED, NUM_REFINED_FAR, NUM_REFINED_OF_FEW = 1, 3, 6
# Where the best is further than this above level work, the scores misled, and all partitions are packed.
FAR_FROM_LEVEL = 0.05
# Children are whole samples on few ranks, so a group that is to be repacked must leave a little room.
CHILD_FILL = 0.995


class Task(NamedTuple):
    """Samples to be packed into the groups of a partition, and what their seconds follow from beside the packing.

    tokens: of each rank, float64 [samples, classes]; compute_s: as of `GroupLoads`.
    """

    packing: Packing
    cost: CostModel
    tokens: Floats
    compute_s: Floats

    def seconds(self, bin_of: Ints) -> float:
        """Of a micro-batch whose shares are level: within its groups, the exact prediction but for rounding."""
        packing = self.packing
        items, kinds, num_bins = np.arange(len(bin_of)), packing.bin_class[bin_of], len(packing.bin_class)
        table = np.zeros((1 + len(self.compute_s), num_bins))
        for row, added in zip(table, (self.tokens[items, kinds], *self.compute_s[:, items, kinds]), strict=True):
            row[:] = np.bincount(bin_of, weights=added, minlength=num_bins)
        is_empty = np.bincount(bin_of, minlength=num_bins) == 0  # and sends nothing
        loads = packing.bin_loads(bin_of) - is_empty * packing.base
        loads = loads[: packing.num_dims] + exposed_loads(self.cost, table[1:], table[0])
        return float(loads.max(axis=1).sum())


class Grouping(NamedTuple):
    """Samples of a micro-batch in the groups of a partition, and the estimate of its seconds."""

    estimate_s: float
    partition: Partition
    samples: Ints
    task: Task
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
    tasks = make_tasks(problem, samples, candidates, class_of)
    count, lengths = len(samples), problem.lengths[samples]
    extra_s = exposed_s(problem.cost, lengths)
    scores = _scores(tasks, extra_s)
    good_s = (1 + FAR_FROM_LEVEL) * problem.cost.ideal_s(lengths) + extra_s

    def packed_once(index: int) -> Grouping | None:
        question = ("packed", class_of, samples.tobytes(), candidates[index].size.tobytes())
        return problem.once(question, lambda: _packed(candidates[index], samples, tasks[index]))

    def refined_once(found: Grouping) -> Grouping:
        is_near = count > FEW_SAMPLES and best_s <= good_s
        question = ("refined", class_of, samples.tobytes(), found.partition.size.tobytes(), is_near)
        return problem.once(question, lambda: _refined(found, is_near))

    packed: list[Grouping] = []
    best_s = np.inf
    for index in np.argsort(scores, kind="stable").tolist():
        if scores[index] == np.inf or _is_enough(
            len(packed), count, thorough, best_s <= good_s, scores[index] >= best_s
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


def _packed(partition: Partition, samples: Ints, task: Task) -> Grouping | None:
    bin_of = pack_longest_first(task.packing)
    return None if bin_of is None else Grouping(task.seconds(bin_of), partition, samples, task, bin_of)


def _is_enough(num_packed: int, num_samples: int, thorough: bool, is_good: bool, is_hopeless: bool) -> bool:
    """Whether to pack no further partition; `is_hopeless`: the next one's score is no better than the best so far."""
    if num_samples <= FEW_SAMPLES:
        return False
    if num_samples > MANY_SAMPLES:
        return num_packed >= NUM_PACKED
    return not thorough and (is_hopeless or (is_good and num_packed >= NUM_PACKED))


def make_tasks(problem: StepProblem, samples: Ints, candidates: Sequence[Partition], class_of: ClassOf) -> list[Task]:
    """What is packed into each partition; classes are the sizes of groups in any of them, ascending."""
    degrees = sorted({size for partition in candidates for size in np.unique(partition.size).tolist()})
    classes = [class_of(degree) for degree in degrees]
    lengths = problem.lengths[samples]
    loads, base = _loads(problem, samples, classes), group_base(problem.cost, classes)
    allowed = lengths[:, None] <= np.array(degrees) * problem.max_tokens_per_rank
    room = np.array([CHILD_FILL if group.repacked else 1.0 for group in classes])
    capacity = (np.array(degrees) * problem.max_tokens_per_rank * room).astype(np.int64)
    tokens = lengths[:, None] / np.array(degrees)
    rows = with_traffic(problem.cost, loads, base, lengths, np.array(degrees), problem.max_tokens_per_rank)
    packings = [
        Packing(
            loads=rows.loads,
            base=rows.base[:, bin_class],
            bin_class=bin_class,
            tokens=lengths,
            capacity_tokens=capacity[bin_class],
            allowed=None if allowed.all() else allowed,
            second_of=rows.second_of,
        )
        for bin_class in (np.searchsorted(degrees, partition.size) for partition in candidates)
    ]
    return [Task(packing, problem.cost, tokens, loads.compute_s) for packing in packings]


def seconds_with(problem: StepProblem, found: Grouping, class_of: ClassOf) -> float:
    """The estimate of the same groups with other loads."""
    (task,) = make_tasks(problem, found.samples, [found.partition], class_of)
    return task.seconds(found.bin_of)


def least_fluid_s(problem: StepProblem, samples: Ints, classes: list[GroupClass], below_s: float) -> float:
    """Seconds of the samples as a fluid, each in the groups that suit it best: no grouping takes less.

    Groups in which a sample alone would take more than `below_s` do not count, nor those without room for it.
    """
    lengths, degrees = problem.lengths[samples], np.array([group.degree for group in classes])
    num_ranks, found = problem.cluster.num_ranks, _loads(problem, samples, classes)
    alone_s = found.loads.sum(axis=0)
    is_open = (alone_s <= below_s) & (lengths[:, None] <= degrees * problem.max_tokens_per_rank)
    ranks_s = np.where(is_open, alone_s * degrees, np.inf).min(axis=1)
    # The more compute, the less of the parameters' traffic is exposed.
    compute_s = np.where(is_open, found.compute_s * degrees, 0).max(axis=2).sum(axis=1) / num_ranks
    exposed = exposed_loads(problem.cost, compute_s, lengths.sum() / num_ranks)
    return float(ranks_s.sum()) / num_ranks + float(exposed.sum())


def _loads(problem: StepProblem, samples: Ints, classes: list[GroupClass]) -> GroupLoads:
    """As `group_loads`, but a sample that no node can hold keeps its group as wide as it is."""
    found = [_class_loads(problem, group) for group in classes]
    too_long = problem.lengths[samples] > problem.cluster.ranks_per_node * problem.max_tokens_per_rank
    loads, compute_s = (np.stack(rows, axis=1)[:, :, samples] for rows in zip(*found, strict=True))
    if too_long.any():
        unchanged = (_class_loads(problem, group._replace(repacked=False)) for group in classes)
        loads[:, :, too_long] = np.stack([loads[:, samples[too_long]] for loads, _ in unchanged], axis=1)
    return GroupLoads(loads.swapaxes(1, 2), compute_s.swapaxes(1, 2))


def _class_loads(problem: StepProblem, group: GroupClass) -> tuple[Floats, Floats]:
    """What every sample of the step adds to groups of a class, float64 [dims, samples] and [layers, samples]."""

    def answer() -> tuple[Floats, Floats]:
        loads, compute_s = group_loads(problem.cost, problem.lengths, [group])
        return loads[:, :, 0], compute_s[:, :, 0]

    return problem.once(("loads", group), answer)


def _scores(tasks: list[Task], extra_s: float) -> Floats:
    """A quick guess of each packing's seconds: its samples as a fluid, but no less than its longest sample alone.

    Infinite where no group may hold that.
    """
    task = tasks[0]
    packing, longest = task.packing, int(task.packing.tokens.argmax())
    loads = packing.loads[: packing.num_dims]
    fluid = loads.sum(axis=(0, 1))
    exposed = exposed_loads(task.cost, task.compute_s[:, longest], task.tokens[longest])
    alone = (loads[:, longest] + exposed).sum(axis=0)
    if packing.allowed is not None:
        alone = np.where(packing.allowed[longest], alone, np.inf)
    scores = []
    for task in tasks:
        base, kinds = task.packing.base[: packing.num_dims].sum(axis=0), task.packing.bin_class
        level = (1 + (base / fluid[kinds]).sum()) / (1 / fluid[kinds]).sum()
        scores.append(max(level + extra_s, float((alone[kinds] + base).min())))
    return np.array(scores)


def _refined(found: Grouping, is_near: bool) -> Grouping:
    bin_of = refine(found.task.packing, found.bin_of, is_near)
    refined = found._replace(estimate_s=found.task.seconds(bin_of), bin_of=bin_of)
    return min(found, refined, key=lambda grouping: grouping.estimate_s)
