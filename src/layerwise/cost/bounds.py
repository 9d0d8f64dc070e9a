"""Lower bounds of a step: what no plan gets below, from lengths, cluster, model and token budget alone.

docs/cost-model.md, section Bounds, proves each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.cost.flops import Floats, pair_flops
from layerwise.cost.layer import LayerCost
from layerwise.cost.model import CostModel
from layerwise.cost.prediction import StepPrediction
from layerwise.plan import Ints
from layerwise.spec import EfficiencyTable


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """What no plan of a step gets below.

    tokens: of the fullest rank, summed over micro-batches.
    attention_flops: forward FLOPs of the busiest rank in one layer of a kind, summed over micro-batches; by kind.
    slow_bytes: between nodes, over all layers, passes and ranks.
    seconds: of the step, as the cost model predicts it.
    """

    tokens: int
    attention_flops: dict[str, float]
    slow_bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class GapRow:
    """What a plan reaches of something, beside what no plan gets below."""

    name: str
    reached: float
    bound: float

    @property
    def gap_pct(self) -> float | None:
        """How far above the bound, in percent of it; None where the bound is 0 and the plan is not."""
        if self.bound == 0:
            return 0.0 if self.reached == 0 else None
        return 100 * (self.reached / self.bound - 1)


def bound_step(lengths: Sequence[int] | Ints, cost: CostModel, max_tokens_per_rank: int) -> Bounds:
    """The bounds of every plan of a step with these sample lengths in tokens, whatever strategy made it."""
    tokens = np.asarray(lengths, dtype=np.int64)
    num_ranks = cost.cluster.num_ranks
    fewest = fewest_microbatches(tokens, num_ranks * max_tokens_per_rank)
    rows = _rows_between_nodes(tokens, cost.cluster.ranks_per_node * max_tokens_per_rank)
    seconds = cost.head_token_s * float(tokens.sum()) / num_ranks
    for layer in cost.layers:
        seconds += layer.num_layers * _layer_s(layer, tokens, fewest)
    slow_bytes = sum(layer.num_layers * _slow_bytes(layer, cost, rows) for layer in cost.layers)
    if cost.cluster.overlap_parts == 1:  # otherwise attention may hide them
        seconds += slow_bytes / num_ranks / cost.cluster.slow_bytes_per_s
    return Bounds(
        tokens=-(-int(tokens.sum()) // num_ranks),
        attention_flops={layer.kind: _attention_flops(layer, tokens) / num_ranks for layer in cost.layers},
        slow_bytes=slow_bytes,
        seconds=seconds,
    )


def gap_rows(prediction: StepPrediction, bounds: Bounds) -> tuple[GapRow, ...]:
    """A predicted step beside its bounds: tokens, attention by kind, bytes between nodes, seconds."""
    parts = prediction.microbatches
    busiest = {kind: sum(float(part.kinds[kind].attention_flops.max()) for part in parts) for kind in prediction.kinds}
    attention = [
        GapRow(name=f"{kind}, GFLOP", reached=busiest[kind] / 1e9, bound=flops / 1e9)
        for kind, flops in bounds.attention_flops.items()
    ]
    slow_bytes = sum(part.slow_bytes for part in parts)
    return (
        GapRow(name="tokens", reached=int(prediction.tokens_per_rank.max(axis=1).sum()), bound=bounds.tokens),
        *attention,
        GapRow(name="all ranks, MB between nodes", reached=slow_bytes / 1e6, bound=bounds.slow_bytes / 1e6),
        GapRow(name="predicted step, s", reached=prediction.seconds, bound=bounds.seconds),
    )


def fewest_microbatches(lengths: Ints, capacity_tokens: int) -> int:
    """Micro-batches that a step needs at least: for its tokens, and as no two samples over half of one share it."""
    return max(-(-int(lengths.sum()) // capacity_tokens), int((2 * lengths > capacity_tokens).sum()))


def _layer_s(layer: LayerCost, lengths: Ints, fewest: int) -> float:
    """Compute spread evenly, and parameter and dispatch traffic that `fewest` equal micro-batches do not hide."""
    num_ranks = layer.cluster.num_ranks
    tokens = float(lengths.sum()) / num_ranks
    compute_s = layer.token_s * tokens + float(_attention_s(layer, lengths).sum()) / num_ranks
    exposed_s = float(layer.exposed_s(np.array(compute_s / fewest), np.array(tokens / fewest)))
    return compute_s + fewest * exposed_s


def _attention_s(layer: LayerCost, lengths: Ints) -> Floats:
    """Seconds of each sample's attention at the best efficiency of any tile of it, float64 [samples]."""
    spec, cluster = layer.spec, layer.cluster
    best = cluster.efficiency(spec, lengths, spec.num_heads)
    # Interpolation in a table is highest at one of its entries, or at the end of what the sample reaches.
    for table in (cluster.attention_efficiency, cluster.window_efficiency):
        if isinstance(table, EfficiencyTable):
            for keys in table.lengths:
                for heads in table.heads:
                    at_entry = cluster.efficiency(spec, np.minimum(lengths, keys), min(spec.num_heads, heads))
                    best = np.maximum(best, at_entry)
    return np.asarray(spec.pairs(lengths * 0, lengths) * spec.num_heads * layer.pair_s / best)


def _attention_flops(layer: LayerCost, lengths: Ints) -> float:
    pairs = layer.spec.pairs(lengths * 0, lengths)
    return float(pairs.sum()) * layer.spec.num_heads * pair_flops(layer.spec)


def _rows_between_nodes(lengths: Ints, node_capacity_tokens: int) -> int:
    """Rows of each KV group, keys and queries together, that leave their node in a layer without a local mask."""
    return int(np.maximum(lengths - node_capacity_tokens, 0).sum())


def _slow_bytes(layer: LayerCost, cost: CostModel, rows: int) -> int:
    """Bytes of these rows in all passes of one layer: K and V of a key are as large as Q and output of a query."""
    spec = layer.spec
    if spec.is_local:
        return 0
    return cost.passes * rows * spec.num_kv_heads * (spec.head_dim + spec.v_head_dim) * cost.bytes_per_element
