"""What is planned for: the cluster and the model, as frozen, validated records read from YAML.

Units stand in the names. Torch is never imported here, so `layerwise plan` starts in milliseconds.
"""

from __future__ import annotations

from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from layerwise.errors import SpecError

FULL = "full_attention"
SLIDING = "sliding_attention"
CHUNKED = "chunked_attention"
LayerKind = Literal["full_attention", "sliding_attention", "chunked_attention"]


class Record(BaseModel):
    """Base of every settings record: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ignored_types=(cached_property,))


RecordT = TypeVar("RecordT", bound=Record)


class AttentionSpec(Record):
    """The attention of one kind of layer: head counts, head sizes and the causal mask.

    A query at position i sees the keys [first_key(i), i]. `window` counts the query's own token, as
    `sliding_window` does in Hugging Face configs; `chunk` cuts positions into blocks that do not see one another.
    """

    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    v_head_dim: int = Field(ge=1)
    window: int | None = Field(default=None, ge=1)
    chunk: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> AttentionSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"legal num_kv_heads: {[k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]}"
            )
        if self.window is not None and self.chunk is not None:
            raise ValueError("a layer kind has a window or a chunk, not both")
        return self

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def first_key(self, q: Any) -> Any:
        """Position of the first key that a query at position q sees; an int or an int64 array of q's shape."""
        if self.window is not None:
            return np.maximum(q - self.window + 1, 0)
        if self.chunk is not None:
            return q // self.chunk * self.chunk
        return q * 0

    def pairs(self, q0: Any, q1: Any) -> Any:
        """Query-key pairs that the mask allows for queries [q0, q1) of one head; ints or int64 arrays."""
        return self._pairs_before(q1) - self._pairs_before(q0)

    def _pairs_before(self, n: Any) -> Any:
        if self.window is not None:
            ramp = np.minimum(n, self.window)
            return ramp * (ramp + 1) // 2 + (n - ramp) * self.window
        if self.chunk is not None:
            whole, rest = n // self.chunk, n % self.chunk
            return whole * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2
        return n * (n + 1) // 2

    def kv_range(self, h0: Any, h1: Any) -> tuple[Any, Any]:
        """KV heads [k0, k1) that the query heads [h0, h1) read."""
        return h0 // self.queries_per_kv, -(-h1 // self.queries_per_kv)


class ModelSpec(Record):
    """A decoder as the planner sees it. `layer_types` may be one period of the pattern; `num_layers` tiles it.

    `kv_heads_by_kind` and `head_dim_by_kind` hold exceptions for models whose layer kinds differ.
    """

    name: str = "model"
    num_layers: int = Field(ge=1)
    layer_types: tuple[LayerKind, ...] = Field(min_length=1)
    hidden_size: int = Field(ge=1)
    vocab_size: int = Field(ge=2)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    v_head_dim: int | None = Field(default=None, ge=1)
    kv_heads_by_kind: dict[LayerKind, int] = Field(default_factory=dict)
    head_dim_by_kind: dict[LayerKind, int] = Field(default_factory=dict)
    sliding_window: int | None = Field(default=None, ge=1)
    attention_chunk_size: int | None = Field(default=None, ge=1)
    intermediate_size: int = Field(default=0, ge=0, description="dense MLP width; 0 where every layer is MoE")
    num_experts: int = Field(default=0, ge=0)
    experts_per_token: int = Field(default=0, ge=0)
    moe_intermediate_size: int = Field(default=0, ge=0)
    shared_intermediate_size: int = Field(default=0, ge=0)
    tie_embeddings: bool = True

    @model_validator(mode="after")
    def _check(self) -> ModelSpec:
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
        for key in ("kv_heads_by_kind", "head_dim_by_kind"):
            unused = sorted(set(getattr(self, key)) - set(self.layer_types))
            if unused:
                raise ValueError(f"{key} names {unused}, which layer_types does not use")
        if bool(self.num_experts) != bool(self.experts_per_token and self.moe_intermediate_size):
            raise ValueError("num_experts, experts_per_token and moe_intermediate_size are set together or not at all")
        if self.experts_per_token > self.num_experts:
            raise ValueError(f"experts_per_token={self.experts_per_token} exceeds num_experts={self.num_experts}")
        if bool(self.num_experts) == bool(self.intermediate_size):
            raise ValueError("set intermediate_size (dense MLP) or num_experts (MoE), not both and not neither")
        if self.shared_intermediate_size and not self.num_experts:
            raise ValueError("shared_intermediate_size has no effect without num_experts")
        for kind in self.kinds:
            self.attention(kind)
        return self

    @cached_property
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

    def attention(self, kind: LayerKind) -> AttentionSpec:
        """The attention of one layer kind."""
        head_dim = self.head_dim_by_kind.get(kind, self.head_dim)
        return AttentionSpec(
            num_heads=self.num_heads,
            num_kv_heads=self.kv_heads_by_kind.get(kind, self.num_kv_heads),
            head_dim=head_dim,
            v_head_dim=self.v_head_dim or head_dim,
            window=self.sliding_window if kind == SLIDING else None,
            chunk=self.attention_chunk_size if kind == CHUNKED else None,
        )


