"""A pre-norm decoder with several kinds of attention layers, on the local packed tokens of one micro-batch.

Everything is token-wise except attention, which finds its tokens through the current routes. There is no
batch dim, no mask and no padding, and a rank may hold no tokens at all.

Shapes: T local tokens, C hidden size, H query heads, K KV heads, D head dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from layerwise import runtime
from layerwise.errors import SpecError
from layerwise.loss import head_loss
from layerwise.model.moe import MoE, RouterStats, SwiGLU
from layerwise.plan import HOME
from layerwise.spec import LayerKind, ModelSpec


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """What a model needs beyond the shapes of its ModelSpec.

    seed: of the initial weights, which depend on nothing else, so that every rank builds the same.
    init_std: of the initial weights; divided by sqrt(2 * num_layers) for projections into the residual.
    activation_checkpointing: keep only the input of each layer, and compute the layer again in backward.
    """

    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    dtype: torch.dtype = torch.float32
    seed: int = 0
    init_std: float = 0.02
    activation_checkpointing: bool = False


@dataclass(frozen=True, kw_only=True)
class LMOutput:
    """What the model makes of the local tokens.

    logits: [T, V], or None where labels were given; loss: this rank's part of the step's mean cross-entropy, if so.
    router: sums [MoE layers, pieces, E], or None for a dense model.
    """

    logits: Tensor | None
    loss: Tensor | None
    router: RouterStats | None


class HybridLM(nn.Module):
    """The decoder that a ModelSpec describes: GQA, RoPE, RMSNorm, SwiGLU or mixture of experts."""

    def __init__(self, spec: ModelSpec, options: ModelOptions | None = None, *, device: str = "cpu") -> None:
        """On device "meta" without values, to be sharded first and then materialised."""
        super().__init__()
        self.spec = spec
        self.options = options or ModelOptions()
        dtype = self.options.dtype
        _check_supported(spec)
        with torch.device("meta"):
            self.embed = nn.Embedding(spec.vocab_size, spec.hidden_size, dtype=dtype)
            self.layers = nn.ModuleList(DecoderLayer(spec, kind, self.options) for kind in spec.all_layer_types)
            self.norm = nn.RMSNorm(spec.hidden_size, eps=self.options.norm_eps, dtype=dtype)
            self.head = None if spec.tie_embeddings else _linear(spec.hidden_size, spec.vocab_size, dtype)
        if device != "meta":
            self.materialize(torch.device(device))

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        *,
        shift_labels: Tensor | None = None,
        num_valid_tokens: int = 0,
    ) -> LMOutput:
        """All int64 [T], in the order of the micro-batch; position_ids count within each token's own sample.

        With shift_labels, and num_valid_tokens of the whole step, the output is the loss (see `layerwise.token_loss`)
        and the logits of all tokens never exist at once. Hidden states are taken to where each layer's kind keeps
        them, and back home for the head.

        Must run inside `use_routes`. Raises SpecError for other shapes.
        """
        if input_ids.dim() != 1 or input_ids.shape != position_ids.shape:
            raise SpecError(
                f"input_ids {tuple(input_ids.shape)} and position_ids {tuple(position_ids.shape)} must both "
                "be [tokens]: packed rows without a batch dimension"
            )
        routes = runtime.current_routes()
        tokens = {kind: routes.tokens_at(kind) for kind in self.spec.kinds}
        rope = {
            kind: self._rope_table(kind, position_ids if routes.place_of(kind) == HOME else tokens[kind].position_ids)
            for kind in self.spec.kinds
        }
        x, place = self.embed(input_ids), HOME
        stats: list[RouterStats] = []
        for kind, layer in zip(self.spec.all_layer_types, self.layers, strict=True):
            x, place = runtime.relocate(x, source=place, target=kind), kind
            args = (x, rope[kind], tokens[kind].piece_index, routes.num_pieces)
            x, counts, prob_sums = (
                runtime.checkpoint(layer, *args) if self.options.activation_checkpointing else layer(*args)
            )
            if counts is not None:
                stats.append(RouterStats(counts=counts, prob_sums=prob_sums))
        x = self.norm(runtime.relocate(x, source=place))
        weight = self.embed.weight if self.head is None else self.head.weight
        router = _stack(stats) if stats else None
        if shift_labels is None:
            return LMOutput(logits=F.linear(x, weight), loss=None, router=router)
        return LMOutput(logits=None, loss=head_loss(x, weight, shift_labels, num_valid_tokens), router=router)

    def _rope_table(self, kind: LayerKind, position_ids: Tensor) -> Tensor:
        """cos and sin of each token's angles, [2, T, 1, D / 2], through float64: positions may be large."""
        head_dim = self.spec.attention(kind).head_dim
        exponent = torch.arange(0, head_dim, 2, dtype=torch.float64, device=position_ids.device) / head_dim
        angles = position_ids[:, None, None] * self.options.rope_theta**-exponent
        return torch.stack([angles.cos(), angles.sin()]).to(torch.promote_types(self.options.dtype, torch.float32))

    @torch.no_grad()
    def materialize(self, device: torch.device) -> None:
        """Make the initial weights on a device; of a sharded model this rank's parts, from the same whole weights."""
        self.to_empty(device=device)
        generator = torch.Generator().manual_seed(self.options.seed)
        residual_std = self.options.init_std / (2 * self.spec.num_layers) ** 0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                parameter.fill_(1.0)  # norm scales are the only vectors
                continue
            into_residual = name.removesuffix(".weight").endswith(("o_proj", "down"))
            # Drawn in float64 whatever the dtype, so that models of two dtypes start alike.
            values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            _assign(parameter, values * (residual_std if into_residual else self.options.init_std))


