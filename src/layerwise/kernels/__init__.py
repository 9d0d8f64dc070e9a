"""Causal attention over packed segments, one function in front of several kernels.

    varlen_attention(q, k, v, segments, window=..., scale=..., sinks=...)
      "reference"     plain softmax per segment, meant for float64 and small inputs: always right
      "sdpa"          torch's scaled_dot_product_attention over blocks of visible keys, on any device
      "flash"         flash-attn's varlen kernel, CUDA
      "torch_varlen"  torch's own varlen kernel, CUDA
      "auto"          the fastest of them that can run the call
      a Kernel        any function of its arguments, for a kernel of your own; nothing needs to be registered

Every kernel has the same contract, tested against the reference. Chunked attention needs no kernel of its
own: the caller cuts segments at chunk boundaries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from layerwise.errors import SpecError
from layerwise.kernels.segments import Segments

__all__ = ["BACKENDS", "Kernel", "Segments", "check_backend", "choose_backend", "varlen_attention"]

# kernel(q, k, v, segments, window, scale, sinks) -> [Tq, H, Dv], shapes as in varlen_attention. No segment is empty,
# scale is a number and sinks are float32 or better. The result has q's dtype and carries a graph to q, k and v.
Kernel = Callable[[Tensor, Tensor, Tensor, Segments, int | None, float, Tensor | None], Tensor]

# Where each kernel lives; a module is imported when its kernel is first used.
BACKENDS: dict[str, tuple[str, str]] = {
    "reference": ("layerwise.kernels.reference", "reference_attention"),
    "sdpa": ("layerwise.kernels.sdpa", "sdpa_attention"),
    "flash": ("layerwise.kernels.flash", "flash_attention"),
    "torch_varlen": ("layerwise.kernels.flash", "torch_varlen_attention"),
}


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    *,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    backend: str | Kernel = "auto",
) -> Tensor:
    """Causal attention within each segment; rows of different segments never meet.

    Args:
        q: [Tq, H, D] query rows, segment after segment.
        k: [Tk, Hk, D] key rows; H is a multiple of Hk, and query head h reads KV head h // (H / Hk).
        v: [Tk, Hk, Dv] value rows.
        segments: the lengths that cut the rows into segments; Tq = segments.total_q, Tk = segments.total_k.
        window: keys that a query sees, its own included (Hugging Face's `sliding_window`); None: no limit.
        scale: factor of the scores; None: D ** -0.5.
        sinks: [H] logits of one extra key per head, with value zero, that every query sees (gpt-oss).
        backend: a name in BACKENDS, "auto", or a Kernel.

    Returns:
        [Tq, H, Dv]. It carries a graph to q, k, v and sinks even without rows, so that a rank without tokens
        still takes part in the collectives of the backward pass.

    Raises SpecError for shapes, dtypes or names that do not fit, UnsupportedError for what the kernel lacks.
    """
    _check(q, k, v, segments, window, sinks)
    if sinks is not None:  # wide, since the gradients of all segments add up in them
        sinks = sinks.to(torch.promote_types(q.dtype, torch.float32))
    if backend == "auto":
        backend = choose_backend(q, v, sinks)
    kernel = _load_kernel(backend) if isinstance(backend, str) else backend
    # Empty segments make some kernels fail, in backward only, so no kernel gets to see one.
    live = segments.with_queries
    if live.total_k != segments.total_k:
        k, v = (_rows_with_queries(rows, segments) for rows in (k, v))
    if not live.total_q:
        return _empty_output(q, k, v, sinks)
    out = kernel(q, k, v, live, window, q.shape[-1] ** -0.5 if scale is None else scale, sinks)
    _check_output(out, (live.total_q, q.shape[1], v.shape[2]), (q, k, v), backend)
    return out


def check_backend(backend: str) -> None:
    """Raise SpecError for an unknown name, UnsupportedError where the package that holds the kernel is missing."""
    _check_name(backend)
    if backend in ("flash", "torch_varlen"):
        from layerwise.kernels.flash import load_flash, load_torch_varlen

        load_flash() if backend == "flash" else load_torch_varlen()


def _check_name(backend: str) -> None:
    if backend != "auto" and backend not in BACKENDS:
        raise SpecError(f"unknown attention backend {backend!r}; legal: auto, {', '.join(BACKENDS)}")


def _load_kernel(backend: str) -> Kernel:
    _check_name(backend)
    module, function = BACKENDS[backend]
    kernel: Kernel = getattr(import_module(module), function)
    return kernel


def choose_backend(q: Tensor, v: Tensor, sinks: Tensor | None) -> str:
    """What "auto" runs for rows like these: flash kernels take half precision, head dims up to 256 and no sinks."""
    half = q.dtype in (torch.bfloat16, torch.float16)
    if not (q.is_cuda and half and sinks is None and max(q.shape[-1], v.shape[-1]) <= 256):
        return "sdpa"
    return _half_backend()


@cache
def _half_backend() -> str:
    """The fastest kernel of half precision that can be loaded here."""
    from layerwise.kernels.flash import has_flash, has_torch_varlen

    if has_flash():
        return "flash"
    return "torch_varlen" if has_torch_varlen() else "sdpa"


def _rows_with_queries(rows: Tensor, segments: Segments) -> Tensor:
    parts = rows.split(segments.k_lens)
    return torch.cat([rows[:0], *(part for part, q_len in zip(parts, segments.q_lens, strict=True) if q_len)])


def _check_output(out: Any, shape: tuple[int, ...], rows: tuple[Tensor, ...], backend: str | Kernel) -> None:
    name, q = backend if isinstance(backend, str) else getattr(backend, "__name__", repr(backend)), rows[0]
    if not isinstance(out, Tensor):
        raise SpecError(f"the attention kernel {name} returned a {type(out).__name__}, expected a tensor [Tq, H, Dv]")
    if tuple(out.shape) != shape or (out.dtype, out.device) != (q.dtype, q.device):
        raise SpecError(
            f"the attention kernel {name} returned {out.dtype} {tuple(out.shape)} on {out.device}, expected {q.dtype} "
            f"[Tq, H, Dv] = {shape} on {q.device}"
        )
    if torch.is_grad_enabled() and any(x.requires_grad for x in rows) and not out.requires_grad:
        raise SpecError(
            f"the attention kernel {name} returned a tensor without a graph, so q, k and v would get no gradient: make "
            "it a torch.autograd.Function, and leave out detach and no_grad"
        )


def _empty_output(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    # A product, since it saves its operands as a kernel does: what a rank does not save it does not recompute, and
    # where attention alone is checkpointed the others would wait for it.
    graph = sum((x[:0] * x[:0]).sum() for x in (q, k, v, sinks) if x is not None)
    return q.new_zeros(0, q.shape[1], v.shape[2]) + graph


def _check(q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: int | None, sinks: Tensor | None) -> None:
    for name, rows, total in (
        ("q", q, segments.total_q),
        ("k", k, segments.total_k),
        ("v", v, segments.total_k),
    ):
        if rows.dim() != 3 or rows.shape[0] != total:
            raise SpecError(
                f"{name} has shape {tuple(rows.shape)}; the segments need [tokens, heads, head_dim] with "
                f"{total} tokens{'; tokens and heads look swapped' if total in rows.shape[1:] else ''}"
            )
    (_, num_heads, head_dim), (_, num_kv_heads, k_dim) = q.shape, k.shape
    if k_dim != head_dim:
        raise SpecError(f"q has head_dim {head_dim} but k has {k_dim}; they must be equal")
    if v.shape[1] != num_kv_heads:
        raise SpecError(f"k has {num_kv_heads} heads but v has {v.shape[1]}; they must be equal")
    if not num_kv_heads or num_heads % num_kv_heads:
        legal = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise SpecError(f"{num_heads} query heads over {num_kv_heads} KV heads; KV heads must divide them: {legal}")
    if sinks is not None and sinks.shape != (num_heads,):
        raise SpecError(f"sinks has shape {tuple(sinks.shape)}; expected one per query head: ({num_heads},)")
    if window is not None and window < 1:
        raise SpecError(f"window={window}; a window counts the query's own token, so it is at least 1, or None")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype or x.device != q.device:
            raise SpecError(f"{name} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; they must be equal")
