"""Where a step's numbers first stopped being finite: its forward passes once more, with every module's output checked.

A check of each layer in each step would read all activations once more; this way a step without fault pays nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from layerwise.data.loader import Microbatch, Step
from layerwise.groups import World
from layerwise.kernels import Kernel, Segments, varlen_attention
from layerwise.labels import ranks_label
from layerwise.model import HybridLM

_ATTENTION = -1


@torch.no_grad()
def first_not_finite(model: HybridLM, step: Step, forward: Callable[[Microbatch], Any], world: World) -> str:
    """Which rank, micro-batch and layer it was, for people; every rank calls this and gets the same.

    forward: the forward pass of a micro-batch; what it returns is not looked at.
    """
    probe = _Probe(model, world)
    for microbatch in step.microbatches:
        with microbatch.routes() as routes:
            probe.microbatch = routes.microbatch
        forward(microbatch.with_routes(replace(routes, backend=probe.kernel(routes.backend))))
    probe.remove()
    found = world.gather_ints(probe.first or [len(step.microbatches), 0, 0, 0])
    first = min(found)
    if first[0] == len(step.microbatches):
        return (
            "run again, its forward pass is finite up to the head on every rank: numbers overflow in the loss or in "
            "backward, or the hardware made an error"
        )
    ranks = ranks_label(rank for rank, place in enumerate(found) if place == first)
    return f"first not finite: {ranks}, micro-batch {first[0]}, {probe.name_of(first[2], first[3])}"


class _Probe:
    """The first output on this rank that is not finite, as integers that compare by time:

    (micro-batch, module calls before it, module or _ATTENTION, layer of the attention before it).
    All ranks call the same modules in the same order. Attention comes before the module that is called next.
    """

    def __init__(self, model: HybridLM, world: World) -> None:
        self.model, self.world = model, world
        self.first: list[int] | None = None
        self.microbatch = self.num_calls = 0
        modules = [(name, module) for name, module in model.named_modules() if not list(module.children())]
        self.names = [name for name, _ in modules]
        self._hooks = [m.register_forward_hook(self._hook_of(index)) for index, (_, m) in enumerate(modules)]

    def remove(self) -> None:
        """Leave the model as it was."""
        for hook in self._hooks:
            hook.remove()

    def name_of(self, module: int, layer: int) -> str:
        """Of a module, or of the attention of a layer."""
        part = "attention" if module == _ATTENTION else self.names[module]
        if match := re.fullmatch(r"layers\.(\d+)\.(.+)", part):
            layer, part = int(match[1]), match[2]
        elif module != _ATTENTION:
            return f"outside of the layers: output of {part}"
        return f"layer {layer} ({self.model.spec.all_layer_types[layer]}): output of {part}"

    def kernel(self, backend: str | Kernel) -> Kernel:
        """The attention kernel with a check. What was not finite before it is not its fault."""

        def checked(
            q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: int | None, scale: float, sinks: Tensor | None
        ) -> Tensor:
            out = varlen_attention(q, k, v, segments, window=window, scale=scale, sinks=sinks, backend=backend)
            if not _is_finite(out) and all(map(_is_finite, (q, k, v))):
                self._found(_ATTENTION)
            return out

        return checked

    def _hook_of(self, index: int) -> Callable[[Any, Any, Any], None]:
        def hook(_module: Any, _args: Any, output: Tensor) -> None:
            if not _is_finite(output):
                self._found(index)
            self.num_calls += 1

        return hook

    def _found(self, module: int) -> None:
        self.first = self.first or [self.microbatch, self.num_calls, module, self.world.progress.layer]


def _is_finite(x: Tensor) -> bool:
    return bool(x.isfinite().all())
