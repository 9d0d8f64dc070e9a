"""Parameters and FLOPs of the mixers of linear layers, from the configs of the families that have them."""

from __future__ import annotations

from typing import Any

from layerwise.spec import Mixer
from layerwise.spec.attention import LINEAR_CHUNK_TOKENS


def linear_mixer(config: Any) -> Mixer:
    """One linear layer's mixer, by the names of its settings: gated delta net, Mamba-2, or short convolution."""
    if hasattr(config, "linear_num_value_heads"):
        return _gated_delta_net(config)
    if hasattr(config, "mamba_n_heads"):
        return _mamba2(config)
    return _short_convolution(config)


def _gated_delta_net(config: Any) -> Mixer:
    """The chunkwise gated delta rule of arXiv 2412.06464, counted as in docs/cost-model.md for each value head."""
    heads, dk, dv = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    keys, values = config.linear_num_key_heads * dk, heads * dv
    convolved = (2 * keys + values) * config.linear_conv_kernel_dim
    projections = config.hidden_size * (2 * keys + 2 * values + 2 * heads) + values * config.hidden_size
    state_flops = heads * (LINEAR_CHUNK_TOKENS * (3 * dk + 2 * dv) + 6 * dk * dv)
    return Mixer(num_weights=projections + convolved, state_flops=state_flops)


def _mamba2(config: Any) -> Mixer:
    """State-space duality (arXiv 2405.21060): within chunks C B^T and its product with X, then B^T X and C h."""
    heads, dim, state, groups = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state, config.mamba_n_groups
    inner = heads * dim
    convolved = (inner + 2 * groups * state) * config.mamba_d_conv
    projections = config.hidden_size * (2 * inner + 2 * groups * state + heads) + inner * config.hidden_size
    state_flops = config.mamba_chunk_size * (groups * state + heads * dim) + 4 * heads * dim * state
    return Mixer(num_weights=projections + convolved, state_flops=state_flops)


def _short_convolution(config: Any) -> Mixer:
    """Two gates and a depthwise convolution (LFM2)."""
    return Mixer(num_weights=4 * config.hidden_size**2 + config.conv_L_cache * config.hidden_size, state_flops=0)
