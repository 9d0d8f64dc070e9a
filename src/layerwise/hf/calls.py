"""What the calls inside a model carry: the routes of the micro-batch, and arguments that must not be ignored."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from layerwise import runtime
from layerwise.errors import UnsupportedError
from layerwise.runtime import Routes

NAME = "layerwise"
ROUTES = "layerwise_routes"

# Keyword arguments that do not change what is computed here.
_HARMLESS = frozenset({"position_ids", "use_cache", "output_router_logits", "output_hidden_states", "return_dict"})


def routes_of_call(caller: str, others: dict[str, Any]) -> Routes:
    """The routes among a call's other keyword arguments, or the current ones.

    Raises UnsupportedError for arguments that are given and would be ignored.
    """
    routes: Routes = others.pop(ROUTES, None) or runtime.current_routes()
    unknown = sorted(name for name, given in others.items() if given is not None and name not in _HARMLESS)
    if unknown:
        raise UnsupportedError(f"{caller} asks for {unknown}, which layerwise would have to ignore")
    return routes


def is_empty(routes: Routes) -> bool:
    """Whether this rank holds no token, and runs on a padding token."""
    return not len(routes.position_ids)


def padded_positions(routes: Routes) -> Tensor:
    """int64 [T], or [1] on a rank without tokens."""
    return routes.position_ids.new_zeros(1) if is_empty(routes) else routes.position_ids
