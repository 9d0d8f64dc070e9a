"""Decoder layers at the places where a plan keeps their hidden states, for strategies with more places than one.

Hidden states move before each layer whose kind lives elsewhere than the last one's, and home after the last layer.
Angles of rotary embeddings do not move: the model computes them for the tokens of all places, one place after another,
and each layer takes those of its own. Whatever else a layer gets for each token (Gemma 4's per-layer inputs) lies at
home and moves too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map_only

from layerwise import runtime
from layerwise.exchange import outside_graph
from layerwise.hf.calls import PASS, is_empty, padded_positions
from layerwise.hf.spec import decoder_layers
from layerwise.plan import HOME
from layerwise.runtime import Routes

_BY_POSITION = ("position_ids", "position_embeddings")


def hook_layers(model: Any) -> None:
    """Let hidden states move between the model's decoder layers."""
    source = HOME
    for kind, layer in decoder_layers(model):
        if any(isinstance(hook, _MoveIn) for hook in layer._forward_pre_hooks.values()):
            return
        layer.register_forward_pre_hook(_MoveIn(source, kind), with_kwargs=True)
        source = kind
    layer.register_forward_hook(_MoveHome(kind), with_kwargs=True)


def positions_of_places(routes: Routes) -> Tensor:
    """int64 [tokens of all places], padded, in the order of `routes.places`."""
    return torch.cat([padded_positions(routes, place) for place in routes.places])


@dataclass(frozen=True)
class _MoveIn:
    """A layer's pre-hook: its inputs, [1, tokens at source, C] and [1, tokens at home, C'], move to its own place."""

    source: str
    kind: str

    def __call__(
        self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if PASS not in kwargs or len(kwargs[PASS].routes.places) == 1:
            return None
        routes = kwargs[PASS].routes
        hidden, *others = args
        hidden = _move(hidden, self.source, self.kind, routes)
        others = [_move(x, HOME, self.kind, routes) if isinstance(x, Tensor) else x for x in others]
        here = _slice_of(self.kind, routes)
        angles = {
            name: tree_map_only(Tensor, lambda x: x[:, here], kwargs[name]) for name in _BY_POSITION if name in kwargs
        }
        return (hidden, *others), kwargs | angles


@dataclass(frozen=True)
class _MoveHome:
    """The last layer's hook: hidden states, alone or the first of several outputs, move home."""

    kind: str

    def __call__(self, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if PASS not in kwargs or len(kwargs[PASS].routes.places) == 1:
            return None
        hidden, *others = output if isinstance(output, tuple) else (output,)
        moved = _move(hidden, self.kind, HOME, kwargs[PASS].routes)
        return (moved, *others) if isinstance(output, tuple) else moved


@outside_graph
def _move(x: Tensor, source: str, target: str, routes: Routes) -> Tensor:
    """[1, T, C] to [1, T', C], without and with the padding token of an empty rank."""
    moved = runtime.relocate(x[0, int(is_empty(routes, source)) :], source=source, target=target, routes=routes)
    return F.pad(moved, (0, 0, int(is_empty(routes, target)), 0))[None]


def _slice_of(kind: str, routes: Routes) -> slice:
    """Where the tokens of a kind's place are among those of all places."""
    first = 0
    for place in routes.places:
        end = first + len(padded_positions(routes, place))
        if place == routes.place_of(kind):
            break
        first = end
    return slice(first, end)
