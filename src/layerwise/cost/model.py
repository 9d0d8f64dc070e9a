"""Predicted seconds and bytes of a plan; docs/cost-model.md derives every formula and its sources.

All of it is prediction. Bytes and calls are exact: they come from the same pairs of shards and tiles that the
runtime's routes are built from. Seconds are as good as the rates of the ClusterSpec.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np

from layerwise.cost.flops import (
    BACKWARD_ATTENTION,
    BACKWARD_LINEAR,
    Floats,
    attention_flops,
    dense_weights,
    expert_weights,
    head_flops_per_token,
    linear_flops_per_token,
    model_flops,
    pair_flops,
)
from layerwise.cost.layer import LayerCost
from layerwise.cost.overlap import hidden_s
from layerwise.cost.prediction import (
    KindPrediction,
    LayerTimes,
    MicrobatchPrediction,
    MicrobatchTimes,
    PassPrediction,
    StepPrediction,
)
from layerwise.cost.work import Moved, Sent, Work, join_works
from layerwise.parts import split_tiles
from layerwise.plan import HOME, Ints, MicrobatchPlan, Shard, StepPlan, Table, Tile
from layerwise.spec import AttentionSpec, ClusterSpec, LayerKind, ModelSpec
from layerwise.traffic import elements, exchange_blocks, match, merge_alike, move_blocks, move_tiles

# Two exchanges of an attention site: shards to tiles, tiles to shards.
EXCHANGES = 2
# A move of hidden states runs once forward and once backward.
MOVE_PASSES = 2
# A ZeRO-3 layer gathers its parameters for forward and for backward, and reduces its gradients in float32.
GATHERS, GRADIENT_BYTES = 2, 4
# Expert dispatch: tokens out and results back, forward and backward.
DISPATCHES = 4


class _Part(NamedTuple):
    """A part of an attention site: seconds of all passes on each rank, and what its two exchanges send forward."""

    attention_s: Floats
    sent: tuple[Sent, Sent]


class _LayerWork(NamedTuple):
    """One layer on every rank; `attention_flops` forward of each rank."""

    times: LayerTimes
    attention_flops: Floats
    parts: list[_Part]


class _Sum(NamedTuple):
    """A micro-batch's times, and the shares of its seconds that each layer kind and all moves have."""

    times: MicrobatchTimes
    kind_s: list[float]
    moves_s: float


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
        return (1 + BACKWARD_LINEAR) * self._linear_s(head_flops_per_token(self.model))

    @cached_property
    def forwards(self) -> int:
        """How often a layer's forward runs: twice where it is recomputed in backward."""
        return 2 if self.cluster.recompute else 1

    @cached_property
    def passes(self) -> int:
        """How often each exchange of a site runs in a step: in every forward and, reversed, in backward."""
        return self.forwards + 1

    def _linear_s(self, flops: float) -> float:
        return flops / (self.cluster.peak_flops_per_s * self.cluster.linear_efficiency)

    def _layer_cost(self, kind: LayerKind) -> LayerCost:
        spec = self.model.attention(kind)
        return LayerCost(
            kind=kind,
            num_layers=self.model.num_layers_of(kind),
            spec=spec,
            cluster=self.cluster,
            token_s=(self.forwards + BACKWARD_LINEAR) * self._linear_s(linear_flops_per_token(self.model, kind)),
            pair_s=(self.forwards + BACKWARD_ATTENTION) * pair_flops(spec) / self.cluster.peak_flops_per_s,
            params_s=self._params_s(kind) if self.cluster.sharded_params else 0.0,
            dispatch_s=self.model.moe_share(kind) * self._dispatch_s(),
        )

    def _params_s(self, kind: LayerKind) -> float:
        """Seconds of one layer's parameter traffic; a node's ranks fetch each parameter over the slow link once."""
        cluster, num_experts = self.cluster, self.model.moe_share(kind) * self.model.num_experts
        experts = num_experts * expert_weights(self.model)
        bytes_per_weight = GATHERS * self.bytes_per_element + GRADIENT_BYTES  # backward's gather serves recompute too
        slow = fast = 0.0
        for weights, degree in ((dense_weights(self.model, kind), 1), (experts, cluster.expert_parallel_degree)):
            apart = max(degree, cluster.ranks_per_node)
            slow += weights / apart * (1 - apart / cluster.num_ranks)
            fast += weights / degree * (1 - degree / apart)
        return bytes_per_weight * max(slow / cluster.slow_bytes_per_s, fast / cluster.fast_bytes_per_s)

    def _dispatch_s(self) -> float:
        """Seconds per token and MoE layer of dispatch to experts and back; a rank gets a token once at most."""
        cluster, degree = self.cluster, self.cluster.expert_parallel_degree
        copies = min(self.model.experts_per_token, degree)
        inside = min(degree, cluster.ranks_per_node)
        fast_s = (inside - 1) / degree / cluster.fast_bytes_per_s
        slow_s = (degree - inside) / degree / cluster.slow_bytes_per_s
        trips = DISPATCHES + 2 * (self.forwards - 1)
        return trips * copies * self.model.hidden_size * self.bytes_per_element * max(fast_s, slow_s)

    def ideal_s(self, lengths: Sequence[int] | Ints) -> float:
        """Seconds of a step whose every layer is spread evenly over all ranks, without communication."""
        total = np.asarray(lengths, dtype=np.int64)
        seconds = self.head_token_s * float(total.sum())
        for layer in self.layers:
            seconds += layer.num_layers * (layer.token_s * float(total.sum()) + float(layer.sample_s(total).sum()))
        return seconds / self.cluster.num_ranks

    def exchange_s(self, sent: Sent) -> Floats:
        """Seconds of one exchange on each rank, float64 [num_ranks].

        Links inside and between nodes are separate resources; a rank waits for the larger of its two sides.
        """
        cluster, slow = self.cluster, self._is_slow(sent)
        sides = []
        for rank in (sent.src, sent.dst):
            fast_s = _sum_by(rank, np.where(slow, 0, sent.sent_bytes), cluster.num_ranks) / cluster.fast_bytes_per_s
            slow_s = _sum_by(rank, np.where(slow, sent.sent_bytes, 0), cluster.num_ranks) / cluster.slow_bytes_per_s
            messages = np.bincount(rank, minlength=cluster.num_ranks)
            sides.append(np.maximum(fast_s, slow_s) + cluster.message_latency_s * messages)
        return np.maximum(*sides)

    def _is_slow(self, sent: Sent) -> Any:
        return self.cluster.node_of(sent.src) != self.cluster.node_of(sent.dst)

    def time_microbatch(self, microbatch: MicrobatchPlan) -> MicrobatchTimes:
        """Seconds of one micro-batch, from its shards and tiles; `predict_microbatch` without the rest."""
        return self.time_works([self.work(microbatch)])

    def time_works(self, works: Sequence[Work]) -> MicrobatchTimes:
        """Seconds of a micro-batch that consists of parts which share no rank and no sample."""
        return self._sum_up(join_works(works, self.layers)).times

    def work(self, microbatch: MicrobatchPlan) -> Work:
        """What every rank does in a micro-batch, or in a part of one."""
        return Work(self._tokens(microbatch), self.layer_times(microbatch), self.moves(microbatch))

    def _tokens(self, microbatch: MicrobatchPlan) -> dict[str, Ints]:
        home, size = microbatch.tokens_per_rank(self.cluster.num_ranks), self.cluster.num_ranks
        own = {kind: microbatch.tokens_per_rank(size, kind) for kind in microbatch.shards_by_kind}
        return {HOME: home, **{layer.kind: own.get(layer.kind, home) for layer in self.layers}}

    def predict_microbatch(self, microbatch: MicrobatchPlan) -> MicrobatchPrediction:
        """Seconds, bytes and calls of one micro-batch, from its shards and tiles."""
        work = [self._layer_work(microbatch, layer) for layer in self.layers]
        times: dict[str, LayerTimes] = {layer.kind: w.times for layer, w in zip(self.layers, work, strict=True)}
        moves = self.moves(microbatch)
        total = self._sum_up(Work(self._tokens(microbatch), times, moves))
        return MicrobatchPrediction(
            **vars(total.times),
            kinds={
                layer.kind: self._kind_prediction(microbatch, layer, w, seconds)
                for layer, w, seconds in zip(self.layers, work, total.kind_s, strict=True)
            },
            moves=self._moves_prediction(microbatch, moves, total.moves_s),
        )

    def _sum_up(self, work: Work) -> _Sum:
        tokens, times = work.tokens[HOME], work.times
        layer_s = (layer.num_layers * times[layer.kind].total_s for layer in self.layers)
        move_s = (moved.times * self.move_s(moved.sent) for moved in work.moves)
        site_s = np.stack([self.head_token_s * tokens, *layer_s, *move_s])
        rank_s = site_s.sum(axis=0)
        # Every site waits for its slowest rank, or only the end of the step waits for the slowest rank.
        spent = site_s.max(axis=1) if self.cluster.sync == "layer" else site_s[:, rank_s.argmax()]
        slow_bytes = sum(layer.num_layers * times[layer.kind].slow_bytes for layer in self.layers)
        slow_bytes += sum(MOVE_PASSES * moved.times * self._slow_bytes(moved.sent) for moved in work.moves)
        num_kinds = len(self.layers)
        return _Sum(
            times=MicrobatchTimes(
                seconds=float(spent.sum()),
                rank_s=rank_s,
                head_s=float(spent[0]),
                tokens=tokens,
                times=times,
                slow_bytes=slow_bytes,
            ),
            kind_s=spent[1 : 1 + num_kinds].tolist(),
            moves_s=float(spent[1 + num_kinds :].sum()),
        )

    def _slow_bytes(self, sent: Sent) -> int:
        return int(sent.sent_bytes[self._is_slow(sent)].sum())

    def layer_times(self, microbatch: MicrobatchPlan) -> dict[str, LayerTimes]:
        """What one layer of each kind takes on every rank."""
        return {layer.kind: self._layer_work(microbatch, layer).times for layer in self.layers}

    def moves(self, microbatch: MicrobatchPlan) -> list[Moved]:
        """The passes of hidden states from home through every layer and back home, alike ones together."""
        kinds = (kind if kind in microbatch.shards_by_kind else HOME for kind in self.model.all_layer_types)
        passes = Counter((a, b) for a, b in pairwise((HOME, *kinds, HOME)) if a != b)
        moved = []
        for (source, target), times in passes.items():
            tiles = move_tiles(microbatch.shards_at(target))
            transfers = match(microbatch.shards_at(source), tiles)
            row_bytes = self.model.hidden_size * self.bytes_per_element
            moved_bytes = row_bytes * (transfers.q_hi - transfers.q_lo)
            (sent,) = self._merge(transfers.src, transfers.dst, [moved_bytes])
            moved.append(Moved(source, target, times, sent))
        return moved

    def move_s(self, sent: Sent) -> Floats:
        """Seconds of one pass of hidden states on each rank, forward and backward: float64 [num_ranks].

        A pass lies between layers, so recomputing layers does not repeat it.
        """
        return MOVE_PASSES * self.exchange_s(sent)

    def _moves_prediction(self, microbatch: MicrobatchPlan, moves: list[Moved], seconds: float) -> PassPrediction:
        cluster = self.cluster
        calls, fast, slow = (np.zeros(cluster.num_ranks, dtype=np.int64) for _ in range(3))
        for source, target, times, sent in moves:
            for block in move_blocks(microbatch, source, target, cluster.num_ranks, cluster.ranks_per_node):
                calls[block.lo : block.hi] += MOVE_PASSES * times
            fast_bytes, slow_bytes = self._sent_by_rank(sent, forwards=1)
            fast, slow = fast + times * fast_bytes, slow + times * slow_bytes
        return PassPrediction(seconds=seconds, rank_fast_bytes=fast, rank_slow_bytes=slow, calls=calls)

    def _layer_work(self, microbatch: MicrobatchPlan, layer: LayerCost) -> _LayerWork:
        num_ranks, tiles = self.cluster.num_ranks, microbatch.tiles[layer.kind]
        tokens = microbatch.tokens_per_rank(num_ranks, layer.kind)
        parts = self._parts(microbatch.shards_at(layer.kind), tiles, layer)
        to_tiles_s, from_tiles_s = ([self.exchange_s(part.sent[way]) for part in parts] for way in (0, 1))
        part_s = [part.attention_s for part in parts]
        linear_s: Floats = np.asarray(layer.token_s * tokens)
        attention_s = _sum(part_s)
        return _LayerWork(
            times=LayerTimes(
                linear_s=linear_s,
                attention_s=attention_s,
                to_tiles_s=self.passes * _sum(to_tiles_s),
                from_tiles_s=self.passes * _sum(from_tiles_s),
                hidden_s=hidden_s(to_tiles_s, part_s, from_tiles_s, self.forwards),
                exposed_s=layer.exposed_s(linear_s + attention_s, tokens),
                slow_bytes=self.passes * sum(self._slow_bytes(sent) for part in parts for sent in part.sent),
            ),
            attention_flops=_sum_by(tiles.column("rank"), attention_flops(tiles, layer.spec), num_ranks),
            parts=parts,
        )

    def _parts(self, shards: Table[Shard], tiles: Table[Tile], layer: LayerCost) -> list[_Part]:
        """The parts of one site of a layer, as the runtime cuts it."""
        if self.cluster.overlap_parts == 1 or layer.spec.mixer:  # a mixer in one piece is not cut
            return [self._part(shards, tiles, layer)]
        sample = shards.column("sample")
        parts = []
        for part in split_tiles(tiles, layer.spec, self.cluster.overlap_parts):
            has_tiles = np.zeros(int(sample.max(initial=-1)) + 1, dtype=bool)
            has_tiles[part.column("sample")] = True
            parts.append(self._part(shards.take(has_tiles[sample]), part, layer))
        return parts

    def _part(self, shards: Table[Shard], tiles: Table[Tile], layer: LayerCost) -> _Part:
        q0, q1, k0, h0, h1, rank = (tiles.column(name) for name in ("q0", "q1", "k0", "h0", "h1", "rank"))
        tile_s = layer.attention_s(layer.spec.pairs(q0, q1), q1 - k0, h1 - h0)
        return _Part(_sum_by(rank, tile_s, self.cluster.num_ranks), self._sent(shards, tiles, layer.spec))

    def _sent(self, shards: Table[Shard], tiles: Table[Tile], spec: AttentionSpec) -> tuple[Sent, Sent]:
        """What the two exchanges of these tiles send forward: to the tiles, and back from them."""
        shards, tiles = merge_alike(shards, tiles)
        transfers = match(shards, tiles)
        moved_bytes = [moved * self.bytes_per_element for moved in elements(transfers, tiles, spec)]
        there, back = self._merge(transfers.src, transfers.dst, moved_bytes)
        return there, Sent(back.dst, back.src, back.sent_bytes)

    def _merge(self, src: Ints, dst: Ints, moved_bytes: Sequence[Ints]) -> list[Sent]:
        """Transfers summed by pair of ranks, without those that stay on their rank; int64 [transfers] each."""
        crossing = src != dst
        links, inverse = np.unique((src * self.cluster.num_ranks + dst)[crossing], return_inverse=True)
        sources, targets = np.divmod(links, self.cluster.num_ranks)
        totals = [_sum_by(inverse, moved[crossing], len(links)) for moved in moved_bytes]
        return [Sent(sources[total > 0], targets[total > 0], total[total > 0]) for total in totals]

    def _kind_prediction(
        self, microbatch: MicrobatchPlan, layer: LayerCost, work: _LayerWork, seconds: float
    ) -> KindPrediction:
        calls = np.zeros(self.cluster.num_ranks, dtype=np.int64)
        for block in exchange_blocks(microbatch, layer.kind, len(calls), self.cluster.ranks_per_node):
            calls[block.lo : block.hi] = EXCHANGES * len(work.parts) * self.passes * layer.num_layers
        by_rank = [self._sent_by_rank(sent, self.forwards) for part in work.parts for sent in part.sent]
        fast_bytes, slow_bytes = (layer.num_layers * np.sum(links, axis=0) for links in zip(*by_rank, strict=True))
        return KindPrediction(
            seconds=seconds,
            rank_fast_bytes=fast_bytes,
            rank_slow_bytes=slow_bytes,
            calls=calls,
            attention_flops=work.attention_flops,
        )

    def _sent_by_rank(self, sent: Sent, forwards: int) -> tuple[Ints, Ints]:
        """Bytes that each rank sends inside and between nodes in all passes; backward, all goes the other way."""
        size, slow = self.cluster.num_ranks, self._is_slow(sent)
        fast_bytes, slow_bytes = (
            forwards * _sum_by(sent.src, on_link, size) + _sum_by(sent.dst, on_link, size)
            for on_link in (np.where(slow, 0, sent.sent_bytes), np.where(slow, sent.sent_bytes, 0))
        )
        return fast_bytes.astype(np.int64), slow_bytes.astype(np.int64)

    def step_s(self, parts: Sequence[MicrobatchTimes]) -> float:
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
            mfu=model_flops(self.model, np.asarray(plan.lengths)) / peak_flops,
            head_s=sum(part.head_s for part in parts),
            tokens_per_rank=np.stack([part.tokens for part in parts]),
            kinds={kind: _sum_parts([part.kinds[kind] for part in parts]) for kind in parts[0].kinds},
            moves=_sum_parts([part.moves for part in parts]),
            microbatches=parts,
        )


def predict(plan: StepPlan, cluster: ClusterSpec, model: ModelSpec, element_bytes: int | None = None) -> StepPrediction:
    """The prediction of a whole step; `element_bytes` overrides the cluster's."""
    return CostModel(cluster=cluster, model=model, element_bytes=element_bytes).predict(plan)


def _sum(arrays: Sequence[Floats]) -> Floats:
    return np.asarray(reduce(np.add, arrays))


def _sum_by(index: Ints, values: Ints | Floats, size: int) -> Floats:
    return np.asarray(np.bincount(index, weights=values, minlength=size), dtype=np.float64)


PredictionT = TypeVar("PredictionT", bound=PassPrediction)


def _sum_parts(parts: list[PredictionT]) -> PredictionT:
    """Every field summed over micro-batches."""
    names = [f.name for f in fields(parts[0])]
    return replace(parts[0], **{name: sum(getattr(part, name) for part in parts) for name in names})
