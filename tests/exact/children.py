"""The exact child problem, by CP-SAT: samples on aligned blocks inside nodes, the fullest rank as low as can be."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from layerwise.plan import Ints
from layerwise.spec import ClusterSpec
from layerwise.traffic import Block
from tests.exact.search import Choice, aligned_blocks, solved

# Loads become whole units of (all samples on one rank) / UNITS: what is proven is proven to 1e-6 of the fullest rank.
UNITS = 10**8


def child_blocks(cluster: ClusterSpec, within: Block) -> list[Block]:
    """Blocks of `within` that lie in one node."""
    return [
        block
        for block in aligned_blocks(cluster)
        if block.size <= cluster.ranks_per_node and within.lo <= block.lo and block.hi <= within.hi
    ]


def lowest_tops(
    cluster: ClusterSpec,
    within: Block,
    loads: dict[int, NDArray[np.float64]],
    base: NDArray[np.float64],
    tokens: Ints,
    budget: int,
) -> float:
    """The fullest ranks' loads, summed over dimensions, in the best placement of the samples on blocks of `within`.

    loads: for each degree, what a sample adds to each of its ranks, float64 [dims, samples]; base: what the
    ranks of `within` have anyway, float64 [dims, ranks]. Parts of samples, rounded up to whole tokens, stay within the
    budget of each rank.
    """
    model, unit = cp_model.CpModel(), float(loads[1].sum() + base.sum()) / UNITS
    blocks, samples = child_blocks(cluster, within), range(len(tokens))
    takes = {(i, block): model.new_bool_var("") for i in samples for block in blocks}
    for i in samples:
        model.add_exactly_one(takes[i, block] for block in blocks)
    tops = [model.new_int_var(0, 10 * UNITS, "") for _ in loads[1]]
    for rank in range(within.lo, within.hi):
        here = [(i, block) for i, block in takes if block.lo <= rank < block.hi]
        for dim, top in enumerate(tops):
            own = round(base[dim, rank - within.lo] / unit)
            model.add(own + sum(round(loads[b.size][dim, i] / unit) * takes[i, b] for i, b in here) <= top)
        model.add(sum(-(-int(tokens[i]) // b.size) * takes[i, b] for i, b in here) <= budget)
    model.minimize(sum(tops))
    solver = solved(model, f"children of {within}: {tokens.tolist()}")
    return solver.objective_value * unit


def tops_of(
    within: Block, chosen: dict[int, Choice], loads: dict[int, NDArray[np.float64]], base: NDArray[np.float64]
) -> float:
    """The same of the owners that were chosen; the columns of `loads` are the samples in ascending order."""
    ranks = base.copy()
    for column, (_, choice) in enumerate(sorted(chosen.items())):
        ranks[:, choice.owner.lo - within.lo : choice.owner.hi - within.lo] += loads[choice.owner.size][:, [column]]
    return float(ranks.max(axis=1).sum())
