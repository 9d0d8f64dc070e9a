"""One attention call: what it must look like, and the kernels that it runs on the rows of a rank's tiles."""

from __future__ import annotations

import torch
from torch import Tensor

from layerwise.errors import SpecError, UnsupportedError
from layerwise.kernels import Kernel, varlen_attention
from layerwise.route import Route
from layerwise.spec import AttentionSpec


def cast_rows(*rows: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, what it makes of the operands of a fused kernel; they travel in that dtype, too."""
    device = rows[0].device.type
    if not torch.is_autocast_enabled(device):
        return rows
    low = torch.get_autocast_dtype(device)
    return tuple(x.to(low) if x.is_floating_point() and x.dtype != torch.float64 else x for x in rows)


def attend(
    rows: tuple[Tensor, ...],
    route: Route,
    spec: AttentionSpec,
    scale: float | None,
    sinks: Tensor | None,
    backend: str | Kernel,
) -> Tensor:
    """Run the kernel calls over the tile-side rows; [rows, Dv] in tile order, of the dtype of the rows.

    Autocast is over by then: a rank whose kernels have nothing to do must send the dtype that the others send.
    """
    q_rows, k_rows, v_rows = rows
    q_sizes = [call.segments.total_q * (call.h1 - call.h0) for call in route.calls]
    kv_sizes = [call.segments.total_k * call.num_kv_heads for call in route.calls]
    parts = zip(route.calls, q_rows.split(q_sizes), k_rows.split(kv_sizes), v_rows.split(kv_sizes), strict=True)
    with torch.autocast(q_rows.device.type, enabled=False):
        outs = [
            varlen_attention(
                q.view(-1, call.h1 - call.h0, spec.head_dim),
                k.view(-1, call.num_kv_heads, spec.head_dim),
                v.view(-1, call.num_kv_heads, spec.v_head_dim),
                call.segments,
                window=spec.window,
                scale=scale,
                sinks=None if sinks is None else sinks[call.h0 : call.h1],
                backend=backend,
            ).reshape(-1, spec.v_head_dim)
            for call, q, k, v in parts
        ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    kind: str,
    window: int | None,
    sinks: Tensor | None,
    num_tokens: int,
    device: torch.device,
) -> None:
    """Raise SpecError or UnsupportedError where the arguments of `attention` are not what the plan was made for."""
    expected = {
        "q": (num_tokens, spec.num_heads, spec.head_dim),
        "k": (num_tokens, spec.num_kv_heads, spec.head_dim),
        "v": (num_tokens, spec.num_kv_heads, spec.v_head_dim),
    }
    for (name, shape), tensor in zip(expected.items(), (q, k, v), strict=True):
        if tuple(tensor.shape) != shape:
            raise SpecError(
                f"{kind}: {name} has shape {tuple(tensor.shape)}, the plan expects [tokens, heads, dim] = {shape}: "
                "packed rows without a batch dimension, heads before dim, KV heads not expanded"
            )
    if not device == q.device == k.device == v.device:
        raise SpecError(
            f"{kind}: q, k and v are on {q.device}, {k.device} and {v.device}, the micro-batch is on {device}: give "
            "PlannedLoader, ProcessWorld or solo_world the device of the model"
        )
    if not q.is_floating_point():
        raise SpecError(f"{kind}: q, k and v are {q.dtype}, and must be of a floating dtype")
    if not q.dtype == k.dtype == v.dtype:
        raise SpecError(
            f"{kind}: q, k and v travel in one buffer and need one dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if window is not None and window != spec.window:
        raise UnsupportedError(
            f"{kind}: the layer asks for window={window}, the plan was made for window={spec.window}"
        )
    if sinks is not None and tuple(sinks.shape) != (spec.num_heads,):
        raise SpecError(
            f"{kind}: sinks have shape {tuple(sinks.shape)}, expected one per query head: ({spec.num_heads},)"
        )
