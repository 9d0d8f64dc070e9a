"""The child solver: which node, SP degree and aligned ranks each sample of a parent gets for its shards."""

from __future__ import annotations

import numpy as np

from layerwise.plan import Parent
from layerwise.planners.estimate import child_loads
from layerwise.planners.layout import Placement
from layerwise.planners.nesting import Nest, nest
from layerwise.planners.problem import StepProblem


def child_degrees(num_ranks: int) -> list[int]:
    """Widths of children on `num_ranks` ranks of one node, ascending: the powers of two, and all of them."""
    return [1 << i for i in range((num_ranks - 1).bit_length())] + [num_ranks]


def solve_children(problem: StepProblem, parent: Parent) -> Placement | None:
    """Where the parent's samples keep their shards, or None where they do not fit in its nodes."""
    node_ranks = min(parent.sp_degree, problem.cluster.ranks_per_node)
    samples = np.array(parent.samples, dtype=np.int64)
    lengths, degrees = problem.lengths[samples], child_degrees(node_ranks)
    found = nest(
        Nest(
            samples=samples,
            lengths=lengths,
            loads=child_loads(problem.cost, lengths, degrees),
            widths=degrees,
            first_rank=parent.first_rank,
            num_ranks=parent.sp_degree,
            ranks_per_node=node_ranks,
            capacity_tokens=problem.max_tokens_per_rank,
        )
    )
    return None if found is None else found[1]
