"""What a sample adds to each rank of a group, in seconds, before any shard or tile exists.

A strategy searches with these closed forms, which assume level shares and level traffic, and settles on the
exact prediction of the few plans that remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerwise.cost import EXCHANGES, CostModel, Floats, LayerCost
from layerwise.plan import Ints
from layerwise.planners.layout import head_shares
from layerwise.spec import FULL


class GroupClass(NamedTuple):
    """Groups of `degree` ranks.

    repacked: only their full-attention layers communicate. halo: layers with a local mask fetch only the earlier keys
    that a rank's own queries see, and keep all heads together, but for samples that exchange heads faster.
    """

    degree: int
    repacked: bool = False
    halo: bool = False


class GroupLoads(NamedTuple):
    """Seconds per rank that each sample adds to a group.

    loads: float64 [dims, samples, classes]. One dim per layer kind and one for the LM head where ranks wait at every
    layer; else a single dim, their sum. compute_s: linear work and attention in one layer of each kind, float64
    [layers, samples, classes].
    """

    loads: Floats
    compute_s: Floats


def group_loads(cost: CostModel, lengths: Ints, classes: list[GroupClass]) -> GroupLoads:
    """What samples of these lengths add to groups of each class."""
    shape = (len(lengths), len(classes))
    rows, compute_s = np.empty((len(cost.layers) + 1, *shape)), np.empty((len(cost.layers), *shape))
    for index, layer in enumerate(cost.layers):
        for column, group in enumerate(classes):
            layer_s, traffic_s = _layer_loads(cost, layer, lengths, group)
            compute_s[index, :, column] = layer_s
            rows[index, :, column] = layer.num_layers * (layer_s + traffic_s)
    rows[-1] = cost.head_token_s * lengths[:, None] / np.array([group.degree for group in classes])
    return GroupLoads(_dims(cost, rows), compute_s)


def exposed_loads(cost: CostModel, compute_s: Floats, tokens: Floats) -> Floats:
    """Seconds of parameter and dispatch traffic that compute does not hide, float64 [dims, ...].

    compute_s: of one layer of each kind, float64 [layers, ...]; tokens: of a rank, float64 [...].
    """
    rows = [
        np.asarray(layer.num_layers * layer.exposed_s(s, tokens))
        for layer, s in zip(cost.layers, compute_s, strict=True)
    ]
    return _dims(cost, np.stack([*rows, np.zeros_like(tokens)]))


def group_base(cost: CostModel, classes: list[GroupClass]) -> Floats:
    """Seconds per rank of a group that no sample adds (latency of its messages), float64 [dims, classes]."""
    rows = np.zeros((len(cost.layers) + 1, len(classes)))
    for row, layer in zip(rows, cost.layers, strict=False):
        latency_s = layer.num_layers * cost.passes * cost.cluster.message_latency_s
        row[:] = [latency_s * _fewest_messages(layer, group) for group in classes]
    return _dims(cost, rows)


def _fewest_messages(layer: LayerCost, group: GroupClass) -> int:
    """What a rank of a group sends in one pass of a layer: to every other rank, or to the next one only."""
    if group.degree == 1 or (layer.kind != FULL and group.repacked):
        return 0
    return 1 if group.halo and layer.spec.is_local else EXCHANGES * (group.degree - 1)


def exposed_s(cost: CostModel, lengths: Ints) -> float:
    """Seconds of a micro-batch in which parameter and dispatch traffic outlasts level compute."""
    alone = group_loads(cost, lengths, [GroupClass(1)]).compute_s[:, :, 0]
    compute_s = alone.sum(axis=1) / cost.cluster.num_ranks
    return float(exposed_loads(cost, compute_s, lengths.sum() / cost.cluster.num_ranks).sum())


class Rows(NamedTuple):
    """What groups take, by compute, and then, for the dims `second_of`, where traffic outlasts compute.

    loads: float64 [rows, samples, classes]; base: float64 [rows, classes].
    """

    loads: Floats
    base: Floats
    second_of: tuple[int, ...]


def with_traffic(
    cost: CostModel, found: GroupLoads, base: Floats, lengths: Ints, degrees: Ints, capacity_tokens: int
) -> Rows:
    """Rows of which the higher is a rank's seconds, exposed traffic included; only traffic that may be exposed counts.

    base: float64 [dims, classes] of groups of these degrees, int64 [classes]. A rank takes
    compute + max(params + dispatch - overlap * compute, 0), the higher of two sums over its samples.
    """
    hidden_s = cost.cluster.overlap * found.compute_s
    level_s = (hidden_s[:, :, 0] * degrees[0]).sum(axis=1) / cost.cluster.num_ranks
    is_one = cost.cluster.sync == "step"  # one dim: all layers together
    second: dict[int, tuple[Floats, Floats]] = {}
    for index, (layer, hidden, level) in enumerate(zip(cost.layers, hidden_s, level_s, strict=True)):
        if layer.params_s + layer.dispatch_s * capacity_tokens > level:
            dim = 0 if is_one else index
            own, own_base = second.get(dim, (found.loads[dim], base[dim]))
            traffic_s = layer.dispatch_s * lengths[:, None] / degrees
            second[dim] = (own + layer.num_layers * (traffic_s - hidden), own_base + layer.num_layers * layer.params_s)
    if not second:
        return Rows(found.loads, base, ())
    loads, bases = (np.stack(rows) for rows in zip(*second.values(), strict=True))
    return Rows(np.concatenate([found.loads, loads]), np.concatenate([base, bases]), tuple(second))


def child_loads(cost: CostModel, lengths: Ints, degrees: Sequence[int]) -> Floats:
    """Seconds per rank of what follows a sample's shards inside a node, float64 [dims, samples, degrees].

    Two dims where ranks wait at every layer, else their sum: linear work and sites of sparse layers. Attention of the
    full-attention layers stays on the parent.
    """
    linear, sparse, _, exchange, _ = _site_loads(cost, lengths, degrees, _exchange_s)
    return _dims(cost, np.stack([linear, sparse + exchange]))


def nested_loads(cost: CostModel, lengths: Ints, degrees: Sequence[int]) -> Floats:
    """Seconds per rank of samples on blocks of their own, float64 [5, samples, degrees].

    Linear work; sites of sparse and of full-attention layers, exchange included; and those exchanges alone. Memory
    levels tokens, and with them linear work, whatever sites cost.
    """
    linear, sparse, full, *exchanges = _site_loads(cost, lengths, degrees, _cheaper_exchange_s)
    return np.stack([linear, sparse + exchanges[0], full + exchanges[1], *exchanges])


def site_floor_s(cost: CostModel, lengths: Ints) -> Floats:
    """Seconds of compute at sites that parameter and dispatch traffic hides, float64 [2]: of sparse and of full layers.

    The linear work of the same layers is level, and hidden first. 0 where traffic takes no longer than level compute,
    and where a part of it is exposed in any case.
    """
    floor, level, tokens = np.zeros(2), np.zeros(2), lengths.sum() / cost.cluster.num_ranks
    for layer in cost.layers:
        dim = int(layer.kind == FULL)
        floor[dim] += layer.num_layers * (layer.params_s + (layer.dispatch_s - layer.token_s) * tokens)
        level[dim] += layer.num_layers * layer.sample_s(lengths).sum() / cost.cluster.num_ranks
    return np.where((floor > level) & (cost.cluster.overlap == 1), floor, 0)


def _site_loads(cost: CostModel, lengths: Ints, degrees: Sequence[int], exchange_s: Callable[..., Floats]) -> Floats:
    """Linear work, sites of sparse and of full layers, and exchanges of both: float64 [5, samples, degrees]."""
    loads = np.zeros((5, len(lengths), len(degrees)))
    for column, degree in enumerate(degrees):
        loads[0, :, column] = cost.head_token_s * lengths / degree
        for layer in cost.layers:
            loads[0, :, column] += layer.num_layers * layer.token_s * lengths / degree
            site = 1 + (layer.kind == FULL)
            loads[site, :, column] += layer.num_layers * _share_s(layer, lengths, degree)
            loads[site + 2, :, column] += layer.num_layers * exchange_s(cost, layer, lengths, degree)
    return loads


def _share_s(layer: LayerCost, lengths: Ints, degree: int) -> Floats:
    """Seconds of whole samples' attention on the rank with the largest share of the heads."""
    return layer.attention_s(layer.spec.pairs(lengths * 0, lengths), lengths, head_shares(degree, layer.spec)[0].heads)


