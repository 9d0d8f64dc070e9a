"""Predicted seconds, bytes and FLOPs of a plan; docs/cost-model.md derives every formula and its sources.

All of it is prediction. Bytes and calls are exact: they come from the same pairs of shards and tiles that the
runtime's routes are built from. Seconds are as good as the rates of the ClusterSpec.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerwise.plan import Ints, MicrobatchPlan, StepPlan, Table, Tile
from layerwise.spec import AttentionSpec, ClusterSpec, LayerKind, ModelSpec
from layerwise.traffic import elements, exchange_blocks, match

Floats = NDArray[np.float64]

# FLOPs backward for each FLOP forward. A matrix product has two products backward; a flash attention backward
# has five where the forward has two, because it recomputes the scores, and model FLOPs do not count that
# recomputation.
BACKWARD_LINEAR = 2.0
BACKWARD_ATTENTION = 2.5
BACKWARD_ATTENTION_MODEL = 2.0
# An attention site runs each of its two exchanges once forward and once, reversed, backward.
PASSES = 2
CALLS_PER_LAYER = 2 * PASSES


def linear_flops_per_token(model: ModelSpec, kind: LayerKind) -> int:
    """Forward FLOPs per token of one layer but for attention scores: projections and active gated MLPs."""
    spec, hidden = model.attention(kind), model.hidden_size
    width = (model.num_heads + spec.num_kv_heads) * (spec.head_dim + spec.v_head_dim)
    mlp_width = model.intermediate_size + model.experts_per_token * model.moe_intermediate_size
    mlp_width += model.shared_intermediate_size
    return 2 * hidden * (width + 3 * mlp_width + model.num_experts)


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


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer of a kind, forward and backward: seconds per token and per query-key pair of one head."""

    kind: LayerKind
    num_layers: int
    spec: AttentionSpec
    token_s: float
    pair_s: float


