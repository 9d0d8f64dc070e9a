"""FLOPs and parameters of a model, layer by layer; docs/cost-model.md derives the formulas and gives their sources."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerwise.plan import Ints, Table, Tile
from layerwise.spec import AttentionSpec, LayerKind, ModelSpec

Floats = NDArray[np.float64]

# FLOPs backward for each FLOP forward. A matrix product has two products backward; a flash attention backward has five
# where the forward has two, because it recomputes the scores, and model FLOPs do not count that recomputation.
BACKWARD_LINEAR = 2.0
BACKWARD_ATTENTION = 2.5
BACKWARD_ATTENTION_MODEL = 2.0


def attention_weights(model: ModelSpec, kind: LayerKind) -> int:
    """Parameters of one layer's Q, K, V and output projections, its output gate, or its mixer in one piece."""
    spec = model.attention(kind)
    if spec.mixer:
        return spec.mixer.num_weights
    gate = spec.num_heads * spec.v_head_dim if model.output_gate else 0
    return model.hidden_size * ((spec.num_heads + spec.num_kv_heads) * (spec.head_dim + spec.v_head_dim) + gate)


def dense_weights(model: ModelSpec, kind: LayerKind) -> float:
    """Parameters of one layer that every token uses: projections, dense or shared MLP, router; the kind's mean."""
    moe, dense = model.moe_share(kind), 1 - model.moe_share(kind)
    mlp = dense * 3 * model.intermediate_size + moe * (3 * model.shared_intermediate_size + model.num_experts)
    return attention_weights(model, kind) + model.hidden_size * mlp


def expert_weights(model: ModelSpec) -> int:
    """Parameters of one routed expert (gate, up and down projection); 0 in a dense model."""
    return 3 * model.hidden_size * model.moe_intermediate_size


def linear_flops_per_token(model: ModelSpec, kind: LayerKind) -> float:
    """Forward FLOPs per token of one layer, where its shards are: projections, active MLPs; the kind's mean.

    A mixer in one piece projects where its tiles are: `AttentionSpec.linear_pairs` counts that.
    """
    active_experts = model.moe_share(kind) * model.experts_per_token
    at_tiles = attention_weights(model, kind) if model.attention(kind).mixer else 0
    return 2 * (dense_weights(model, kind) - at_tiles + active_experts * expert_weights(model))


def head_flops_per_token(model: ModelSpec) -> int:
    """Forward FLOPs per token of the LM head; looking up embeddings is free."""
    return 2 * model.hidden_size * model.vocab_size


def pair_flops(spec: AttentionSpec) -> int:
    """Forward FLOPs of one query-key pair of one head: a product with the key and one with the value."""
    return 2 * (spec.head_dim + spec.v_head_dim)


def attention_flops(tiles: Table[Tile], spec: AttentionSpec) -> Floats:
    """Forward FLOPs of each tile, float64 [tiles]; only pairs that the mask allows."""
    q0, q1, h0, h1 = (tiles.column(name) for name in ("q0", "q1", "h0", "h1"))
    return np.asarray(spec.pairs(q0, q1) * (h1 - h0) * pair_flops(spec), dtype=np.float64)


def model_flops(model: ModelSpec, lengths: Ints) -> float:
    """Forward and backward FLOPs that the model needs for samples of these lengths, nothing counted twice."""
    tokens = float(lengths.sum())
    flops = (1 + BACKWARD_LINEAR) * head_flops_per_token(model) * tokens
    for kind in model.kinds:
        spec = model.attention(kind)
        linear = (1 + BACKWARD_LINEAR) * linear_flops_per_token(model, kind) * tokens
        pairs = float(np.sum(spec.pairs(lengths * 0, lengths))) * spec.num_heads
        flops += model.num_layers_of(kind) * (linear + (1 + BACKWARD_ATTENTION_MODEL) * pair_flops(spec) * pairs)
    return flops
