"""A planner's ModelSpec from the config of a Hugging Face model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from layerwise.errors import SpecError, UnsupportedError
from layerwise.hf.families import check_family, check_version
from layerwise.hf.mixer_sizes import linear_mixer
from layerwise.spec import CHUNKED, FULL, LINEAR, SLIDING, LayerKind, ModelSpec

# What configs call layer kinds that have another name here.
_ALIASES: dict[str, LayerKind] = {"attention": FULL, "conv": LINEAR, "mamba": LINEAR}
# Families whose attention output is multiplied by a projected gate.
_GATED = ("afmoe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")


def model_spec(config: Any) -> ModelSpec:
    """What the planner needs to know of a model, from its (text) config.

    Raises UnsupportedError for model types, options and layer kinds that cannot be trained exactly, and SpecError for
    anything but a config. Where a model mixes dense and expert layers in another order than dense ones first, only
    their numbers are right: they matter for predicted seconds and not for what is computed.
    """
    check_version()
    from transformers import PreTrainedConfig

    if not isinstance(config, PreTrainedConfig):
        raise SpecError(f"model_spec() takes a config, got {type(config).__name__}; pass model.config")
    text = config.get_text_config()
    check_family(text)
    kinds = layer_kinds(text)
    return ModelSpec(
        name=text.model_type,
        num_layers=text.num_hidden_layers,
        layer_types=kinds,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        output_gate=text.model_type in _GATED,
        linear_mixer=linear_mixer(text) if LINEAR in kinds else None,
        sliding_window=text.sliding_window if SLIDING in kinds else None,
        attention_chunk_size=text.attention_chunk_size if CHUNKED in kinds else None,
        tie_embeddings=text.tie_word_embeddings,
        **_heads(text, kinds),
        **_mlps(text),
    )


def layer_kinds(config: Any) -> tuple[LayerKind, ...]:
    """The kind of every layer of a text config. Raises UnsupportedError for kinds that layerwise does not know."""
    only = SLIDING if getattr(config, "sliding_window", None) else FULL
    named = getattr(config, "layer_types", None) or [only] * config.num_hidden_layers
    kinds = [_ALIASES.get(kind, kind) for kind in named]
    unknown = sorted(set(kinds) - set(get_args(LayerKind)))
    if unknown:
        raise UnsupportedError(f"{config.model_type}: layer kinds {unknown} are refused; legal: {get_args(LayerKind)}")
    return tuple(kinds)


def decoder_layers(model: Any) -> list[tuple[LayerKind, Any]]:
    """The decoder layers of a model, each with its kind. Raises UnsupportedError where they are not found."""
    config = model.config.get_text_config()
    decoder = model.get_decoder()
    # Llama 4's causal model calls itself its decoder.
    layers: Any = getattr(decoder, "layers", None) or getattr(getattr(decoder, "model", None), "layers", ())
    kinds = layer_kinds(config)
    if len(layers) != len(kinds):
        raise UnsupportedError(
            f"{config.model_type}: found {len(layers)} decoder layers, the config has {len(kinds)}: make them "
            "the same number, or this version of transformers names them otherwise (see docs/huggingface.md)"
        )
    return list(zip(kinds, layers, strict=True))


def _heads(config: Any, kinds: tuple[LayerKind, ...]) -> dict[str, Any]:
    """Head counts and sizes: those of the first layer, and what other kinds have else."""
    columns: dict[str, tuple[str, Callable[[Any, LayerKind], int]]] = {
        "num_heads": ("num_heads_by_kind", lambda layer, kind: layer.num_attention_heads),
        "num_kv_heads": ("kv_heads_by_kind", lambda layer, kind: _num_kv_heads(layer, kind)),
        "head_dim": ("head_dim_by_kind", lambda layer, kind: _head_dim(layer)),
        "v_head_dim": (
            "v_head_dim_by_kind",
            lambda layer, kind: getattr(layer, "v_head_dim", None) or _head_dim(layer),
        ),
    }
    with_heads = [kind for kind in dict.fromkeys(kinds) if kind != LINEAR]
    if not with_heads:
        raise UnsupportedError(f"{config.model_type}: it has no attention layer, so there is nothing to plan")
    layers = {kind: _layer_config(config, kinds.index(kind)) for kind in with_heads}
    settings: dict[str, Any] = {}
    for name, (exceptions, read) in columns.items():
        values = {kind: read(layer, kind) for kind, layer in layers.items()}
        settings[name] = values[with_heads[0]]
        settings[exceptions] = {kind: value for kind, value in values.items() if value != settings[name]}
    return settings


def _layer_config(config: Any, layer: int) -> Any:
    """Gemma 4 keeps what differs between layers in a config per layer."""
    return config.per_layer_config[layer] if config.model_type == "gemma4_text" else config


def _num_kv_heads(config: Any, kind: LayerKind) -> int:
    doubled = config.model_type == "mimo_v2_flash" and kind == SLIDING
    return int(config.num_key_value_heads) * (2 if doubled else 1)


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _mlps(config: Any) -> dict[str, int]:
    num_experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    if not num_experts:
        return {"intermediate_size": _dense_width(config)}
    width = _first(config, "moe_intermediate_size") or config.intermediate_size
    num_dense = sum(dense_layers(config))
    dense_width = _first(config, "intermediate_size_mlp", "prefix_dense_intermediate_size") or config.intermediate_size
    return {
        "num_experts": num_experts,
        "experts_per_token": _first(config, "num_experts_per_tok", "top_k_experts"),
        "moe_intermediate_size": width,
        "shared_intermediate_size": _shared_width(config, width),
        "num_dense_layers": num_dense,
        "intermediate_size": dense_width if num_dense else 0,
    }


def _dense_width(config: Any) -> int:
    if config.model_type == "granitemoehybrid":
        return int(config.shared_intermediate_size)
    if config.model_type == "lfm2" and config.block_auto_adjust_ff_dim:
        width = int(config.block_ffn_dim_multiplier * int(2 * config.intermediate_size / 3))
        return -(-width // config.block_multiple_of) * config.block_multiple_of
    return int(config.intermediate_size)


def _shared_width(config: Any, width: int) -> int:
    """Llama 4 and Gemma 4 have a dense MLP beside the experts; others count shared experts of the experts' width."""
    if config.model_type in ("llama4_text", "gemma4_text"):
        return int(config.intermediate_size)
    if width_given := _first(config, "shared_expert_intermediate_size", "shared_intermediate_size"):
        return width_given
    return _first(config, "num_shared_experts", "n_shared_experts") * width


def dense_layers(config: Any) -> list[bool]:
    """Whether each layer of a text config that has experts is one without them."""
    layers = range(config.num_hidden_layers)
    if getattr(config, "mlp_layer_types", None):
        return [kind == "dense" for kind in config.mlp_layer_types]
    if getattr(config, "moe_layers", None) is not None:
        return [i not in config.moe_layers for i in layers]
    if getattr(config, "decoder_sparse_step", None):
        return [i in config.mlp_only_layers or (i + 1) % config.decoder_sparse_step != 0 for i in layers]
    return [i < _first(config, "num_dense_layers") for i in layers]


def _first(config: Any, *names: str) -> int:
    """The first of these settings that is set, else 0."""
    return next((int(value) for name in names if (value := getattr(config, name, None))), 0)
