"""halo: groups and contiguous shards as in `dynamic`, but layers with a local mask fetch only the keys that they need.

Each rank computes the queries of its own shards with all heads, so of a sliding layer at most window - 1 keys cross a
cut (the rival answer to repacking: Megatron-LM issue 5593). Samples for which that is slower exchange heads; layers
that need whole samples stay wide.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerwise.plan import Ints, MicrobatchPlan, Parent, Table, Tile, shard_table, tile_table
from layerwise.planners.dynamic import ROUNDING, Division, group_step, least_s, plan_dynamic
from layerwise.planners.estimate import GroupClass, prefers_halo
from layerwise.planners.grouping import least_fluid_s, seconds_with
from layerwise.planners.layout import Placement, batched, halo_tile_rows, place, shard_rows, tile_rows
from layerwise.planners.partitions import widths_allowed
from layerwise.planners.problem import GroupOptions, StepProblem

# Other groups are sought only where no bound forbids that they save more than this share of the seconds.
WORTHWHILE = 0.02

HaloSamples = dict[str, NDArray[np.bool_]]


class HaloOptions(GroupOptions):
    """fallback: samples exchange heads in layers of a kind where halos are predicted to be slower."""

    fallback: bool = True


def halo_class(degree: int) -> GroupClass:
    """A group whose local layers use halos: the loads by which groups can be chosen for this strategy."""
    return GroupClass(degree, halo=True)


class _Halos(NamedTuple):
    """A step's micro-batches, how many of its groups use halos, and its seconds."""

    microbatches: tuple[MicrobatchPlan, ...]
    num_halo: int
    seconds: float


def plan_halo(problem: StepProblem, options: HaloOptions) -> tuple[tuple[MicrobatchPlan, ...], dict[str, int]]:
    """The groups of `dynamic`, or those chosen for halos, with halos; with fallback, no slower than without."""
    wide = group_step(problem, options)
    (_, division), *others = sorted(_divisions(problem, options, wide), key=lambda found: found[0])
    best = _use_halos(problem, division, options)
    for bound_s, division in others:
        if bound_s < best.seconds:
            best = min(best, _use_halos(problem, division, options), key=lambda found: found.seconds)
    if options.fallback and least_s(problem, wide) <= (1 + ROUNDING) * best.seconds:
        unchanged = plan_dynamic(problem, options)
        best = min(best, _Halos(unchanged, 0, problem.predicted_s(unchanged)), key=lambda found: found.seconds)
    num_parents = sum(parent.sp_degree > 1 for microbatch in best.microbatches for parent in microbatch.parents)
    notes = {"parents": num_parents, "halo": best.num_halo, "fallbacks": num_parents - best.num_halo}
    return best.microbatches, notes


def _divisions(problem: StepProblem, options: HaloOptions, wide: Division) -> list[tuple[float, Division]]:
    """The groups of `dynamic` and those for halos, with the least seconds that halos can take in them.

    The latter only where halos could save a good part of what the groups of `dynamic` take with them.
    """
    fastest = [groupings[0] for groupings in wide]
    with_halos = [[found._replace(estimate_s=seconds_with(problem, found, halo_class))] for found in fastest]
    divisions = [with_halos]
    classes = [halo_class(degree) for degree in widths_allowed(problem, options.max_sp_degree)]
    if any(
        found.estimate_s > (1 + WORTHWHILE) * least_fluid_s(problem, found.samples, classes, found.estimate_s)
        for (found,) in with_halos
    ):
        divisions.append(group_step(problem, options, halo_class))
    different = {tuple(groupings[0].parents() for groupings in division): division for division in divisions}
    return [(least_s(problem, division), division) for division in different.values()]


def _use_halos(problem: StepProblem, division: Division, options: HaloOptions) -> _Halos:
    microbatches, num_halo = [], 0
    for groupings in division:
        parents = groupings[0].parents()
        placement = place(parents)
        with_halo = halo_samples(problem, placement, everywhere=not options.fallback)
        shards = shard_rows(batched(placement, problem.lengths))
        microbatches.append(lay_out_halos(problem, placement, shards, with_halo, parents))
        used = np.any(list(with_halo.values()), axis=0)
        num_halo += sum(bool(used[list(parent.samples)].any()) for parent in parents)
    return _Halos(tuple(microbatches), num_halo, problem.predicted_s(microbatches))


def halo_samples(problem: StepProblem, placement: Placement, *, everywhere: bool = False) -> HaloSamples:
    """By layer kind, the samples whose ranks fetch halos: those for which that is faster, or all that can.

    bool [samples of the step] each.
    """
    found: HaloSamples = {layer.kind: np.zeros(len(problem.lengths), dtype=bool) for layer in problem.cost.layers}
    for degree in np.unique(placement.degree).tolist():
        samples = placement.sample[placement.degree == degree]
        for layer in problem.cost.layers:
            prefers = prefers_halo(problem.cost, layer, problem.lengths[samples], degree)
            found[layer.kind][samples] = prefers | (everywhere and layer.spec.is_local and degree > 1)
    return found


def lay_out_halos(
    problem: StepProblem, placement: Placement, shards: Ints, with_halo: HaloSamples, parents: tuple[Parent, ...]
) -> MicrobatchPlan:
    """Heads over the block of each sample, or each shard's own queries and a halo of keys."""
    tiles: dict[str, Table[Tile]] = {}
    whole = batched(placement, problem.lengths)
    for layer in problem.cost.layers:
        halo = with_halo[layer.kind]
        if not halo.any():
            tiles[layer.kind] = tile_table(tile_rows(whole, layer.spec))
            continue
        by_heads = ~halo[placement.sample]
        rest = Placement(placement.sample[by_heads], placement.first[by_heads], placement.degree[by_heads])
        rows = tile_rows(batched(rest, problem.lengths), layer.spec)
        own = halo_tile_rows(shards[halo[shards[:, 0]]], layer.spec)
        tiles[layer.kind] = tile_table(np.concatenate([rows, own]))
    return MicrobatchPlan(shards=shard_table(shards), tiles=tiles, parents=parents)
