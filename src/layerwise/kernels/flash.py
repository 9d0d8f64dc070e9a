"""The CUDA varlen kernels: flash-attn's, and the one that torch carries.

Both align causal masks bottom-right (flash-attn since 2.1) and take a window as (tokens to the left, tokens
to the right) of the query's own, so a window of w tokens is (w - 1, 0).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from layerwise.errors import UnsupportedError
from layerwise.kernels.segments import Segments
from layerwise.kernels.widths import widen

HEAD_DIM_MULTIPLE = 8


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """See varlen_attention. The backward is deterministic under torch.use_deterministic_algorithms."""
    _refuse_sinks(sinks, "flash")
    output: Tensor = load_flash()(
        *widen(q, k, v, HEAD_DIM_MULTIPLE),
        **_lengths(segments, q.device, "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"),
        softmax_scale=scale,
        causal=True,
        window_size=_window_size(window),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return output[..., : v.shape[-1]]


def torch_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """See varlen_attention."""
    _refuse_sinks(sinks, "torch_varlen")
    output = load_torch_varlen()(
        *widen(q, k, v, HEAD_DIM_MULTIPLE),
        **_lengths(segments, q.device, "cu_seq_q", "cu_seq_k", "max_q", "max_k"),
        scale=scale,
        window_size=_window_size(window),
        enable_gqa=q.shape[1] != k.shape[1],
    )
    assert isinstance(output, Tensor)  # a tuple only where auxiliary outputs are asked for
    return output[..., : v.shape[-1]]


def load_flash() -> Callable[..., Any]:
    """flash-attn's kernel. Raises UnsupportedError where the package is missing."""
    try:
        kernel: Callable[..., Any] = import_module("flash_attn").flash_attn_varlen_func
    except (ImportError, AttributeError) as error:  # what is installed may be for another torch, or have other kernels
        raise UnsupportedError(
            f"attention backend 'flash' needs flash-attn ({error}): pip install 'layerwise[flash]', or use 'auto'"
        ) from error
    return kernel


def has_flash() -> bool:
    """Whether flash-attn's varlen kernel can be loaded."""
    try:
        load_flash()
    except UnsupportedError:
        return False
    return True


def load_torch_varlen() -> Callable[..., Any]:
    """torch's kernel. Raises UnsupportedError where this torch has none that will do."""
    if not has_torch_varlen():
        raise UnsupportedError(
            "attention backend 'torch_varlen' needs a varlen_attn with windows and grouped heads, "
            f"which torch {torch.__version__} has not: upgrade torch, or use 'auto'"
        )
    kernel: Callable[..., Any] = import_module("torch.nn.attention.varlen").varlen_attn
    return kernel


def has_torch_varlen() -> bool:
    """Whether this torch has a varlen kernel with windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"scale", "window_size", "enable_gqa"} <= set(inspect.signature(varlen_attn).parameters)


def _lengths(segments: Segments, device: torch.device, *names: str) -> dict[str, Any]:
    return dict(zip(names, (*segments.cu_seqlens(device), segments.max_q, segments.max_k), strict=True))


def _window_size(window: int | None) -> tuple[int, int]:
    return (-1, 0) if window is None else (window - 1, 0)


def _refuse_sinks(sinks: Tensor | None, backend: str) -> None:
    if sinks is not None:
        raise UnsupportedError(f"attention backend {backend!r} has no attention sinks; use 'sdpa' or 'auto'")
