"""Tokens and bytes that every rank holds at once under a plan; docs/cost-model.md, section Memory, has the formulas.

A prediction of what the tensors need. What an allocator, a communication library and the device itself need comes on
top, so leave room.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layerwise.cost.flops import Floats, dense_weights, expert_weights
from layerwise.cost.model import GRADIENT_BYTES
from layerwise.labels import format_bytes
from layerwise.plan import Ints, MicrobatchPlan, StepPlan, Table, Tile
from layerwise.spec import AttentionSpec, ClusterSpec, LayerKind, ModelSpec

# Adam: two float32 moments, and a float32 copy of weights that are kept in fewer bytes.
MOMENT_BYTES, MASTER_BYTES = 8, 4
FLOAT32_BYTES = 4
# While a layer computes, the parameters of the next one are gathered already.
GATHERED_LAYERS = 2


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """What a rank holds during the whole step, in bytes; the same on every rank.

    gathered: unsharded weights of the layers in work and the unsharded float32 gradient of one; 0 unless sharded.
    """

    weights: float
    gradients: float
    optimizer: float
    gathered: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.gathered


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchMemory:
    """What each rank holds for one micro-batch, in bytes: float64 [num_ranks] each.

    hidden: activations of the rank's tokens, kept for backward, all layers.
    attention: Q, K, V and O of the rank's tiles, kept for backward, all layers; 0 with recompute.
    work: the layer in backward: gradients of its site, and with recompute all that its forward keeps.
    head: logits, and their float32 copy and gradient.
    tokens: the most that the rank owns, at home or in layers of some kind, int64. site_tokens: query tokens of the
    rank's tiles by layer kind, a tile of a part of the heads counting as that part.
    """

    hidden: Floats
    attention: Floats
    work: Floats
    head: Floats
    tokens: Ints
    site_tokens: dict[str, Floats]

    @property
    def peak(self) -> Floats:
        """The most that is alive at once: backward starts with the head, whose logits go before any layer's turn."""
        return self.hidden + self.attention + np.maximum(self.work, self.head)


@dataclass(frozen=True, kw_only=True, eq=False)
class Memory:
    """Memory of a step: micro-batches run one after another, so a rank's peak is that of its largest."""

    state: StateBytes
    microbatches: tuple[MicrobatchMemory, ...]

    @property
    def peak_bytes(self) -> Floats:
        """The most that each rank holds at once, float64 [num_ranks]."""
        return self.state.total + np.max([part.peak for part in self.microbatches], axis=0)

    @property
    def peak_tokens(self) -> Ints:
        """The most tokens that each rank owns in a micro-batch, int64 [num_ranks]."""
        return np.max([part.tokens for part in self.microbatches], axis=0)

    @property
    def peak_site_tokens(self) -> dict[str, Floats]:
        """The most query tokens at a site of each layer kind, float64 [num_ranks] each."""
        kinds = self.microbatches[0].site_tokens
        return {kind: np.max([part.site_tokens[kind] for part in self.microbatches], axis=0) for kind in kinds}

    @property
    def fullest_rank(self) -> int:
        """The rank with the highest peak."""
        return int(self.peak_bytes.argmax())

    def at_peak(self, rank: int) -> dict[str, float]:
        """Bytes by part at the moment when this rank holds most; they sum to its peak."""
        part = max(self.microbatches, key=lambda m: float(m.peak[rank]))
        head, work = float(part.head[rank]), float(part.work[rank])
        return {
            "weights": self.state.weights,
            "gradients": self.state.gradients,
            "optimizer": self.state.optimizer,
            "gathered": self.state.gathered,
            "hidden": float(part.hidden[rank]),
            "attention": float(part.attention[rank]),
            "layer in backward": work if work > head else 0.0,
            "LM head": head if work <= head else 0.0,
        }

    def warning(self, cluster: ClusterSpec) -> str | None:
        """Which ranks exceed cluster.memory_bytes, by how much and what helps; None where all fit, or it is not set."""
        limit_bytes, peak_bytes = cluster.memory_bytes, self.peak_bytes
        if limit_bytes is None or peak_bytes.max() <= limit_bytes:
            return None
        worst, over = self.fullest_rank, int((peak_bytes > limit_bytes).sum())
        others = f"; {over} of {len(peak_bytes)} ranks exceed it" if over > 1 else ""
        unused = [f"{name}: true" for name in ("recompute", "sharded_params") if not getattr(cluster, name)]
        setting = f", or set {' or '.join(unused)} in the cluster file" if unused else ", or use more ranks"
        return (
            f"rank {worst} needs {format_bytes(peak_bytes[worst])}, {format_bytes(peak_bytes[worst] - limit_bytes)} "
            f"more than memory_bytes={limit_bytes:.4g} ({format_bytes(limit_bytes)}){others}; lower "
            f"max_tokens_per_rank{setting}"
        )


