"""Attention through torch's scaled_dot_product_attention, with memory linear in the tokens.

Segments of equal lengths share a call. A whole causal segment is one fused call; everything else is cut into
blocks of queries that get only the keys they can see, and a block is itself a bottom-right aligned segment.
So nothing of size L x L exists, and a sliding window costs L x (window + BLOCK_TOKENS).

Shapes: B segments of equal lengths, H query heads, K KV heads, G = H / K, D head dim. `sink` holds the sink
key [K, 1, D], or nothing; it is wide until a group of segments needs it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from layerwise.kernels.segments import Segments
from layerwise.kernels.widths import widen

BLOCK_TOKENS = 128


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """See varlen_attention. Runs on every device and floating dtype."""
    v_head_dim = v.shape[-1]
    sink: tuple[Tensor, ...] = ()
    if sinks is not None:
        # Finite, since other heads' queries have zeros in its place: a sink of -inf is one that nobody sees.
        sink_score = (sinks / scale).clamp(min=torch.finfo(q.dtype).min / 4)
        q, k, sink_key = _add_sink_dims(q, k, sink_score)
        sink = (F.pad(sink_key, (0, max(0, v_head_dim - sink_key.shape[-1]))),)
    q, k, v = widen(q, k, v)

    q_parts, k_parts, v_parts = q.split(segments.q_lens), k.split(segments.k_lens), v.split(segments.k_lens)
    groups: defaultdict[tuple[int, int], list[int]] = defaultdict(list)
    for index, lens in enumerate(zip(segments.q_lens, segments.k_lens, strict=True)):
        groups[lens].append(index)

    outputs: list[Tensor] = list(q_parts)
    for members in groups.values():
        q_BHTD, k_BKTD, v_BKTD = (
            torch.stack([parts[i] for i in members]).transpose(1, 2) for parts in (q_parts, k_parts, v_parts)
        )
        low_sink = (sink_key.to(q.dtype) for sink_key in sink)
        rows = _attend(window, scale, q_BHTD, k_BKTD, v_BKTD, *low_sink).transpose(1, 2)
        for index, output in zip(members, rows.unbind(), strict=True):
            outputs[index] = output
    return torch.cat(outputs)[..., :v_head_dim]


def _add_sink_dims(q: Tensor, k: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q [Tq, H, D + G], k [Tk, K, D + G] and a key [K, 1, D + G] whose product with a query is the sink.

    The G query heads of one KV head have different sinks but share keys: each of them gets a dim of its own.
    """
    num_kv_heads = k.shape[1]
    queries_per_kv = q.shape[1] // num_kv_heads
    own_dim = torch.eye(queries_per_kv, dtype=q.dtype, device=q.device).repeat(num_kv_heads, 1)
    sink_key = F.pad(sinks.view(num_kv_heads, 1, queries_per_kv), (k.shape[-1], 0))
    return torch.cat([q, own_dim.expand(len(q), -1, -1)], dim=-1), F.pad(k, (0, queries_per_kv)), sink_key


def _attend(window: int | None, scale: float, q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
    """q [B, H, q_len, D], k and v [B, K, k_len, D] -> [B, H, q_len, D]."""
    q_len, k_len = q.shape[2], k.shape[2]
    # Only the CPU kernel is sure to fuse every dtype and grouped heads; others may build all the scores.
    fused = q.device.type == "cpu" and q_len == k_len and not sink
    if fused and (window is None or window >= k_len):
        return _sdpa(q, k, v, scale, is_causal=True)
    if q_len <= BLOCK_TOKENS:
        ((_, keys),) = _blocks(q_len, k_len, window)
        return _attend_block(window, scale, q, k[:, :, keys], v[:, :, keys], *sink)
    output: Tensor = _Blockwise.apply(window, scale, q, k, v, *sink)
    return output


def _blocks(q_len: int, k_len: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """The query rows of each block and the keys that they can see."""
    offset = k_len - q_len
    for lo in range(0, q_len, BLOCK_TOKENS):
        hi = min(lo + BLOCK_TOKENS, q_len)
        first_key = 0 if window is None else max(0, offset + lo - window + 1)
        yield slice(lo, hi), slice(first_key, offset + hi)


def _attend_block(window: int | None, scale: float, q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
    """One masked call; the queries are the last positions of the keys."""
    rows, num_keys = q.shape[2], k.shape[2]
    visible = torch.ones(rows, num_keys, dtype=torch.bool, device=q.device).tril_(num_keys - rows)
    if window is not None:
        visible.triu_(num_keys - rows - window + 1)
    for sink_key in sink:
        k = torch.cat([sink_key.expand(len(k), -1, -1, -1), k], dim=2)
        v = F.pad(v, (0, 0, 1, 0))
        visible = F.pad(visible, (1, 0), value=True)
    return _sdpa(q, k, v, scale, attn_mask=visible)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float, **mask: Any) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **mask)


class _Blockwise(torch.autograd.Function):
    """All blocks of a long segment, computed again block by block in backward.

    Plain autograd would save a mask per block, and give each block's keys a gradient of the whole segment's
    size: both grow with the square of the length.
    """

    @staticmethod
    def forward(ctx: Any, window: int | None, scale: float, q: Tensor, k: Tensor, v: Tensor, *sink: Tensor) -> Tensor:
        ctx.save_for_backward(q, k, v, *sink)
        ctx.window, ctx.scale = window, scale
        blocks = _blocks(q.shape[2], k.shape[2], window)
        return torch.cat(
            [_attend_block(window, scale, q[:, :, rows], k[:, :, keys], v[:, :, keys], *sink) for rows, keys in blocks],
            dim=2,
        )

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, *sink = ctx.saved_tensors
        # A key is in many blocks: in half precision its later contributions would be rounded away.
        wide = torch.promote_types(k.dtype, torch.float32)
        dk, dv, *d_sink = (torch.zeros_like(x, dtype=wide) for x in (k, v, *sink))
        dq_blocks = []
        for rows, keys in _blocks(q.shape[2], k.shape[2], ctx.window):
            views = (q[:, :, rows], k[:, :, keys], v[:, :, keys], *sink)
            inputs = [x.detach().requires_grad_() for x in views]
            with torch.enable_grad():
                output = _attend_block(ctx.window, ctx.scale, *inputs)
            dq_block, *grads = torch.autograd.grad(output, inputs, grad_output[:, :, rows])
            dq_blocks.append(dq_block)
            for total, grad in zip((dk[:, :, keys], dv[:, :, keys], *d_sink), grads, strict=True):
                total += grad
        return None, None, torch.cat(dq_blocks, dim=2), *(x.to(k.dtype) for x in (dk, dv, *d_sink))
