"""Where a step's numbers first stopped being finite: its passes once more, with every module's output checked.

A check of each layer in each step would read all activations once more; this way a step without fault pays nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from layerwise.data.loader import Microbatch, Step
from layerwise.groups import World
from layerwise.kernels import Kernel, Segments, varlen_attention
from layerwise.labels import ranks_label
from layerwise.model import HybridLM

_ATTENTION, _LOSS = -1, -2
_NO_EXPONENT = -400  # below every float64's


def first_not_finite(model: HybridLM, step: Step, loss: Callable[[Microbatch], Tensor], world: World) -> str:
    """Which rank, micro-batch and layer it was, for people; every rank calls this and gets the same.

    loss: the forward pass of a micro-batch, and what its backward pass begins with. Gradients are spoilt.
    """
    for is_backward in (False, True):
        probe = _Probe(model, world, is_backward)
        with torch.set_grad_enabled(is_backward):
            for microbatch in step.microbatches:
                with microbatch.routes() as routes:
                    probe.microbatch = routes.microbatch
                total = loss(microbatch.with_routes(replace(routes, backend=probe.kernel(routes.backend))))
                probe.check(total, _LOSS)
                if is_backward:
                    model.zero_grad()
                    total.backward()
                    probe.check_weights()
        probe.remove()
        found = world.gather_ints(probe.first or [len(step.microbatches), 0, 0, 0])
        first = min(found)
        if first[0] < len(step.microbatches):
            ranks = ranks_label(rank for rank, place in enumerate(found) if place == first)
            return f"first not finite: {ranks}, micro-batch {first[0]}, {probe.name_of(first[2], first[3])}"
    largest = world.gather_ints(probe.largest)
    exponent, weight = max(largest)
    where = f"about 1e{exponent}, of {probe.weights[weight]} on rank {largest.index([exponent, weight])}"
    return (
        "run again, forward and backward, all is finite: gradients overflow in their sum over ranks or in its norm "
        f"(the largest is {where}), or the hardware made an error"
    )


class _Probe:
    """The first output, or gradient of an output, on this rank that is not finite, as integers that compare by time:

    (micro-batch, modules checked before it, module or _ATTENTION or _LOSS, layer of the attention before it). Weights
    are numbered after modules.
    All ranks call the same modules in the same order. Attention comes before the module that is called next.
    """

    def __init__(self, model: HybridLM, world: World, is_backward: bool) -> None:
        self.model, self.world, self.is_backward = model, world, is_backward
        self.first: list[int] | None = None
        self.microbatch = self.num_checks = 0
        self.largest = [_NO_EXPONENT, 0]  # of a weight's gradient: its decimal exponent, and which
        self.weights = [name for name, _ in model.named_parameters()]
        modules = [(name, module) for name, module in model.named_modules() if not list(module.children())]
        self.names = [name for name, _ in modules]
        self._hooks = [m.register_forward_hook(self._hook_of(index)) for index, (_, m) in enumerate(modules)]

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def name_of(self, module: int, layer: int) -> str:
        """Of a module, or of the attention of a layer."""
        of = "gradient of the output of" if self.is_backward else "output of"
        if module >= len(self.names):
            return f"gradient of the weight {self.weights[module - len(self.names)]}"
        if module == _LOSS:
            return "the gradient of the loss" if self.is_backward else "the loss"
        part = "attention" if module == _ATTENTION else self.names[module]
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", part):
            layer, part = int(match[1]), match[2]
        elif module != _ATTENTION:
            return f"outside of the layers: {of} {part}"
        return f"layer {layer} ({self.model.spec.all_layer_types[layer]}): {of} {part}"

    def kernel(self, backend: str | Kernel) -> Kernel:
        """The attention kernel with a check. What was not finite before it is not its fault."""

        def checked(
            q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: int | None, scale: float, sinks: Tensor | None
        ) -> Tensor:
            out = varlen_attention(q, k, v, segments, window=window, scale=scale, sinks=sinks, backend=backend)
            if all(map(_is_finite, (q, k, v))):
                self.check(out, _ATTENTION)
            return out

        return checked

    def _hook_of(self, index: int) -> Callable[[Any, Any, Any], None]:
        return lambda _module, _args, output: self.check(output, index)

    def check(self, output: Tensor, module: int) -> None:
        """Look at an output, or at its gradient when that is there."""
        layer = self.world.progress.layer

        def look(x: Tensor) -> None:
            if not _is_finite(x):
                self.first = self.first or [self.microbatch, self.num_checks, module, layer]
            self.num_checks += module >= 0  # a rank may have several attention kernels to run, or none

        if not self.is_backward:
            look(output)
        elif output.requires_grad:
            output.register_hook(look)

    def check_weights(self) -> None:
        """Look at the gradients of all weights after a backward pass: this rank's, unless they are sharded."""
        for index, weight in enumerate(self.model.parameters()):
            grad = weight.grad
            local = grad.to_local() if isinstance(grad, DTensor) else grad
            if local is None or not local.numel():
                continue
            largest = float(local.abs().max())
            if not math.isfinite(largest):
                self.first = self.first or [self.microbatch, self.num_checks, len(self.names) + index, 0]
            elif largest:
                self.largest = max(self.largest, [math.floor(math.log10(largest)), index])


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())
