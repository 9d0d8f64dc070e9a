"""halo: groups and contiguous shards as in `dynamic`, but layers with a local mask fetch only the keys that they need.

Each rank computes the queries of its own shards with all heads, so of a sliding layer at most window - 1 keys cross a
cut (the rival answer to repacking: Megatron-LM issue 5593). Layers that need whole samples stay wide.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from layerwise.cost import LayerTimes, MicrobatchTimes
from layerwise.plan import MicrobatchPlan, Parent, tile_table
from layerwise.planners.dynamic import group_step
from layerwise.planners.estimate import GroupClass
from layerwise.planners.layout import halo_tile_rows, lay_out
from layerwise.planners.problem import GroupOptions, StepProblem


class HaloOptions(GroupOptions):
    """fallback: keep a group's wide layout in layers of a kind where halos are predicted to be slower."""

    fallback: bool = True


class _Halos(NamedTuple):
    """A micro-batch and its times, its groups of several ranks, and how many of those use halos in every local kind."""

    microbatch: MicrobatchPlan
    times: MicrobatchTimes
    num_parents: int
    num_halo: int


def halo_class(degree: int) -> GroupClass:
    """A group whose local layers use halos: the loads by which groups can be chosen for this strategy."""
    return GroupClass(degree, halo=True)


def plan_halo(problem: StepProblem, options: HaloOptions) -> tuple[tuple[MicrobatchPlan, ...], dict[str, int]]:
    """The groups of `dynamic`, or those chosen for halos, with halos; with fallback, no slower than without."""
    divisions = (group_step(problem, options, class_of) for class_of in (GroupClass, halo_class))
    groups = dict.fromkeys(tuple(groupings[0].parents() for groupings in division) for division in divisions)
    steps: list[list[_Halos]] = []
    for parents in groups:
        wide = (lay_out(problem.lengths, problem.cost.attention, found) for found in parents)
        ways = [_ways(problem, microbatch, options) for microbatch in wide]
        steps += [list(step) for step in zip(*ways, strict=True)]
    best = min(steps, key=lambda step: problem.cost.step_s([found.times for found in step]))
    num_parents, num_halo = sum(found.num_parents for found in best), sum(found.num_halo for found in best)
    notes = {"parents": num_parents, "halo": num_halo, "fallbacks": num_parents - num_halo}
    return tuple(found.microbatch for found in best), notes


def _ways(problem: StepProblem, wide: MicrobatchPlan, options: HaloOptions) -> list[_Halos]:
    """Halos in each local kind for every group; or for those groups whose slowest rank they do not slow down, and none.

    Groups share no rank, so where ranks wait at every layer no other choice of groups is faster.
    """
    specs = problem.cost.attention
    local = [kind for kind, spec in specs.items() if spec.is_local]
    everywhere = _use_halos(problem, wide, dict.fromkeys(local, wide.parents))
    if not options.fallback:
        return [everywhere]
    known = {kind: everywhere.times.times[kind] for kind in specs if kind not in local}
    nowhere = _use_halos(problem, wide, {}, known)
    chosen = {kind: tuple(p for p in wide.parents if _gains(p, kind, everywhere, nowhere)) for kind in local}
    if all(chosen[kind] == wide.parents for kind in local):
        return [everywhere, nowhere]
    return [_use_halos(problem, wide, chosen, known) if any(chosen.values()) else nowhere, nowhere]


def _gains(parent: Parent, kind: str, halo: _Halos, wide: _Halos) -> bool:
    """Whether the group's slowest rank takes no longer with halos in layers of this kind."""
    ranks = slice(parent.first_rank, parent.first_rank + parent.sp_degree)
    halo_s, wide_s = (float(found.times.times[kind].total_s[ranks].max()) for found in (halo, wide))
    return halo_s <= wide_s


def _use_halos(
    problem: StepProblem,
    wide: MicrobatchPlan,
    parents_of: Mapping[str, tuple[Parent, ...]],
    known: Mapping[str, LayerTimes] = MappingProxyType({}),
) -> _Halos:
    """The micro-batch with halos in layers of each kind for the groups given with it; `known` times of other kinds."""
    tiles = dict(wide.tiles)
    for kind, parents in parents_of.items():
        samples = [sample for parent in parents for sample in parent.samples]
        own = wide.shards.rows[np.isin(wide.shards.column("sample"), samples)]
        rest = tiles[kind].rows[~np.isin(tiles[kind].column("sample"), samples)]
        tiles[kind] = tile_table(np.concatenate([rest, halo_tile_rows(own, problem.cost.attention[kind])]))
    shared = [parent for parent in wide.parents if parent.sp_degree > 1]
    halo = [parent for parent in shared if parents_of and all(parent in parents for parents in parents_of.values())]
    microbatch = replace(wide, tiles=tiles)
    return _Halos(microbatch, problem.cost.time_microbatch(microbatch, known), len(shared), len(halo))
