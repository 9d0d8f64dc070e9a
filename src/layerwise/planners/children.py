"""The child solver: which node, SP degree and aligned ranks each sample of a parent gets for its shards."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layerwise.cost import Floats
from layerwise.plan import Parent
from layerwise.planners.estimate import child_loads
from layerwise.planners.layout import Placement, batched, place, tile_rows
from layerwise.planners.nesting import FINE, QUICK, THOROUGH, Nest, nest
from layerwise.planners.problem import HANDFUL, MANY_SAMPLES, StepProblem
from layerwise.spec import FULL


def child_degrees(num_ranks: int) -> list[int]:
    """Widths of children on `num_ranks` ranks of one node, ascending: the powers of two, and all of them."""
    return [1 << i for i in range((num_ranks - 1).bit_length())] + [num_ranks]


def solve_children(problem: StepProblem, parent: Parent) -> Placement | None:
    """Where the parent's samples keep their shards, or None where they do not fit in its nodes."""
    node_ranks = min(parent.sp_degree, problem.cluster.ranks_per_node)
    samples = np.array(parent.samples, dtype=np.int64)
    lengths, degrees = problem.lengths[samples], child_degrees(node_ranks)
    if lengths.max() > node_ranks * problem.max_tokens_per_rank:
        return None
    question = Nest(
        samples=samples,
        lengths=lengths,
        loads=child_loads(problem.cost, lengths, degrees),
        widths=degrees,
        first_rank=parent.first_rank,
        num_ranks=parent.sp_degree,
        ranks_per_node=node_ranks,
        capacity_tokens=problem.max_tokens_per_rank,
        search=QUICK if len(problem.lengths) > MANY_SAMPLES else FINE if len(samples) > HANDFUL else THOROUGH,
    )
    # Ranks with dear sites may hold fewer tokens, where memory leaves the others room for more.
    questions = [question, replace(question, pour_by_total=True)]
    if question.search.settles:
        questions.append(replace(question, loads=question.loads.sum(axis=0, keepdims=True)))
    share, full_s = sparse_share(problem), full_attention_s(problem, parent)

    def seconds(height: Floats) -> Floats:
        linear = height[..., 0, :]
        sites = height[..., 1:, :].sum(axis=-2)
        if height.shape[-2] == 1:  # ranks wait at the end of the step only
            return np.asarray((linear + full_s).max(axis=-1))
        return np.asarray((share * linear + sites).max(axis=-1) + ((1 - share) * linear + full_s).max(axis=-1))

    found = [placed for asked in questions if (placed := nest(asked, seconds)) is not None]
    return min(found, key=lambda placed: seconds(placed[0]), default=(None, None))[1]


def full_attention_s(problem: StepProblem, parent: Parent) -> Floats:
    """Seconds of the parent's own attention on each of its ranks, float64 [ranks]; level where heads divide."""
    total, batches = np.zeros(parent.sp_degree), batched(place([parent]), problem.lengths)
    for layer in problem.cost.layers:
        if layer.kind == FULL:
            _, rank, q0, q1, k0, h0, h1 = tile_rows(batches, layer.spec).T
            tile_s = layer.num_layers * layer.attention_s(layer.spec.pairs(q0, q1), q1 - k0, h1 - h0)
            total += np.bincount(rank - parent.first_rank, weights=tile_s, minlength=parent.sp_degree)
    return total


def sparse_share(problem: StepProblem) -> float:
    """The share of linear work that sparse layers have, which wait for their attention sites too."""
    token_s = [(layer.kind, layer.num_layers * layer.token_s) for layer in problem.cost.layers]
    total = problem.cost.head_token_s + sum(seconds for _, seconds in token_s)
    return sum(seconds for kind, seconds in token_s if kind != FULL) / total
