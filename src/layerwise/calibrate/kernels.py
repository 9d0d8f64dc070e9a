"""FLOP/s of this rank's attention kernels, by length and heads, and of its linear layers, at a model's shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from layerwise.calibrate.effort import Effort, median_s
from layerwise.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR, pair_flops
from layerwise.kernels import Segments, varlen_attention
from layerwise.spec import AttentionSpec, ModelSpec

SHORTEST_TOKENS, LONGEST_TOKENS, STEP = 128, 65536, 4


@dataclass(frozen=True, kw_only=True)
class AttentionRates:
    """flops_per_s[length][head] for `lengths` keys and `heads` query heads, forward and backward together."""

    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    flops_per_s: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Where and how much to measure."""

    device: torch.device
    dtype: torch.dtype
    effort: Effort

    def seconds(self, call: Callable[[], object]) -> float:
        """Median seconds of a call."""
        return median_s(call, self.device, self.effort.repeats, before=lambda: None)

    def random(self, *shape: int) -> torch.Tensor:
        """Normal numbers of this shape."""
        return torch.randn(shape, device=self.device, dtype=self.dtype)


def measure_linear(model: ModelSpec, probe: Probe) -> float:
    """FLOP/s of a linear layer as wide as the model's MLP (or one expert's), forward and backward."""
    hidden, width = model.hidden_size, model.moe_intermediate_size or model.intermediate_size
    flops_per_token = (1 + BACKWARD_LINEAR) * 2 * hidden * width
    tokens = max(16, min(probe.effort.max_tokens, int(probe.effort.linear_flops / flops_per_token)))
    x, weight, grad = probe.random(tokens, hidden), probe.random(hidden, width), probe.random(tokens, width)
    return tokens * flops_per_token / probe.seconds(partial(_linear, x, weight, grad))


def _linear(x: torch.Tensor, weight: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x @ weight, grad @ weight.T, x.T @ grad


def measure_attention(spec: AttentionSpec, probe: Probe) -> AttentionRates:
    """FLOP/s of packed samples of one length, for the lengths and head counts of `attention_sizes`."""
    lengths, heads = attention_sizes(spec, probe.effort)
    rates = tuple(tuple(_attention_rate(spec, probe, length, count) for count in heads) for length in lengths)
    return AttentionRates(lengths=lengths, heads=heads, flops_per_s=rates)


def attention_sizes(spec: AttentionSpec, effort: Effort) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths, in steps of 4, whose samples the effort allows; and head counts that tiles of a group may have."""
    lengths = [SHORTEST_TOKENS]
    while lengths[-1] < min(LONGEST_TOKENS, effort.max_tokens):
        longer = lengths[-1] * STEP
        if _flops(spec, longer, spec.num_heads) > effort.sample_flops:
            break
        lengths.append(longer)
    heads, kv_heads = {1, spec.num_heads}, spec.num_kv_heads
    while kv_heads > 1:
        kv_heads = max(1, kv_heads // STEP)
        heads.add(kv_heads * spec.queries_per_kv)
    return tuple(lengths), tuple(sorted(heads))


def _attention_rate(spec: AttentionSpec, probe: Probe, length: int, num_heads: int) -> float:
    flops = _flops(spec, length, num_heads)
    effort = probe.effort
    num_samples = max(1, min(int(effort.attention_flops / flops), effort.max_tokens // length))
    tokens, kv_heads = num_samples * length, max(1, num_heads // spec.queries_per_kv)
    q = probe.random(tokens, num_heads, spec.head_dim).requires_grad_()
    k = probe.random(tokens, kv_heads, spec.head_dim).requires_grad_()
    v = probe.random(tokens, kv_heads, spec.v_head_dim).requires_grad_()
    grad = probe.random(tokens, num_heads, spec.v_head_dim)
    chunk = spec.chunk or length
    pieces = tuple(min(chunk, length - lo) for lo in range(0, length, chunk)) * num_samples
    call = partial(_attention, q, k, v, grad, Segments(pieces, pieces), spec.window)
    return num_samples * flops / probe.seconds(call)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, segments: Segments, window: int | None
) -> tuple[torch.Tensor, ...]:
    out = varlen_attention(q, k, v, segments, window=window)
    return torch.autograd.grad(out, (q, k, v), grad)


def _flops(spec: AttentionSpec, length: int, num_heads: int) -> float:
    """Forward and backward FLOPs of one sample, as the cost model counts them."""
    return (1 + BACKWARD_ATTENTION) * pair_flops(spec) * num_heads * int(spec.pairs(0, length))
