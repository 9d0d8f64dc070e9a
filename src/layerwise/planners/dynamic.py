"""dynamic: groups of unlike widths, chosen for each micro-batch; one layout for all layers (repacking off).

Long samples get wide groups as far as the cost model says so, shorter ones fill those groups' tokens, and the ranks
that remain form narrow groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

import numpy as np

from layerwise.plan import Ints, MicrobatchPlan
from layerwise.planners.estimate import GroupClass, exposed_s
from layerwise.planners.grouping import ClassOf, Grouping, group_samples
from layerwise.planners.layout import lay_out
from layerwise.planners.packing import split_parts
from layerwise.planners.partitions import partitions, widths_allowed
from layerwise.planners.problem import HANDFUL, GroupOptions, StepProblem

# Above this share of the budget, packing gets hard, and one more micro-batch may be faster.
TIGHT_FILL = 0.85
# Groupings of a handful of samples that are predicted: every rank plans every step.
NUM_PREDICTED = 6

# Estimates take shares as level, to a fraction of a token, so predictions are no less than them but for float64 sums.
ROUNDING = 1e-6

# The groupings tried for the samples of each micro-batch, fastest first.
Division = list[list[Grouping]]


def plan_dynamic(
    problem: StepProblem, options: GroupOptions, class_of: ClassOf = GroupClass
) -> tuple[MicrobatchPlan, ...]:
    """The micro-batches with the least estimated seconds among those tried, by the loads of `class_of` groups."""
    return tuple(
        lay_out(problem.lengths, problem.cost.attention, groupings[0].parents())
        for groupings in group_step(problem, options, class_of)
    )


def group_step(problem: StepProblem, options: GroupOptions, class_of: ClassOf = GroupClass) -> Division:
    """The best division of the step's samples into micro-batches."""
    return divisions(problem, options, class_of)[0]


def divisions(problem: StepProblem, options: GroupOptions, class_of: ClassOf = GroupClass) -> list[Division]:
    """Ways to divide the step's samples into micro-batches, fastest first; another may be faster once repacked."""
    question = ("divisions", options.max_sp_degree, class_of)
    return problem.once(question, lambda: _divisions(problem, options, class_of))


def _divisions(problem: StepProblem, options: GroupOptions, class_of: ClassOf) -> list[Division]:
    ladder = widths_allowed(problem, options.max_sp_degree)
    problem.check_fits(ladder[-1], "raise max_sp_degree" if options.max_sp_degree else "use more ranks")
    fewest = problem.fewest_microbatches
    fill = problem.lengths.sum() / (fewest * problem.cluster.num_ranks * problem.max_tokens_per_rank)
    found: list[Division] = []
    for num_microbatches in range(fewest, len(problem.lengths) + 1):
        for parts in _splits(problem, num_microbatches):
            if found and sum(level_s(problem, part) for part in parts) >= min(map(_estimate_s, found)):
                continue  # not even level groups without communication would be faster
            division = [_group_microbatch(problem, part, ladder, class_of) for part in parts]
            if all(division):
                found.append(division)
        if found and (num_microbatches > fewest or fill < TIGHT_FILL):
            break
    return sorted(found, key=_estimate_s)


def _group_microbatch(problem: StepProblem, samples: Ints, ladder: list[int], class_of: ClassOf) -> list[Grouping]:
    """Groupings, fastest first. Estimates take shares as level; the best of a handful of samples are predicted."""

    def seconds(found: Grouping) -> float:
        microbatch = lay_out(problem.lengths, problem.cost.attention, found.parents())
        return problem.cost.time_microbatch(microbatch).seconds

    found = group_samples(problem, samples, partitions(problem, samples, ladder), class_of)
    if len(samples) > HANDFUL:
        return found
    predicted = (grouping._replace(estimate_s=seconds(grouping)) for grouping in found[:NUM_PREDICTED])
    return [*sorted(predicted, key=itemgetter(0)), *found[NUM_PREDICTED:]]


def level_s(problem: StepProblem, samples: Ints) -> float:
    """Seconds of a micro-batch that is spread evenly over all ranks and exchanges nothing."""
    lengths = problem.lengths[samples]
    return problem.cost.ideal_s(lengths) + exposed_s(problem.cost, lengths)


def _estimate_s(division: Division) -> float:
    return sum(groupings[0].estimate_s for groupings in division)


def least_s(problem: StepProblem, division: Division) -> float:
    """Seconds below which the prediction of the division's plan is not, but for rounding; 0 where that is not known.

    Micro-batches do not add up where ranks wait for one another at the end of the step only.
    """
    degrees = np.concatenate([groupings[0].partition.size for groupings in division])
    adds_up = len(division) == 1 or problem.cluster.sync == "layer"
    return _estimate_s(division) if adds_up and problem.estimates_are_bounds(degrees) else 0.0


def _splits(problem: StepProblem, num_microbatches: int) -> Iterator[list[Ints]]:
    """Ways to divide the samples over micro-batches: the longest together, or the work spread evenly."""
    capacity = problem.cluster.num_ranks * problem.max_tokens_per_rank
    for together in (True, False) if num_microbatches > 1 else (True,):
        part_of = split_parts(problem.lengths, problem.work_s, num_microbatches, capacity, longest_together=together)
        if part_of is not None:
            parts = [np.flatnonzero(part_of == part) for part in range(num_microbatches)]
            yield [samples for samples in parts if len(samples)]
