"""joint: a width for each sample instead of for each group; shards first, then tiles sample by sample.

Every sample takes the narrowest aligned block of ranks that keeps all ranks level, in tokens and in full attention at
once, so only long samples leave their node and short ones fill what they leave. Layers with a narrow mask fetch a halo
where that is cheaper than exchanging heads: a sample wider than a node is then a row of segments.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from layerwise.plan import Ints, MicrobatchPlan, Parent, Table, Tile, shard_table, tile_table
from layerwise.planners.estimate import exposed_s, nested_loads, prefers_halo
from layerwise.planners.layout import Placement, halo_tile_rows, shard_rows, tile_rows
from layerwise.planners.nesting import Nest, nest
from layerwise.planners.packing import split_parts
from layerwise.planners.partitions import widths_allowed
from layerwise.planners.problem import GroupOptions, StepProblem


class _Nested(NamedTuple):
    estimate_s: float
    placement: Placement


def plan_joint(problem: StepProblem, options: GroupOptions) -> tuple[MicrobatchPlan, ...]:
    """The micro-batches with the least estimated seconds, in as few as fit the budget."""
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
        found = [_place(problem, samples, loads[:, samples], widths) for samples in parts if len(samples)]
        whole = [nested for nested in found if nested is not None]
        if len(whole) == len(found):
            return tuple(_lay_out(problem, nested.placement) for nested in whole)
    raise AssertionError("one sample per micro-batch always fits")


def _place(problem: StepProblem, samples: Ints, loads: np.ndarray, widths: list[int]) -> _Nested | None:
    cluster = problem.cluster
    lengths = problem.lengths[samples]
    found = nest(
        Nest(
            samples=samples,
            lengths=lengths,
            loads=loads,
            widths=widths,
            first_rank=0,
            num_ranks=cluster.num_ranks,
            ranks_per_node=cluster.ranks_per_node,
            capacity_tokens=problem.max_tokens_per_rank,
        )
    )
    return None if found is None else _Nested(found[0] + exposed_s(problem.cost, lengths), found[1])


def _lay_out(problem: StepProblem, placement: Placement) -> MicrobatchPlan:
    shards = shard_rows(placement, problem.lengths)
    return MicrobatchPlan(
        shards=shard_table(shards),
        tiles={kind: _tiles(problem, kind, placement, shards) for kind in problem.cost.attention},
        parents=_parents(placement),
    )


def _tiles(problem: StepProblem, kind: str, placement: Placement, shards: Ints) -> Table[Tile]:
    """Heads over the block of each sample, or, where that is cheaper, each shard's own queries and a halo of keys."""
    (layer,) = (layer for layer in problem.cost.layers if layer.kind == kind)
    has_halo = np.zeros(len(problem.lengths), dtype=bool)
    for degree in np.unique(placement.degree).tolist():
        samples = placement.sample[placement.degree == degree]
        has_halo[samples] = prefers_halo(problem.cost, layer, problem.lengths[samples], degree)
    by_heads = ~has_halo[placement.sample]
    rest = Placement(placement.sample[by_heads], placement.first[by_heads], placement.degree[by_heads])
    rows = [tile_rows(rest, problem.lengths, layer.spec), halo_tile_rows(shards[has_halo[shards[:, 0]]], layer.spec)]
    return tile_table(np.concatenate(rows))


def _parents(placement: Placement) -> tuple[Parent, ...]:
    """The samples of each block; blocks of different widths overlap."""
    blocks: dict[tuple[int, int], list[int]] = {}
    for sample, first, degree in zip(*(column.tolist() for column in vars(placement).values()), strict=True):
        blocks.setdefault((first, degree), []).append(sample)
    return tuple(
        Parent(first_rank=first, sp_degree=degree, samples=tuple(sorted(samples)))
        for (first, degree), samples in sorted(blocks.items())
    )
