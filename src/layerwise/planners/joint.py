"""joint: a width for each sample instead of for each group; shards first, then tiles sample by sample.

Every sample takes the narrowest aligned block of ranks that keeps all ranks level, in tokens and in full attention at
once, so only long samples leave their node and short ones fill what they leave. Layers with a narrow mask fetch a halo
where that is cheaper than exchanging heads: a sample wider than a node is then a row of segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from layerwise.cost import Floats
from layerwise.plan import Ints, MicrobatchPlan, Parent
from layerwise.planners.dynamic import ROUNDING, group_step, least_s, level_s, plan_dynamic
from layerwise.planners.estimate import exposed_s, nested_loads, site_floor_s
from layerwise.planners.halo import HaloOptions, halo_samples, lay_out_halos, plan_halo
from layerwise.planners.layout import Placement, level_shard_rows
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
# Up to so many samples are placed with a fine search; in a step of up to so many, each is spread in turn.
FEW, EACH = 200, 24
# More than so many are placed with the quickest search.
VERY_MANY = 5000
# Of those placements, so many with the least estimates are predicted.
NUM_PREDICTED = 6
# Parents and children are tried where ours takes this share more than level work, and saves less than so much of what
# `dynamic` takes: more they hardly ever save.
FAR, REPACKING_SAVES = 0.05, 0.15


Microbatches = tuple[MicrobatchPlan, ...]


class _Nested(NamedTuple):
    """Samples placed, their shards levelled, and the estimate of the micro-batch's seconds."""

    estimate_s: float
    placement: Placement
    shards: Ints
    excess: float


class JointOptions(GroupOptions):
    """fallback: keep the plan of another strategy where it is predicted to be faster."""

    fallback: bool = True


def plan_joint(problem: StepProblem, options: JointOptions) -> tuple[Microbatches, dict[str, int]]:
    """The micro-batches with the least predicted seconds, and 1 as `fallbacks` where they are another strategy's."""
    own = _own_plan(problem, options)
    if not options.fallback:
        return own, {"fallbacks": 0}
    own_s = problem.predicted_s(own)
    rival_s, rival = min(_rivals(problem, options, own_s), key=itemgetter(0), default=(np.inf, own))
    return (rival, {"fallbacks": 1}) if rival_s < own_s else (own, {"fallbacks": 0})


def _rivals(problem: StepProblem, options: JointOptions, own_s: float) -> Iterator[tuple[float, Microbatches]]:
    """Plans of other strategies that may take less than `own_s`, and their predicted seconds."""
    count, dynamic_s = len(problem.lengths), least_s(problem, group_step(problem, options))
    if count <= HANDFUL or dynamic_s <= (1 + ROUNDING) * own_s:
        plan = plan_dynamic(problem, options)
        dynamic_s = problem.predicted_s(plan)
        yield dynamic_s, plan
    if count <= FEW or dynamic_s < own_s:
        plan = plan_halo(problem, HaloOptions(max_sp_degree=options.max_sp_degree))[0]
        yield problem.predicted_s(plan), plan
    if count <= HANDFUL or (
        count <= FEW
        and own_s > (1 - REPACKING_SAVES) * dynamic_s
        and own_s > (1 + FAR) * level_s(problem, np.arange(count))
    ):
        plan = plan_repack_parents(problem, RepackOptions(max_sp_degree=options.max_sp_degree))[0]
        yield problem.predicted_s(plan), plan


def _own_plan(problem: StepProblem, options: JointOptions) -> Microbatches:
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
        microbatches: list[MicrobatchPlan] = []
        for samples in (np.flatnonzero(part_of == part) for part in np.unique(part_of)):
            placed = _place(problem, samples, loads[:, samples], widths)
            if placed is None:
                break
            microbatches.append(placed)
        else:
            return tuple(microbatches)
    raise AssertionError("one sample per micro-batch always fits")


