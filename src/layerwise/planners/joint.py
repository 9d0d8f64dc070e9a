"""joint: a width for each sample instead of for each group; shards first, then tiles sample by sample.

Every sample takes the narrowest aligned block of ranks that keeps all ranks level, in tokens and in full attention at
once, so only long samples leave their node and short ones fill what they leave. Layers with a narrow mask fetch a halo
where that is cheaper than exchanging heads: a sample wider than a node is then a row of segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from layerwise.cost import Floats
from layerwise.plan import Ints, MicrobatchPlan, Parent
from layerwise.planners.dynamic import ROUNDING, Division, group_step, least_s
from layerwise.planners.estimate import exposed_s, nested_loads
from layerwise.planners.halo import halo_samples, lay_out_halos
from layerwise.planners.layout import Placement, lay_out, level_shard_rows
from layerwise.planners.nesting import FINE, QUICK, THOROUGH, USUAL, Nest, Search, nest
from layerwise.planners.packing import split_parts
from layerwise.planners.parents import plan_repack_parents
from layerwise.planners.partitions import widths_allowed
from layerwise.planners.problem import HANDFUL, MANY_SAMPLES, GroupOptions, StepProblem
from layerwise.planners.repack import RepackOptions

# Above this share over the mean, the fullest rank's tokens are worth spreading a sample over all ranks.
UNEVEN = 0.003
# Within this share over the mean, tokens are called level; that is worth so much of the seconds.
LEVEL, WORTH = 0.01, 0.005
# Up to so many samples are placed with a fine search; of up to so many, each is spread in turn.
FEW, EACH = 200, 24
# Of those placements, so many with the least estimates are predicted.
NUM_PREDICTED = 6


class _Nested(NamedTuple):
    """Samples placed, their shards levelled, and the estimate of the micro-batch's seconds."""

    estimate_s: float
    placement: Placement
    shards: Ints
    excess: float


class JointOptions(GroupOptions):
    """fallback: keep the plan of another strategy where it is predicted to be faster."""

    fallback: bool = True


def plan_joint(problem: StepProblem, options: JointOptions) -> tuple[tuple[MicrobatchPlan, ...], dict[str, int]]:
    """The micro-batches with the least predicted seconds, and 1 as `fallbacks` where they are another strategy's."""
    own = _own_plan(problem, options)
    if not options.fallback:
        return own, {"fallbacks": 0}
    dynamic = group_step(problem, options)
    best, best_s = own, problem.predicted_s(own)
    hopeless = len(problem.lengths) > HANDFUL and least_s(problem, dynamic) > (1 + ROUNDING) * best_s
    for rival in [] if hopeless else _rivals(problem, options, dynamic):
        if (rival_s := problem.predicted_s(rival)) < best_s:
            best, best_s = rival, rival_s
    if best is own or len(problem.lengths) <= MANY_SAMPLES:
        return best, {"fallbacks": int(best is not own)}
    # Many samples were placed in a hurry.
    own = _own_plan(problem, options, hurry=False)
    return (own, {"fallbacks": 0}) if problem.predicted_s(own) <= best_s else (best, {"fallbacks": 1})


def _rivals(problem: StepProblem, options: JointOptions, dynamic: Division) -> Iterator[tuple[MicrobatchPlan, ...]]:
    """Plans of other strategies that may be faster."""
    yield tuple(lay_out(problem.lengths, problem.cost.attention, found[0].parents()) for found in dynamic)
    if len(problem.lengths) <= HANDFUL:
        yield plan_repack_parents(problem, RepackOptions(max_sp_degree=options.max_sp_degree))[0]


def _own_plan(problem: StepProblem, options: JointOptions, hurry: bool = True) -> tuple[MicrobatchPlan, ...]:
    """joint's own plan; in a `hurry`, many samples are placed with the quickest search."""
    return tuple(_lay_out(problem, part) for part in _nest_step(problem, options, hurry))


