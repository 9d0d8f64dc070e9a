"""What a sample adds to each rank of a group, in seconds, before any shard or tile exists.

A strategy searches with these closed forms, which assume level shares and level traffic, and settles on the
exact prediction of the few plans that remain.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from layerwise.cost import CALLS_PER_LAYER, PASSES, CostModel, Floats, LayerCost
from layerwise.plan import Ints
from layerwise.spec import FULL


class GroupClass(NamedTuple):
    """Groups of `degree` ranks; where `repacked`, only their full-attention layers communicate."""

    degree: int
    repacked: bool = False


def group_loads(cost: CostModel, lengths: Ints, classes: list[GroupClass]) -> Floats:
    """Seconds per rank that each sample adds to a group, float64 [dims, samples, classes].

    One dim per layer kind and one for the LM head where ranks wait at every layer; else a single dim, their
    sum.
    """
    return _dims(cost, np.stack([_sample_loads(cost, lengths, group) for group in classes], axis=-1))


def group_base(cost: CostModel, classes: list[GroupClass]) -> Floats:
    """Seconds per rank of a group that no sample adds (latency of its messages), float64 [dims, classes]."""
    rows = []
    for layer in cost.layers:
        peers = [group.degree - 1 if _exchanges(layer, group) else 0 for group in classes]
        per_peer_s = layer.num_layers * CALLS_PER_LAYER * cost.cluster.message_latency_s
        rows.append(per_peer_s * np.array(peers, dtype=np.float64))
    return _dims(cost, np.stack([*rows, np.zeros(len(classes))]))


def child_loads(cost: CostModel, lengths: Ints, degrees: list[int]) -> Floats:
    """Seconds per rank, all layers, of what follows a sample's shards on `degree` ranks of one node.

    float64 [samples, degrees]. Attention of the full-attention layers is left out: it stays on the parent.
    """
    columns = []
    for degree in degrees:
        seconds = cost.head_token_s * lengths / degree
        for layer in cost.layers:
            per_layer = layer.token_s * lengths / degree
            if layer.kind != FULL:
                per_layer = per_layer + _attention_s(layer, lengths) / degree
                per_layer = per_layer + _exchange_s(cost, layer, lengths, degree)
            seconds = seconds + layer.num_layers * per_layer
        columns.append(seconds)
    return np.stack(columns, axis=-1)


def _sample_loads(cost: CostModel, lengths: Ints, group: GroupClass) -> Floats:
    rows = []
    for layer in cost.layers:
        seconds = (layer.token_s * lengths + _attention_s(layer, lengths)) / group.degree
        if _exchanges(layer, group):
            seconds = seconds + _exchange_s(cost, layer, lengths, group.degree)
        rows.append(layer.num_layers * seconds)
    return np.stack([*rows, cost.head_token_s * lengths / group.degree])


def _exchanges(layer: LayerCost, group: GroupClass) -> bool:
    return not group.repacked or layer.kind == FULL


def _attention_s(layer: LayerCost, lengths: Ints) -> Floats:
    pairs = layer.spec.pairs(lengths * 0, lengths)
    return np.asarray(layer.pair_s * layer.spec.num_heads * pairs, dtype=np.float64)


def _exchange_s(cost: CostModel, layer: LayerCost, lengths: Ints, degree: int) -> Floats:
    """Seconds of one layer's exchanges, forward and backward, without latency; equal shards and tiles."""
    spec, cluster = layer.spec, cost.cluster
    kv_rows = max(spec.num_kv_heads, degree)
    to_tiles = spec.num_heads * spec.head_dim + kv_rows * (spec.head_dim + spec.v_head_dim)
    elements_per_token = to_tiles + spec.num_heads * spec.v_head_dim
    in_node = min(degree, cluster.ranks_per_node)
    fast_s = (in_node - 1) / degree / cluster.fast_bytes_per_s
    slow_s = (degree - in_node) / degree / cluster.slow_bytes_per_s
    per_token_s = PASSES * elements_per_token * cost.bytes_per_element * max(fast_s, slow_s)
    return np.asarray(per_token_s * lengths / degree)


def _dims(cost: CostModel, rows: Floats) -> Floats:
    return rows if cost.cluster.sync == "layer" else rows.sum(axis=0, keepdims=True)