@dataclass(frozen=True, kw_only=True, eq=False)
class KindPrediction:
    """All layers of one kind, forward and backward.

    seconds: what these layers add to the step.
    rank_fast_bytes, rank_slow_bytes: what each rank sends inside and between nodes, int64 [num_ranks].
    calls: all-to-all calls of each rank, int64 [num_ranks].
    attention_flops: forward FLOPs of each rank's tiles in one layer of the kind, float64 [num_ranks].
    """

    seconds: float
    rank_fast_bytes: Ints
    rank_slow_bytes: Ints
    calls: Ints
    attention_flops: Floats

    @property
    def fast_bytes(self) -> int:
        """Bytes inside nodes, summed over ranks."""
        return int(self.rank_fast_bytes.sum())

    @property
    def slow_bytes(self) -> int:
        """Bytes between nodes, summed over ranks."""
        return int(self.rank_slow_bytes.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchPrediction:
    """One micro-batch. `rank_s` float64 [num_ranks] are the seconds of each rank if it never waited."""

    seconds: float
    rank_s: Floats
    head_s: float
    tokens: Ints
    kinds: dict[str, KindPrediction]

    @property
    def slow_bytes(self) -> int:
        """Bytes between nodes, all kinds and ranks."""
        return sum(kind.slow_bytes for kind in self.kinds.values())


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPrediction:
    """A whole step; `kinds` sums over micro-batches.

    seconds: of the step.
    ideal_s: the same kernels with every layer's work spread evenly and no communication.
    mfu: model FLOPs over ranks x peak x seconds.
    tokens_per_rank: int64 [num_microbatches, num_ranks].
    """

    seconds: float
    ideal_s: float
    mfu: float
    head_s: float
    tokens_per_rank: Ints
    kinds: dict[str, KindPrediction]
    microbatches: tuple[MicrobatchPrediction, ...]


class _LayerWork(NamedTuple):
    """One layer on every rank, both passes; `attention_flops` are forward, `sent_bytes` [src, dst]."""

    layer: LayerCost
    seconds: Floats
    attention_flops: Floats
    sent_bytes: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class CostModel:
    """The cost of plans for one model on one cluster. `element_bytes` overrides the cluster's."""

    cluster: ClusterSpec
    model: ModelSpec
    element_bytes: int | None = None

    @cached_property
    def bytes_per_element(self) -> int:
        """Bytes of one activation on the wire."""
        return self.element_bytes or self.cluster.element_bytes

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """One entry per layer kind, in order of first use."""
        return tuple(self._layer_cost(kind) for kind in self.model.kinds)

    @cached_property
    def attention(self) -> dict[str, AttentionSpec]:
        """The attention of every layer kind."""
        return {layer.kind: layer.spec for layer in self.layers}

    @cached_property
    def head_token_s(self) -> float:
        """Seconds per token of the LM head, forward and backward."""
        return self._linear_s(head_flops_per_token(self.model))

    def _linear_s(self, forward_flops: float) -> float:
        rate = self.cluster.peak_flops_per_s * self.cluster.linear_efficiency
        return (1 + BACKWARD_LINEAR) * forward_flops / rate

    def _layer_cost(self, kind: LayerKind) -> LayerCost:
        spec = self.model.attention(kind)
        rate = self.cluster.peak_flops_per_s * self.cluster.attention_efficiency
        return LayerCost(
            kind=kind,
            num_layers=self.model.num_layers_of(kind),
            spec=spec,
            token_s=self._linear_s(linear_flops_per_token(self.model, kind)),
            pair_s=(1 + BACKWARD_ATTENTION) * pair_flops(spec) / rate,
        )

    def ideal_s(self, lengths: Sequence[int] | Ints) -> float:
        """Seconds of a step whose every layer is spread evenly over all ranks, without communication."""
        total = np.asarray(lengths, dtype=np.int64)
        seconds = self.head_token_s * float(total.sum())
        for layer in self.layers:
            pairs = float(np.sum(layer.spec.pairs(total * 0, total))) * layer.spec.num_heads
            seconds += layer.num_layers * (layer.token_s * float(total.sum()) + layer.pair_s * pairs)
        return seconds / self.cluster.num_ranks

    def model_flops(self, lengths: Sequence[int] | Ints) -> float:
        """Forward and backward FLOPs that the model needs for these samples, nothing counted twice."""
        total = np.asarray(lengths, dtype=np.int64)
        flops = (1 + BACKWARD_LINEAR) * head_flops_per_token(self.model) * float(total.sum())
        for layer in self.layers:
            linear = (1 + BACKWARD_LINEAR) * linear_flops_per_token(self.model, layer.kind) * float(total.sum())
            pairs = float(np.sum(layer.spec.pairs(total * 0, total))) * layer.spec.num_heads
            flops += layer.num_layers * (linear + (1 + BACKWARD_ATTENTION_MODEL) * pair_flops(layer.spec) * pairs)
        return flops

    def exchange_s(self, sent_bytes: Floats) -> Floats:
        """Seconds of one exchange on each rank, float64 [num_ranks], from `sent_bytes` float64 [src, dst].

        Links inside and between nodes are separate resources; a rank waits for the larger of its two sides.
        """
        cluster, same_node = self.cluster, self._same_node
        sides = []
        for axis in (0, 1):
            fast = np.where(same_node, sent_bytes, 0).sum(axis=axis) / cluster.fast_bytes_per_s
            slow = np.where(same_node, 0, sent_bytes).sum(axis=axis) / cluster.slow_bytes_per_s
            messages = np.count_nonzero(sent_bytes, axis=axis)
            sides.append(np.maximum(fast, slow) + cluster.message_latency_s * messages)
        return np.maximum(*sides)

    @cached_property
    def _same_node(self) -> NDArray[np.bool_]:
        node = np.asarray(self.cluster.node_of(np.arange(self.cluster.num_ranks)))
        return np.asarray(node[:, None] == node)

    def predict_microbatch(self, microbatch: MicrobatchPlan) -> MicrobatchPrediction:
        """Seconds, bytes and calls of one micro-batch, from its shards and tiles."""
        tokens = microbatch.tokens_per_rank(self.cluster.num_ranks)
        work = [self._layer_work(microbatch, layer, tokens) for layer in self.layers]
        site_s = np.stack([self.head_token_s * tokens, *(w.seconds * w.layer.num_layers for w in work)])
        rank_s = site_s.sum(axis=0)
        # Every site waits for its slowest rank, or only the end of the step waits for the slowest rank.
        spent = site_s.max(axis=1) if self.cluster.sync == "layer" else site_s[:, rank_s.argmax()]
        head_s, *kind_s = spent.tolist()
        return MicrobatchPrediction(
            seconds=float(spent.sum()),
            rank_s=rank_s,
            head_s=head_s,
            tokens=tokens,
            kinds={
                w.layer.kind: self._kind_prediction(microbatch, w, seconds)
                for w, seconds in zip(work, kind_s, strict=True)
            },
        )

    def _layer_work(self, microbatch: MicrobatchPlan, layer: LayerCost, tokens: Ints) -> _LayerWork:
        num_ranks, tiles = self.cluster.num_ranks, microbatch.tiles[layer.kind]
        flops = _sum_by(tiles.column("rank"), attention_flops(tiles, layer.spec), num_ranks)
        transfers = match(microbatch.shards, tiles)
        remote = transfers.src != transfers.dst
        link = (transfers.src * num_ranks + transfers.dst)[remote]
        to_tiles, from_tiles = (
            self.bytes_per_element * _sum_by(link, moved[remote], num_ranks**2).reshape(num_ranks, -1)
            for moved in elements(transfers, tiles, layer.spec)
        )
        compute_s = layer.token_s * tokens + layer.pair_s / pair_flops(layer.spec) * flops
        comm_s = PASSES * (self.exchange_s(to_tiles) + self.exchange_s(from_tiles))
        return _LayerWork(layer, compute_s + comm_s, flops, PASSES * (to_tiles + from_tiles))

    def _kind_prediction(self, microbatch: MicrobatchPlan, work: _LayerWork, seconds: float) -> KindPrediction:
        layer, calls = work.layer, np.zeros(self.cluster.num_ranks, dtype=np.int64)
        blocks = exchange_blocks(microbatch, layer.kind, len(calls), self.cluster.ranks_per_node)
        for block in blocks:
            calls[block.lo : block.hi] = CALLS_PER_LAYER * layer.num_layers
        return KindPrediction(
            seconds=seconds,
            rank_fast_bytes=layer.num_layers * _sent_by_rank(np.where(self._same_node, work.sent_bytes, 0)),
            rank_slow_bytes=layer.num_layers * _sent_by_rank(np.where(self._same_node, 0, work.sent_bytes)),
            calls=calls,
            attention_flops=work.attention_flops,
        )

    def step_s(self, parts: Sequence[MicrobatchPrediction]) -> float:
        """Seconds of a step of these micro-batches."""
        if self.cluster.sync == "layer":
            return sum(part.seconds for part in parts)
        return float(np.sum([part.rank_s for part in parts], axis=0).max())

    def predict(self, plan: StepPlan) -> StepPrediction:
        """The prediction of a whole step."""
        parts = tuple(self.predict_microbatch(microbatch) for microbatch in plan.microbatches)
        seconds = self.step_s(parts)
        peak_flops = self.cluster.num_ranks * self.cluster.peak_flops_per_s * seconds
        return StepPrediction(
            seconds=seconds,
            ideal_s=self.ideal_s(plan.lengths),
            mfu=self.model_flops(plan.lengths) / peak_flops,
            head_s=sum(part.head_s for part in parts),
            tokens_per_rank=np.stack([part.tokens for part in parts]),
            kinds={kind: _sum_kinds([part.kinds[kind] for part in parts]) for kind in parts[0].kinds},
            microbatches=parts,
        )


def predict(plan: StepPlan, cluster: ClusterSpec, model: ModelSpec, element_bytes: int | None = None) -> StepPrediction:
    """The prediction of a whole step; `element_bytes` overrides the cluster's."""
    return CostModel(cluster=cluster, model=model, element_bytes=element_bytes).predict(plan)


def _sum_by(index: Ints, values: Ints | Floats, size: int) -> Floats:
    return np.asarray(np.bincount(index, weights=values, minlength=size), dtype=np.float64)


def _sent_by_rank(sent_bytes: Floats) -> Ints:
    """Bytes each rank sends, of [src, dst] counts of both passes: backward, every transfer goes the other way."""
    return np.asarray((sent_bytes.sum(axis=1) + sent_bytes.sum(axis=0)) // PASSES, dtype=np.int64)


def _sum_kinds(parts: list[KindPrediction]) -> KindPrediction:
    return KindPrediction(
        seconds=sum(part.seconds for part in parts),
        rank_fast_bytes=np.sum([part.rank_fast_bytes for part in parts], axis=0),
        rank_slow_bytes=np.sum([part.rank_slow_bytes for part in parts], axis=0),
        calls=np.sum([part.calls for part in parts], axis=0),
        attention_flops=np.sum([part.attention_flops for part in parts], axis=0),
    )