def _nest_step(problem: StepProblem, options: JointOptions, hurry: bool) -> list[_Nested]:
    """Every sample on a block of its own, in as few micro-batches as fit the budget."""
    widths = widths_allowed(problem, options.max_sp_degree)
    problem.check_fits(widths[-1], "raise max_sp_degree" if options.max_sp_degree else "use more ranks")
    loads = nested_loads(problem.cost, problem.lengths, widths)
    capacity = problem.cluster.num_ranks * problem.max_tokens_per_rank
    for num_microbatches in range(problem.fewest_microbatches, len(problem.lengths) + 1):
        part_of = split_parts(
            problem.lengths, problem.work_s, num_microbatches, capacity, longest_together=num_microbatches == 1
        )
        if part_of is None:
            continue
        parts = [np.flatnonzero(part_of == part) for part in range(num_microbatches)]
        found = [_place(problem, samples, loads[:, samples], widths, hurry) for samples in parts if len(samples)]
        whole = [nested for nested in found if nested is not None]
        if len(whole) == len(found):
            return whole
    raise AssertionError("one sample per micro-batch always fits")


def _place(problem: StepProblem, samples: Ints, loads: Floats, widths: list[int], hurry: bool) -> _Nested | None:
    """The best of several placements: as narrow as may be, and, where that is uneven, with one sample over all ranks.

    The latter are not tried for many samples, which are nearly even anyway.
    """
    cluster = problem.cluster
    question = Nest(
        samples=samples,
        lengths=problem.lengths[samples],
        loads=loads,
        widths=widths,
        first_rank=0,
        num_ranks=cluster.num_ranks,
        ranks_per_node=cluster.ranks_per_node,
        capacity_tokens=problem.max_tokens_per_rank,
        search=_search(len(samples), hurry),
    )
    best = _solve(problem, question)
    if best is not None and (best.excess <= UNEVEN or len(samples) > MANY_SAMPLES):
        return best
    found = [best, *(_solve(problem, spread) for spread in _with_one_spread(question))]
    likely = sorted((nested for nested in found if nested), key=lambda nested: _worth_s(nested, nested.estimate_s))

    def predicted_worth_s(nested: _Nested) -> float:
        return _worth_s(nested, problem.predicted_s([_lay_out(problem, nested)]))

    if len(samples) > FEW:
        return next(iter(likely), None)
    return min(likely[:NUM_PREDICTED], key=predicted_worth_s, default=None)


def _search(num_samples: int, hurry: bool) -> Search:
    if num_samples <= HANDFUL:
        return THOROUGH
    return FINE if num_samples <= FEW else USUAL if num_samples <= MANY_SAMPLES or not hurry else QUICK


def _with_one_spread(question: Nest) -> Iterator[Nest]:
    """The longest sample over all ranks, or, of a few samples, each in turn."""
    count = len(question.samples)
    if count > EACH:
        yield replace(question, spread=int(question.lengths.argmax()))
        return
    for sample in range(count):
        yield replace(question, spread=sample, search=FINE)


def _worth_s(nested: _Nested, seconds: float) -> float:
    """A little more than its seconds where tokens are not level, which memory pays for too."""
    return seconds * (1 + WORTH * (nested.excess > LEVEL))


def _solve(problem: StepProblem, question: Nest) -> _Nested | None:
    found = nest(question, lambda height: np.asarray(height.max(axis=-1).sum(axis=-1)))
    if found is None:
        return None
    height, placement = found
    shards = level_shard_rows(placement, problem.lengths, question.num_ranks)
    tokens = np.bincount(shards[:, 1], weights=shards[:, 3] - shards[:, 2], minlength=question.num_ranks)
    # What follows tokens is as level as the shards; the rest is as the placement has it.
    level_s = question.loads[0, :, 0].sum() / question.lengths.sum() * tokens.max()
    estimate_s = level_s + float(height[1:].max(axis=1).sum()) + exposed_s(problem.cost, question.lengths)
    return _Nested(estimate_s, placement, shards, float(tokens.max() / tokens.mean() - 1))


def _lay_out(problem: StepProblem, nested: _Nested) -> MicrobatchPlan:
    placement, with_halo = nested.placement, halo_samples(problem, nested.placement)
    return lay_out_halos(problem, placement, nested.shards, with_halo, _parents(placement))


def _parents(placement: Placement) -> tuple[Parent, ...]:
    """The samples of each block; blocks of different widths overlap."""
    blocks: dict[tuple[int, int], list[int]] = {}
    for sample, first, degree in zip(*(column.tolist() for column in vars(placement).values()), strict=True):
        blocks.setdefault((first, degree), []).append(sample)
    return tuple(
        Parent(first_rank=first, sp_degree=degree, samples=tuple(sorted(samples)))
        for (first, degree), samples in sorted(blocks.items())
    )