def _cheaper_exchange_s(cost: CostModel, layer: LayerCost, lengths: Ints, degree: int) -> Floats:
    by_heads_s = _exchange_s(cost, layer, lengths, degree)
    return np.minimum(by_heads_s, _halo(cost, layer, lengths, degree).alone_s) if layer.spec.is_local else by_heads_s


def prefers_halo(cost: CostModel, layer: LayerCost, lengths: Ints, degree: int) -> NDArray[np.bool_]:
    """Whether fetching the keys just before a rank's shard is cheaper than exchanging heads, bool [samples].

    Never on one rank, where there is nothing to fetch.
    """
    if not layer.spec.is_local or degree == 1:
        return np.zeros(len(lengths), dtype=bool)
    return np.asarray(_halo(cost, layer, lengths, degree).alone_s <= _exchange_s(cost, layer, lengths, degree))


class _Halo(NamedTuple):
    """What the last of some ranks, which needs most, fetches of each sample in one layer; [samples] each.

    keys: earlier ones, of its own `shard` tokens. fetch_s: seconds of their bytes; alone_s: with messages of their own.
    """

    keys: Ints
    shard: Ints
    fetch_s: Floats
    alone_s: Floats


def _halo(cost: CostModel, layer: LayerCost, lengths: Ints, degree: int) -> _Halo:
    spec, cluster = layer.spec, cost.cluster
    shard = -(-lengths // degree)
    keys = np.minimum((spec.reach or 1) - 1, lengths - shard)
    bytes_per_key = spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * cost.bytes_per_element
    rate = cluster.slow_bytes_per_s if degree > cluster.ranks_per_node else cluster.fast_bytes_per_s
    fetch_s, messages = cost.passes * keys * bytes_per_key / rate, -(-keys // shard)
    return _Halo(keys, shard, fetch_s, fetch_s + cost.passes * cluster.message_latency_s * messages)


def _layer_loads(cost: CostModel, layer: LayerCost, lengths: Ints, group: GroupClass) -> tuple[Floats, Floats]:
    """Seconds of one layer's compute, and of its exchanges without latency, float64 [samples] each."""
    degree = group.degree
    linear_s, attention_s = layer.token_s * lengths / degree, layer.sample_s(lengths, degree) / degree
    if layer.kind != FULL and group.repacked:
        return linear_s + attention_s, np.zeros(len(lengths))
    traffic_s = _exchange_s(cost, layer, lengths, degree)
    if group.halo and layer.spec.is_local and degree > 1:
        halo, spec = _halo(cost, layer, lengths, degree), layer.spec
        own_s = layer.attention_s(spec.pairs(lengths - halo.shard, lengths), halo.keys + halo.shard, spec.num_heads)
        has_halo = halo.alone_s <= traffic_s
        attention_s = np.where(has_halo, own_s, attention_s)
        traffic_s = np.where(has_halo, halo.fetch_s, traffic_s)
    return linear_s + attention_s, traffic_s


def _exchange_s(cost: CostModel, layer: LayerCost, lengths: Ints, degree: int) -> Floats:
    """Seconds of one layer's exchanges, forward and backward, without latency; equal shards and tiles."""
    spec, cluster = layer.spec, cost.cluster
    kv_rows = 0 if spec.mixer else max(spec.num_kv_heads, degree)
    to_tiles = spec.num_heads * spec.head_dim + kv_rows * (spec.head_dim + spec.v_head_dim)
    elements_per_token = to_tiles + spec.num_heads * spec.v_head_dim
    in_node = min(degree, cluster.ranks_per_node)
    fast_s = (in_node - 1) / degree / cluster.fast_bytes_per_s
    slow_s = (degree - in_node) / degree / cluster.slow_bytes_per_s
    per_token_s = cost.passes * elements_per_token * cost.bytes_per_element * max(fast_s, slow_s)
    return np.asarray(per_token_s * lengths / degree)


def _dims(cost: CostModel, rows: Floats) -> Floats:
    return rows if cost.cluster.sync == "layer" else rows.sum(axis=0, keepdims=True)
