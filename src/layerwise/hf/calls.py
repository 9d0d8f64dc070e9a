"""What the calls inside a model carry: the pass that they belong to, and arguments that must not be ignored."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from layerwise.errors import SpecError, UnsupportedError
from layerwise.plan import HOME
from layerwise.runtime import Routes

NAME = "layerwise"
PASS = "layerwise_pass"

# Keyword arguments that do not change what is computed here.
_HARMLESS = frozenset({"position_ids", "use_cache", "output_router_logits", "output_hidden_states", "return_dict"})


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The routes of one forward pass, and the layer kinds of the sites that ran, to which recompute adds its own."""

    routes: Routes
    sites: list[str] = field(default_factory=list)


def routes_of_call(caller: str, kind: str, others: dict[str, Any]) -> Routes:
    """The routes among the other keyword arguments of a site's call, which is noted.

    Raises UnsupportedError for arguments that are given and would be ignored, and where the routes are missing.
    """
    forward_pass: ForwardPass | None = others.pop(PASS, None)
    if forward_pass is None:
        raise UnsupportedError(
            f"{caller} was called without the routes that its model's forward hands down: call the model that apply() "
            "was given; if that was done, this version of transformers drops keyword arguments on the way"
        )
    check_ignored(caller, others)
    forward_pass.sites.append(kind)
    return forward_pass.routes


def check_follows_routes(config: Any) -> None:
    """Raise SpecError for the text config of a model whose attention does not look at routes."""
    if config._attn_implementation != NAME:
        raise SpecError(
            f"the model's attention is {config._attn_implementation!r}, which would mix up samples: call "
            "layerwise.hf.apply(model) first"
        )


def check_ignored(caller: str, others: dict[str, Any]) -> None:
    """Raise UnsupportedError for arguments that are given and would be ignored, and are not harmless."""
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise UnsupportedError(f"{caller} asks for {unknown}, which layerwise would have to ignore")


def is_empty(routes: Routes, kind: str = HOME) -> bool:
    """Whether this rank holds no token in layers of a kind, or at home, and runs on a padding token."""
    return not len(routes.tokens_at(kind).position_ids)


def padded_positions(routes: Routes, kind: str = HOME) -> Tensor:
    """int64 [T] of the tokens in layers of a kind, or at home; [1] on a rank without tokens there."""
    positions = routes.tokens_at(kind).position_ids
    return positions.new_zeros(1) if is_empty(routes, kind) else positions
