"""Tiny random models of every family, in float64, with windows and chunks shorter than the samples."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

VOCAB = 61
F, S, C, L = "full_attention", "sliding_attention", "chunked_attention", "linear_attention"
HYBRID = [S, S, F]
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
SLIDING = {"layer_types": HYBRID, "sliding_window": 7}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DELTA_NET = {
    "layer_types": [L, L, F],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
# What each family's config has beyond BASE.
TINY: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": MOE | {"norm_topk_prob": True},
    "olmo3": SLIDING,
    "gpt_oss": SLIDING | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "gemma3_text": SLIDING | {"query_pre_attn_scalar": 8},
    "cohere2": SLIDING,
    "cohere2_moe": SLIDING
    | {"num_experts": 4, "num_experts_per_tok": 2, "num_shared_experts": 1, "first_k_dense_replace": 1},
    "ministral": SLIDING,
    "smollm3": {"no_rope_layers": [1, 1, 0]},
    "afmoe": SLIDING | MOE | {"num_shared_experts": 1, "num_dense_layers": 1},
    "exaone4": SLIDING,
    "exaone_moe": SLIDING | MOE | {"num_shared_experts": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "llama4_text": {
        "layer_types": [C, C, F],
        "no_rope_layers": [1, 1, 0],
        "attention_chunk_size": 9,
        "floor_scale": 5,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "intermediate_size_mlp": 24,
    },
    "mimo_v2_flash": SLIDING
    | {
        "v_head_dim": 4,
        "num_key_value_heads": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "qwen3_next": DELTA_NET | MOE | {"norm_topk_prob": True, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": DELTA_NET,
    "qwen3_5_moe_text": DELTA_NET | MOE | {"shared_expert_intermediate_size": 16},
    "bamba": MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA
    | {
        "layer_types": [L, F, L],
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
        "attention_multiplier": 0.3,
    },
    "lfm2": {"layer_types": ["conv", F, "conv"], "block_auto_adjust_ff_dim": False},
    # Both kinds have layers that reuse an earlier layer's keys and values.
    "gemma4_text": MOE
    | {
        "num_hidden_layers": 5,
        "layer_types": [S, F, S, S, F],
        "num_kv_shared_layers": 2,
        "sliding_window": 7,
        "global_head_dim": 16,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB,
        "enable_moe_block": True,
        "top_k_experts": 2,
    },
}


class InFloat64(TorchFunctionMode):
    """Models round norms, router and attention scores to float32 in their code; here those steps stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.float:
            return args[0].double()
        if func in (torch.Tensor.to, torch.Tensor.type):
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = kwargs or {}
        if kwargs.get("dtype") is torch.float32:
            kwargs = kwargs | {"dtype": torch.float64}
        return func(*args, **kwargs)


@functools.cache
def tiny_model(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """The untouched model with eager attention, and experts one by one, since the grouped kernel has no float64."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **BASE | TINY[family])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", experts_implementation="eager")
    with torch.no_grad():  # biases and sinks that start at zero would hide a mistake
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model.to(dtype)