def _place(problem: StepProblem, samples: Ints, loads: Floats, widths: list[int]) -> MicrobatchPlan | None:
    """The best of several placements: as narrow as may be, and, where that is uneven, with one sample over all ranks.

    The latter are not tried for many samples, which are nearly even anyway.
    """
    cluster, lengths = problem.cluster, problem.lengths[samples]
    floor = site_floor_s(problem.cost, lengths)
    hidden = floor > 0
    question = Nest(
        samples=samples,
        lengths=lengths,
        loads=np.concatenate([loads[:3], loads[3:][hidden]]),
        floor=np.concatenate([[0], floor, floor[hidden] * 0]),
        widths=widths,
        first_rank=0,
        num_ranks=cluster.num_ranks,
        ranks_per_node=cluster.ranks_per_node,
        capacity_tokens=problem.max_tokens_per_rank,
        search=_search(problem, len(samples)),
    )
    best = _solve(problem, question, floor)
    if best is not None and (best.excess <= UNEVEN or len(samples) > MANY_SAMPLES):
        return _lay_out(problem, best)
    found = [best, *(_solve(problem, spread, floor) for spread in _with_one_spread(problem, question))]
    likely = sorted((nested for nested in found if nested), key=lambda nested: _worth_s(nested, nested.estimate_s))
    likely = likely[: 1 if len(problem.lengths) > FEW else NUM_PREDICTED]
    plans = [(nested, _lay_out(problem, nested)) for nested in likely]
    if len(plans) > 1:
        plans.sort(key=lambda plan: _worth_s(plan[0], problem.predicted_s([plan[1]])))
    return plans[0][1] if plans else None


def _search(problem: StepProblem, num_samples: int) -> Search:
    """How hard to look for a micro-batch of so many samples: hard only in a step of few."""
    if len(problem.lengths) <= FEW:
        return THOROUGH if len(problem.lengths) <= HANDFUL else FINE
    return QUICK if num_samples > VERY_MANY else USUAL


def _with_one_spread(problem: StepProblem, question: Nest) -> Iterator[Nest]:
    """The longest sample over all ranks, or, in a step of few samples, each in turn."""
    if len(problem.lengths) > EACH:
        yield replace(question, spread=int(question.lengths.argmax()))
        return
    for sample in range(len(question.samples)):
        yield replace(question, spread=sample, search=FINE)


def _worth_s(nested: _Nested, seconds: float) -> float:
    """A little more than its seconds where tokens are not level, which memory pays for too."""
    return seconds * (1 + WORTH * (nested.excess > LEVEL))


def _solve(problem: StepProblem, question: Nest, floor: Floats) -> _Nested | None:
    def seconds(height: Floats) -> Floats:
        return _step_s(height, floor, problem.cluster.sync)

    found = nest(question, seconds)
    if found is None:
        return None
    height, placement = found
    shards = level_shard_rows(placement, problem.lengths, question.num_ranks)
    tokens = np.bincount(shards[:, 1], weights=shards[:, 3] - shards[:, 2], minlength=question.num_ranks)
    # What follows tokens is as level as the shards; the rest is as the placement has it.
    token_s = question.loads[0, :, 0].sum() / question.lengths.sum()
    estimate_s = float(seconds(np.stack([token_s * tokens, *height[1:]])))
    if not floor.any():  # else it counts traffic already
        estimate_s += exposed_s(problem.cost, question.lengths)
    return _Nested(estimate_s, placement, shards, float(tokens.max() / tokens.mean() - 1))


def _step_s(height: Floats, floor: Floats, sync: str) -> Floats:
    """Seconds of tables [..., dims, ranks] of linear work, both kinds of sites, and exchanges of those with a floor."""
    linear, sites, exchanges = height[..., 0, :], height[..., 1:3, :], height[..., 3:, :]
    if exchanges.shape[-2]:
        hidden = floor > 0
        sites = sites.copy()
        sites[..., hidden, :] = np.maximum(sites[..., hidden, :], floor[hidden, None] + exchanges)
    if sync == "step":
        return np.asarray((linear + sites.sum(axis=-2)).max(axis=-1))
    return np.asarray(linear.max(axis=-1) + sites.max(axis=-1).sum(axis=-1))


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