def _assign(parameter: Tensor, values: Tensor) -> None:
    """Set a parameter, or this rank's part of it, to whole values that every rank has."""
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        values = distribute_tensor(values.to(mesh.device_type), mesh, placements, src_data_rank=None).to_local()
        parameter = parameter.to_local()
    parameter.copy_(values)


def _check_supported(spec: ModelSpec) -> None:
    """Raise SpecError for what a ModelSpec can plan but this model does not have."""
    for key, value in (("output_gate", spec.output_gate), ("num_dense_layers", spec.num_dense_layers)):
        if value:
            raise SpecError(f"model {spec.name}: {key}={value} can be planned, but the reference model does without it")
    for kind in spec.kinds:
        if spec.attention(kind).linear:
            raise SpecError(f"model {spec.name}: {kind} can be planned, but the reference model has no linear mixer")
        if spec.attention(kind).head_dim % 2:
            raise SpecError(f"head_dim={spec.attention(kind).head_dim} of {kind}: RoPE needs an even head_dim")


class DecoderLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: ModelSpec, kind: LayerKind, options: ModelOptions) -> None:
        super().__init__()
        dtype = options.dtype
        self.attention_norm = nn.RMSNorm(spec.hidden_size, eps=options.norm_eps, dtype=dtype)
        self.attention = SelfAttention(spec, kind, dtype)
        self.mlp_norm = nn.RMSNorm(spec.hidden_size, eps=options.norm_eps, dtype=dtype)
        self.mlp = MoE(spec, dtype) if spec.num_experts else SwiGLU(spec.hidden_size, spec.intermediate_size, dtype)

    def forward(
        self, x: Tensor, rope: Tensor, piece_index: Tensor, num_pieces: int
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """x [T, C] -> [T, C], and the counts and prob_sums of RouterStats where the layer has a router."""
        x = x + self.attention(self.attention_norm(x), rope)
        if isinstance(self.mlp, SwiGLU):
            return x + self.mlp(self.mlp_norm(x)), None, None
        output, stats = self.mlp(self.mlp_norm(x), piece_index, num_pieces)
        return x + output, stats.counts, stats.prob_sums


class SelfAttention(nn.Module):
    """Grouped-query attention of one layer kind."""

    def __init__(self, spec: ModelSpec, kind: LayerKind, dtype: torch.dtype) -> None:
        super().__init__()
        self.kind = kind
        self.spec = spec.attention(kind)
        hidden, heads, kv_heads = spec.hidden_size, self.spec.num_heads, self.spec.num_kv_heads
        self.q_proj = _linear(hidden, heads * self.spec.head_dim, dtype)
        self.k_proj = _linear(hidden, kv_heads * self.spec.head_dim, dtype)
        self.v_proj = _linear(hidden, kv_heads * self.spec.v_head_dim, dtype)
        self.o_proj = _linear(heads * self.spec.v_head_dim, hidden, dtype)

    def forward(self, x: Tensor, rope: Tensor) -> Tensor:
        """x [T, C] -> [T, C]."""
        spec = self.spec
        q = rotate(self.q_proj(x).view(-1, spec.num_heads, spec.head_dim), rope)
        k = rotate(self.k_proj(x).view(-1, spec.num_kv_heads, spec.head_dim), rope)
        v = self.v_proj(x).view(-1, spec.num_kv_heads, spec.v_head_dim)
        rows = runtime.attention(q, k, v, kind=self.kind, window=spec.window)
        output: Tensor = self.o_proj(rows.flatten(1))
        return output


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    """Rotary embedding (arXiv 2104.09864): dims i and i + D / 2 of x [T, heads, D] turn by angle i."""
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin], dim=-1).to(x.dtype)


def _linear(num_inputs: int, num_outputs: int, dtype: torch.dtype) -> nn.Linear:
    return nn.Linear(num_inputs, num_outputs, bias=False, dtype=dtype)


def _stack(stats: list[RouterStats]) -> RouterStats:
    return RouterStats(
        counts=torch.stack([s.counts for s in stats]), prob_sums=torch.stack([s.prob_sums for s in stats])
    )
