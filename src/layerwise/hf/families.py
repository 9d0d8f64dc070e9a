"""Which Hugging Face model types run under layerwise, and why others are refused."""

from __future__ import annotations

from typing import Any

from layerwise.errors import UnsupportedError

# Versions of transformers: pyproject.toml states them too, and docs/huggingface.md which were tested.
MAJOR, LOWEST_MINOR = 5, 22
_VERSIONS = f"transformers {MAJOR}.{LOWEST_MINOR} or later of version {MAJOR}"

# Each of these equals its untouched self, one sample at a time, in tests/hf.
FAMILIES = frozenset(
    {
        "afmoe",
        "bamba",
        "cohere2",
        "cohere2_moe",
        "exaone4",
        "exaone_moe",
        "gemma3_text",
        "gemma4_text",
        "gpt_oss",
        "granitemoehybrid",
        "lfm2",
        "llama",
        "llama4_text",
        "mimo_v2_flash",
        "ministral",
        "olmo3",
        "qwen3",
        "qwen3_5_moe_text",
        "qwen3_5_text",
        "qwen3_moe",
        "qwen3_next",
        "smollm3",
    }
)

# Families whose own forward adds the load-balancing loss where config.output_router_logits is set.
AUX_LOSS_FAMILIES = frozenset({"gpt_oss", "granitemoehybrid", "qwen3_5_moe_text", "qwen3_moe", "qwen3_next"})

# Families with linear-attention, state-space or convolution layers: what these call their mixer.
MIXERS = {
    "bamba": "mamba",
    "granitemoehybrid": "mamba",
    "lfm2": "conv",
    "qwen3_5_moe_text": "linear_attn",
    "qwen3_5_text": "linear_attn",
    "qwen3_next": "linear_attn",
}

_LINEAR = "it has linear-attention or state-space layers, and was not compared with its untouched self"
REFUSED = {
    "deepseek_v4": "its layers attend to compressed keys, which are not one per token",
    "falcon_h1": _LINEAR,
    "gemma2": "its attention scores are soft-capped, which no kernel here does",
    "jamba": _LINEAR,
    "minimax": _LINEAR,
    "nemotron_h": _LINEAR,
}

# RoPE whose angles depend on the longest position of a forward pass, of which a rank sees a part.
_RUNNING_ROPE = ("dynamic", "longrope")


def check_version() -> None:
    """Raise UnsupportedError where transformers is missing, or older or newer than what layerwise.hf is written for."""
    try:
        from transformers import __version__
    except ImportError as error:
        raise UnsupportedError(f"layerwise.hf needs {_VERSIONS}: pip install 'layerwise[hf]' ({error})") from error
    major, minor = (int(part) for part in __version__.split(".")[:2])
    if major != MAJOR or minor < LOWEST_MINOR:
        raise UnsupportedError(
            f"transformers {__version__} is refused: layerwise.hf needs {_VERSIONS}; pip install 'layerwise[hf]'"
        )


def check_family(config: Any) -> None:
    """Raise UnsupportedError, with the reason, for a text config whose model would not be trained exactly."""
    model_type = config.model_type
    if model_type not in FAMILIES:
        reason = REFUSED.get(model_type, "it has not been compared with its untouched self")
        raise UnsupportedError(f"model_type={model_type!r} is refused: {reason}; these work: {sorted(FAMILIES)}")
    for name, reason in (
        ("attention_dropout", "dropped scores would differ from rank to rank; set it to 0"),
        ("attn_logit_softcapping", "no kernel here caps scores; set it to None"),
        ("use_bidirectional_attention", "plans are for causal attention; set it to False"),
        ("z_loss_coefficient", "layerwise.hf.loss does not compute it; set it to 0"),
    ):
        if getattr(config, name, None):
            raise UnsupportedError(f"{model_type}: {name}={getattr(config, name)} is refused: {reason}")
    for rope in _ropes(getattr(config, "rope_parameters", None) or {}):
        if rope in _RUNNING_ROPE:
            raise UnsupportedError(
                f"{model_type}: rope_type={rope!r} is refused: its angles depend on the longest position of each "
                "forward pass, and a rank sees only a part; legal: default, linear, llama3, yarn, proportional"
            )


def _ropes(parameters: dict[str, Any]) -> list[str]:
    """The RoPE types of a config, which has one, or one per layer kind."""
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [p.get("rope_type", "default") for p in nested or [parameters]]