def predict_memory(plan: StepPlan, cluster: ClusterSpec, model: ModelSpec, element_bytes: int | None = None) -> Memory:
    """What every rank holds during the step; `element_bytes` overrides the cluster's, for weights and activations."""
    num_bytes = element_bytes or cluster.element_bytes
    return Memory(
        state=_state(cluster, model, num_bytes),
        microbatches=tuple(_microbatch(part, cluster, model, num_bytes) for part in plan.microbatches),
    )


def _state(cluster: ClusterSpec, model: ModelSpec, element_bytes: int) -> StateBytes:
    experts = {kind: model.moe_share(kind) * model.num_experts * expert_weights(model) for kind in model.kinds}
    dense = {kind: dense_weights(model, kind) for kind in model.kinds}
    local = {kind: dense[kind] + experts[kind] / cluster.expert_parallel_degree for kind in model.kinds}
    tables = model.vocab_size * model.hidden_size * (1 if model.tie_embeddings else 2)
    held, gathered = tables + sum(local[kind] for kind in model.all_layer_types), 0.0
    if cluster.sharded_params:
        held = (tables + sum(dense[kind] + experts[kind] for kind in model.all_layer_types)) / cluster.num_ranks
        gathered = max(local.values()) * (GATHERED_LAYERS * element_bytes + GRADIENT_BYTES)
    master = MASTER_BYTES if element_bytes < FLOAT32_BYTES else 0
    return StateBytes(
        weights=held * element_bytes,
        gradients=held * GRADIENT_BYTES,
        optimizer=held * (MOMENT_BYTES + master),
        gathered=gathered,
    )


def kept_elements_per_token(model: ModelSpec, kind: LayerKind) -> float:
    """Elements per token of one layer that backward needs, all but what the attention kernel keeps; the kind's mean.

    Inputs of both norms, of the projections, the router and the MLP; gate, up, silu(gate) and their product; of each
    chosen expert also its input and output row; with an output gate, the gate and the ungated output.
    """
    spec, hidden, moe = model.attention(kind), model.hidden_size, model.moe_share(kind)
    attention = spec.num_heads * spec.v_head_dim * (3 if model.output_gate else 1)
    routed = model.experts_per_token * (2 * hidden + 4 * model.moe_intermediate_size)
    experts = routed + 4 * model.shared_intermediate_size + model.num_experts
    return 4 * hidden + attention + moe * experts + (1 - moe) * 4 * model.intermediate_size


def site_bytes(tiles: Table[Tile], spec: AttentionSpec, num_ranks: int, element_bytes: int) -> Floats:
    """Bytes of Q, K, V and O of each rank's tiles at one site, and one float32 per query and head: [num_ranks]."""
    q0, q1, k0, h0, h1 = (tiles.column(name) for name in ("q0", "q1", "k0", "h0", "h1"))
    kv0, kv1 = spec.kv_range(h0, h1)
    q_rows, kv_rows = (q1 - q0) * (h1 - h0), (q1 - k0) * (kv1 - kv0)
    num_bytes = element_bytes * (q_rows + kv_rows) * (spec.head_dim + spec.v_head_dim) + FLOAT32_BYTES * q_rows
    return _sum_by(tiles.column("rank"), num_bytes, num_ranks)


def _microbatch(
    microbatch: MicrobatchPlan, cluster: ClusterSpec, model: ModelSpec, element_bytes: int
) -> MicrobatchMemory:
    num_ranks, home = cluster.num_ranks, microbatch.tokens_per_rank(cluster.num_ranks)
    hidden, attention, work = (np.zeros(num_ranks) for _ in range(3))
    tokens, site_tokens = home, {}
    for kind in model.kinds:
        layers, tiles, spec = model.num_layers_of(kind), microbatch.tiles[kind], model.attention(kind)
        own = microbatch.tokens_per_rank(num_ranks, kind)
        site = site_bytes(tiles, spec, num_ranks, element_bytes)
        kept = element_bytes * kept_elements_per_token(model, kind) * own
        if cluster.recompute:  # a layer keeps its input only
            hidden = hidden + layers * element_bytes * model.hidden_size * own
            work = np.maximum(work, kept + 2 * site)
        else:
            hidden, attention = hidden + layers * kept, attention + layers * site
            work = np.maximum(work, site)
        tokens, site_tokens[str(kind)] = np.maximum(tokens, own), _site_tokens(tiles, spec, num_ranks)
    return MicrobatchMemory(
        hidden=hidden,
        attention=attention,
        work=work,
        head=np.asarray((element_bytes + 2.0 * FLOAT32_BYTES) * model.vocab_size * home),
        tokens=tokens,
        site_tokens=site_tokens,
    )


def _site_tokens(tiles: Table[Tile], spec: AttentionSpec, num_ranks: int) -> Floats:
    q0, q1, h0, h1 = (tiles.column(name) for name in ("q0", "q1", "h0", "h1"))
    return _sum_by(tiles.column("rank"), (q1 - q0) * (h1 - h0), num_ranks) / spec.num_heads


def _sum_by(rank: Ints, values: Ints, num_ranks: int) -> Floats:
    return np.asarray(np.bincount(rank, weights=values, minlength=num_ranks), dtype=np.float64)
