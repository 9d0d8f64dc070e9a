"""The child solver: which node, SP degree and aligned ranks each sample of a parent gets for its shards.

Two levels: samples are first balanced over the parent's nodes, then each sample takes the narrowest block of
its node that keeps the ranks level. Blocks of different samples may overlap: a rank owns shards of several
widths.
"""

from __future__ import annotations

import numpy as np

from layerwise.plan import Ints, Parent
from layerwise.planners.estimate import child_loads
from layerwise.planners.layout import Placement
from layerwise.planners.packing import Floats, Packing, pack_longest_first, refine
from layerwise.planners.problem import StepProblem

# How far above the mean load of the fullest node a rank may go before a sample takes a wider block.
TOLERANCES = (0.0, 0.01, 0.03, 0.1)


def child_degrees(num_ranks: int) -> list[int]:
    """Widths of children on `num_ranks` ranks of one node, ascending: the powers of two, and all of them."""
    return [1 << i for i in range((num_ranks - 1).bit_length())] + [num_ranks]


def solve_children(problem: StepProblem, parent: Parent) -> Placement | None:
    """Where the parent's samples keep their shards, or None where they do not fit in its nodes."""
    node_ranks = min(parent.sp_degree, problem.cluster.ranks_per_node)
    samples = np.array(parent.samples, dtype=np.int64)
    lengths, degrees = problem.lengths[samples], child_degrees(node_ranks)
    seconds = child_loads(problem.cost, lengths, degrees)
    node_of = _split_over_nodes(problem, lengths, seconds, parent.sp_degree // node_ranks, node_ranks)
    if node_of is None:
        return None
    levels = np.bincount(node_of, weights=seconds[:, 0]) / node_ranks
    best: tuple[float, int, Ints] | None = None
    for tolerance in TOLERANCES:
        filled = _fill_nodes(problem, lengths, seconds, degrees, node_of, (1 + tolerance) * float(levels.max()))
        if filled is not None and (best is None or filled[:2] < best[:2]):
            best = filled
    if best is None:
        return None
    _, _, blocks = best
    return Placement(samples, parent.first_rank + node_of * node_ranks + blocks[:, 0], blocks[:, 1])


def _split_over_nodes(
    problem: StepProblem, lengths: Ints, seconds: Floats, num_nodes: int, node_ranks: int
) -> Ints | None:
    packing = Packing(
        loads=seconds[None, :, [0]] / node_ranks,
        base=np.zeros((1, 1)),
        bin_class=np.zeros(num_nodes, dtype=np.int64),
        tokens=lengths,
        capacity_tokens=np.full(num_nodes, node_ranks * problem.max_tokens_per_rank),
    )
    node_of = pack_longest_first(packing)
    return node_of if node_of is None or num_nodes == 1 else refine(packing, node_of)


def _fill_nodes(
    problem: StepProblem, lengths: Ints, seconds: Floats, degrees: list[int], node_of: Ints, limit_s: float
) -> tuple[float, int, Ints] | None:
    """(seconds of the fullest rank, sum of degrees, (first rank in node, degree) int64 [samples, 2])."""
    blocks, height = np.zeros((len(lengths), 2), dtype=np.int64), 0.0
    for node in np.unique(node_of).tolist():
        members = np.flatnonzero(node_of == node)
        members = members[np.argsort(-lengths[members], kind="stable")]
        rank_s, rank_tokens = [0.0] * degrees[-1], [0] * degrees[-1]
        for item in members.tolist():
            block = _choose_block(
                rank_s,
                rank_tokens,
                int(lengths[item]),
                seconds[item].tolist(),
                degrees,
                problem.max_tokens_per_rank,
                limit_s,
            )
            if block is None:
                return None
            blocks[item] = block
        height = max(height, *rank_s)
    return height, int(blocks[:, 1].sum()), blocks


def _choose_block(
    rank_s: list[float],
    rank_tokens: list[int],
    length: int,
    seconds: list[float],
    degrees: list[int],
    budget_tokens: int,
    limit_s: float,
) -> tuple[int, int] | None:
    """(first rank, degree) of the narrowest block below `limit_s`, else of the lowest; books it there."""
    lowest: tuple[float, int, int] | None = None
    for degree, added_s in zip(degrees, seconds, strict=True):
        part = -(-length // degree)
        for first in range(0, len(rank_s) - degree + 1, degree):
            if max(rank_tokens[first : first + degree]) + part > budget_tokens:
                continue
            top = max(rank_s[first : first + degree]) + added_s
            if lowest is None or top < lowest[0] * (1 - 1e-12):
                lowest = (top, first, degree)
        if lowest is not None and lowest[0] <= limit_s:
            break
    if lowest is None:
        return None
    _, first, degree = lowest
    for rank in range(first, first + degree):
        rank_s[rank] += seconds[degrees.index(degree)]
        rank_tokens[rank] += -(-length // degree)
    return first, degree