class ClusterSpec(Record):
    """The machine as the planner sees it; see docs/cost-model.md for the formulas that use these numbers.

    Rates are per rank. `sync` says where ranks wait for one another: at every layer (expert-parallel and FSDP
    collectives) or only at the optimizer step.
    """

    name: str = "cluster"
    num_nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    fast_bytes_per_s: float = Field(default=160e9, gt=0)
    slow_bytes_per_s: float = Field(default=160e9 / 7.0, gt=0)
    message_latency_s: float = Field(default=10e-6, ge=0)
    peak_flops_per_s: float = Field(default=989e12, gt=0)
    attention_efficiency: float = Field(default=0.80, gt=0, le=1)
    linear_efficiency: float = Field(default=0.72, gt=0, le=1)
    element_bytes: int = Field(default=2, ge=1, le=8, description="bytes of one activation on the wire")
    sync: Literal["layer", "step"] = "layer"

    @property
    def num_ranks(self) -> int:
        """All ranks of the cluster."""
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: Any) -> Any:
        """The node of a rank, or of an array of ranks."""
        return rank // self.ranks_per_node


def preset_names(prefix: str) -> list[str]:
    """Names of the presets shipped with the package whose file starts with `prefix` ("cluster" or "model")."""
    files = resources.files("layerwise.presets").iterdir()
    return sorted(
        f.name.removesuffix(".yaml").removeprefix(f"{prefix}-") for f in files if f.name.startswith(f"{prefix}-")
    )


def load_cluster(source: str | Path) -> ClusterSpec:
    """A ClusterSpec from a YAML file or a preset name. Raises SpecError."""
    return record_from(ClusterSpec, _read_spec(source, "cluster"), str(source))


def load_model(source: str | Path) -> ModelSpec:
    """A ModelSpec from a YAML file or a preset name. Raises SpecError."""
    return record_from(ModelSpec, _read_spec(source, "model"), str(source))


def _read_spec(source: str | Path, prefix: str) -> dict[str, Any]:
    if str(source) in preset_names(prefix):
        return parse_yaml((resources.files("layerwise.presets") / f"{prefix}-{source}.yaml").read_text(), str(source))
    path = Path(source)
    if not path.is_file():
        raise SpecError(f"{prefix} {str(source)!r}: no such file; presets are {', '.join(preset_names(prefix))}")
    return read_yaml(path)


def read_yaml(path: Path) -> dict[str, Any]:
    """The YAML mapping in a file. Raises SpecError."""
    try:
        return parse_yaml(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win in silence; settings must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """A YAML mapping; `source` names it in errors. Raises SpecError."""
    try:
        data = yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{source}: expected a mapping of settings, got {type(data).__name__}")
    return data


def record_from(cls: type[RecordT], data: dict[str, Any], source: str) -> RecordT:
    """Validate a mapping into a record; every fault is named in one SpecError."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise SpecError("\n".join(_explain(cls, fault, source) for fault in error.errors())) from None


def _explain(cls: type[Record], fault: Any, source: str) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    text = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return (
            f"{source}: unknown option {where!r}; legal here: {', '.join(sorted(_fields_at(cls, fault['loc'][:-1])))}"
        )
    shown = "" if fault["type"] in ("missing", "value_error") else f" (got {fault['input']!r})"
    return f"{source}: {where + ': ' if where else ''}{text}{shown}"


def _fields_at(cls: type[Record], path: tuple[Any, ...]) -> list[str]:
    for key in path:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, Record)):
            return ["(see the docs)"]
        cls = field.annotation
    return list(cls.model_fields)
