"""Compute that takes its time without computing: every rank waits as long as the cost model says its work takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerwise.cost import BACKWARD_ATTENTION, CostModel, LayerCost
from layerwise.kernels import Segments

# A sleep ends up to this much late; the rest of the time until a deadline is spun away.
SPIN_S = 100e-6


class Pacer:
    """A rank's accelerator: work begins where the work before it ended, or now if something else came between."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self.speed = 1.0
        self._free_s: float | None = None

    def free_at(self, seconds: float | None) -> None:
        """When earlier work ended, on time.monotonic's clock; None: when it is asked for."""
        self._free_s = seconds

    def spend(self, seconds: float) -> None:
        """Wait until `seconds` of work at speed 1 are done."""
        until = (time.monotonic() if self._free_s is None else self._free_s) + seconds / self.speed
        if (left := until - time.monotonic()) > SPIN_S:
            time.sleep(left - SPIN_S)
        while time.monotonic() < until:
            pass
        self.late_s.append(time.monotonic() - until)
        self._free_s = until


class Edge(torch.autograd.Function):
    """The same tensor; something happens whenever the forward, or the backward, passes this point."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Callable[[], None], backward: Callable[[], None]) -> Tensor:
        ctx.pass_backward = backward
        forward()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.pass_backward()
        return grad, None, None


class PacedAttention:
    """A `layerwise.kernels.Kernel` that waits for the time of the segments that it is given, and returns its queries.

    So what the layers hand on tells whether every row went to its tile and came back: it must not change.
    """

    def __init__(self, cost: CostModel, pacer: Pacer) -> None:
        self.pacer = pacer
        self.layer_of = {layer.spec.window: layer for layer in cost.layers}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        segments: Segments,
        window: int | None,
        scale: float,
        sinks: Tensor | None,
    ) -> Tensor:
        forward_s = attention_forward_s(self.layer_of[window], segments, q.shape[1])
        out: Tensor = _Paced.apply(self.pacer, forward_s, q, k, v)
        return out


def attention_forward_s(layer: LayerCost, segments: Segments, num_heads: int) -> float:
    """Seconds of one forward kernel call."""
    q_len, k_len = (np.array(lens, dtype=np.int64) for lens in (segments.q_lens, segments.k_lens))
    both_s = layer.attention_s(layer.spec.pairs(k_len - q_len, k_len), k_len, num_heads)
    return float(both_s.sum()) / (1 + BACKWARD_ATTENTION)


class _Paced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pacer: Pacer, forward_s: float, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ctx.pacer, ctx.forward_s, ctx.shapes = pacer, forward_s, (k.shape, v.shape)
        pacer.spend(forward_s)
        return q.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ctx.pacer.spend(BACKWARD_ATTENTION * ctx.forward_s)
        return None, None, grad, *(grad.new_zeros(shape) for shape in ctx.shapes)
