"""halo: groups and contiguous shards as in `dynamic`, but layers with a local mask fetch only the keys that they need.

Each rank computes the queries of its own shards with all heads, so of a sliding layer at most window - 1 keys cross a
cut (the rival answer to repacking: Megatron-LM issue 5593). Layers that need whole samples stay wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from layerwise.cost import Floats
from layerwise.plan import MicrobatchPlan, Parent, tile_table
from layerwise.planners.estimate import GroupClass
from layerwise.planners.layout import halo_tile_rows
from layerwise.planners.problem import GroupOptions, StepProblem


class HaloOptions(GroupOptions):
    """fallback: keep a group's wide layout in layers of a kind where halos are predicted to be slower."""

    fallback: bool = True


class _Halos(NamedTuple):
    """A micro-batch, its groups of several ranks, and how many of those use halos in every local kind."""

    microbatch: MicrobatchPlan
    num_parents: int
    num_halo: int


def halo_class(degree: int) -> GroupClass:
    """A group whose local layers use halos: the loads by which groups can be chosen for this strategy."""
    return GroupClass(degree, halo=True)


def plan_halo(
    problem: StepProblem, groupings: Sequence[tuple[MicrobatchPlan, ...]], options: HaloOptions
) -> tuple[tuple[MicrobatchPlan, ...], dict[str, int]]:
    """The fastest of these wide steps once they have halos; with fallback, no slower than any of them without."""
    steps = [[_with_halos(problem, microbatch, options) for microbatch in step] for step in groupings]
    if options.fallback:
        steps += [[_use_halos(problem, microbatch, {}) for microbatch in step] for step in groupings]
    best = min(steps, key=lambda step: _step_s(problem, step))
    parents, halo = sum(found.num_parents for found in best), sum(found.num_halo for found in best)
    return tuple(found.microbatch for found in best), {"parents": parents, "halo": halo, "fallbacks": parents - halo}


def _step_s(problem: StepProblem, step: list[_Halos]) -> float:
    return problem.cost.step_s([problem.cost.predict_microbatch(found.microbatch) for found in step])


def _with_halos(problem: StepProblem, wide: MicrobatchPlan, options: HaloOptions) -> _Halos:
    """Halos in each local kind for every group, or for those groups whose slowest rank they do not slow down.

    Groups share no rank, so where ranks wait at every layer no other choice of groups is faster.
    """
    everywhere = {kind: wide.parents for kind, spec in problem.cost.attention.items() if spec.is_local}
    found = _use_halos(problem, wide, everywhere)
    if not options.fallback:
        return found
    halo_s, wide_s = problem.cost.layer_times(found.microbatch), problem.cost.layer_times(wide)
    chosen = {
        kind: tuple(p for p in parents if _slowest_s(p, halo_s[kind].total_s) <= _slowest_s(p, wide_s[kind].total_s))
        for kind, parents in everywhere.items()
    }
    return _use_halos(problem, wide, chosen)


def _slowest_s(parent: Parent, rank_s: Floats) -> float:
    return float(rank_s[parent.first_rank : parent.first_rank + parent.sp_degree].max())


def _use_halos(problem: StepProblem, wide: MicrobatchPlan, parents_of: Mapping[str, tuple[Parent, ...]]) -> _Halos:
    """The micro-batch with halos in layers of each kind for the groups given with it."""
    tiles = dict(wide.tiles)
    for kind, parents in parents_of.items():
        samples = [sample for parent in parents for sample in parent.samples]
        own = wide.shards.rows[np.isin(wide.shards.column("sample"), samples)]
        rest = tiles[kind].rows[~np.isin(tiles[kind].column("sample"), samples)]
        tiles[kind] = tile_table(np.concatenate([rest, halo_tile_rows(own, problem.cost.attention[kind])]))
    shared = [parent for parent in wide.parents if parent.sp_degree > 1]
    halo = [parent for parent in shared if parents_of and all(parent in parents for parents in parents_of.values())]
    return _Halos(replace(wide, tiles=tiles), len(shared), len(halo))
