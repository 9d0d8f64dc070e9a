"""A decoder as the planner sees it: shapes, and the pattern of layer kinds."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, ValidationError, model_validator

from layerwise.spec.attention import CHUNKED, LINEAR, SLIDING, AttentionSpec, LayerKind, Mixer
from layerwise.spec.records import Heads, Record, Tokens, Width, read_settings, record_from


class ModelSpec(Record):
    """A decoder as the planner sees it. `layer_types` may be one period of the pattern; `num_layers` tiles it.

    The `..._by_kind` settings hold exceptions for models whose layer kinds differ. The first `num_dense_layers` of a
    mixture of experts have a dense MLP of width `intermediate_size`. With `output_gate`, a projection as wide as the
    attention output multiplies it. With `linear_mixer`, linear layers run their mixers in one piece, on whole samples.
    """

    name: str = "model"
    num_layers: int = Field(ge=1, le=10_000)
    layer_types: tuple[LayerKind, ...] = Field(min_length=1)
    hidden_size: Width
    vocab_size: int = Field(ge=2, le=2**24)
    num_heads: Heads
    num_kv_heads: Heads
    head_dim: Width
    v_head_dim: Width | None = None
    num_heads_by_kind: dict[LayerKind, Heads] = Field(default_factory=dict)
    kv_heads_by_kind: dict[LayerKind, Heads] = Field(default_factory=dict)
    head_dim_by_kind: dict[LayerKind, Width] = Field(default_factory=dict)
    v_head_dim_by_kind: dict[LayerKind, Width] = Field(default_factory=dict)
    output_gate: bool = False
    linear_mixer: Mixer | None = None
    sliding_window: Tokens | None = None
    attention_chunk_size: Tokens | None = None
    intermediate_size: int = Field(default=0, ge=0, le=2**24, description="dense MLP width; 0 where every layer is MoE")
    num_experts: int = Field(default=0, ge=0, le=2**16)
    experts_per_token: int = Field(default=0, ge=0)
    moe_intermediate_size: int = Field(default=0, ge=0, le=2**24)
    shared_intermediate_size: int = Field(default=0, ge=0, le=2**24)
    num_dense_layers: int = Field(default=0, ge=0)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
        self._check_layers()
        self._check_mlps()
        for kind in self.kinds:
            try:
                self.attention(kind)
            except ValidationError as error:
                raise ValueError(f"{kind}: {error.errors()[0]['msg'].removeprefix('Value error, ')}") from None
        return self

    def _check_layers(self) -> None:
        if self.num_layers % len(self.layer_types):
            raise ValueError(
                f"num_layers={self.num_layers} is not a multiple of the {len(self.layer_types)} layer_types given; "
                "list every layer, or one whole period of the pattern"
            )
        for kind, key, value in (
            (SLIDING, "sliding_window", self.sliding_window),
            (CHUNKED, "attention_chunk_size", self.attention_chunk_size),
        ):
            if (kind in self.layer_types) != (value is not None):
                raise ValueError(
                    f"{key}={value}, but layer_types {'has' if kind in self.layer_types else 'has no'} {kind}"
                )
        for key in ("num_heads_by_kind", "kv_heads_by_kind", "head_dim_by_kind", "v_head_dim_by_kind"):
            unused = sorted(set(getattr(self, key)) - set(self.layer_types))
            if unused:
                raise ValueError(f"{key} names {unused}, which layer_types does not use")
            if self.linear_mixer and LINEAR in getattr(self, key):
                raise ValueError(f"{key} has no effect on {LINEAR} layers with linear_mixer")
        if self.linear_mixer and LINEAR not in self.layer_types:
            raise ValueError(f"linear_mixer has no effect: layer_types has no {LINEAR}")

    def _check_mlps(self) -> None:
        if bool(self.num_experts) != bool(self.experts_per_token and self.moe_intermediate_size):
            raise ValueError("num_experts, experts_per_token and moe_intermediate_size are set together or not at all")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")
        if self.num_dense_layers and not self.num_experts:
            raise ValueError("num_dense_layers has no effect without num_experts: all layers are dense")
        if self.num_dense_layers >= self.num_layers:
            raise ValueError(
                f"num_dense_layers={self.num_dense_layers} leaves no layer of num_layers={self.num_layers} to experts"
            )
        if (self.num_experts == 0 or self.num_dense_layers > 0) != bool(self.intermediate_size):
            raise ValueError(
                "set intermediate_size (dense MLP) or num_experts (MoE), not both and not neither; "
                "both only for a MoE model with num_dense_layers"
            )
        if self.shared_intermediate_size and not self.num_experts:
            raise ValueError("shared_intermediate_size has no effect without num_experts")

    @property
    def all_layer_types(self) -> tuple[LayerKind, ...]:
        """The kind of every layer, in order."""
        return self.layer_types * (self.num_layers // len(self.layer_types))

    @property
    def kinds(self) -> tuple[LayerKind, ...]:
        """The distinct layer kinds, in order of first use."""
        return tuple(dict.fromkeys(self.layer_types))

    def num_layers_of(self, kind: str) -> int:
        """How many layers have this kind."""
        return self.all_layer_types.count(kind)

    def moe_share(self, kind: str) -> float:
        """The share of this kind's layers that are a mixture of experts, 0 to 1."""
        moe_layers = self.all_layer_types[self.num_dense_layers :] if self.num_experts else ()
        return moe_layers.count(kind) / self.num_layers_of(kind)

    def attention(self, kind: LayerKind) -> AttentionSpec:
        """The attention of one layer kind."""
        if kind == LINEAR and self.linear_mixer:
            width = self.hidden_size
            return AttentionSpec(
                num_heads=1, num_kv_heads=1, head_dim=width, v_head_dim=width, linear=True, mixer=self.linear_mixer
            )
        head_dim = self.head_dim_by_kind.get(kind, self.head_dim)
        return AttentionSpec(
            num_heads=self.num_heads_by_kind.get(kind, self.num_heads),
            num_kv_heads=self.kv_heads_by_kind.get(kind, self.num_kv_heads),
            head_dim=head_dim,
            v_head_dim=self.v_head_dim_by_kind.get(kind, self.v_head_dim or head_dim),
            window=self.sliding_window if kind == SLIDING else None,
            chunk=self.attention_chunk_size if kind == CHUNKED else None,
            linear=kind == LINEAR,
        )


def load_model(source: str | Path) -> ModelSpec:
    """A ModelSpec from a YAML file or a preset name. Raises SpecError."""
    return record_from(ModelSpec, read_settings(source, "model"), str(source))
