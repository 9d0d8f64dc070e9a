"""The attention that other kernels are tested against: the definition, one softmax per segment."""

from __future__ import annotations

import torch
from torch import Tensor

from layerwise.kernels.segments import Segments


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    window: int | None,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """See varlen_attention. Computes in the input dtype, with [H, q_len, k_len] scores in memory."""
    parts = zip(q.split(segments.q_lens), k.split(segments.k_lens), v.split(segments.k_lens), strict=True)
    return torch.cat([_one_segment(*part, window, scale, sinks) for part in parts])


def _one_segment(q: Tensor, k: Tensor, v: Tensor, window: int | None, scale: float, sinks: Tensor | None) -> Tensor:
    queries_per_kv = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(queries_per_kv, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale

    key_position = torch.arange(len(k), device=q.device)
    query_position = key_position[len(k) - len(q) :, None]
    hidden = key_position > query_position
    if window is not None:
        hidden |= key_position <= query_position - window
    scores = scores.masked_fill(hidden, float("-inf"))

    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1).to(scores.dtype)], dim=-1)
    weights = scores.softmax(dim=-1)[..., : len(k)]
    return torch.einsum("hqk,khd->qhd", weights, v)
