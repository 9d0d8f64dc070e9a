"""Train hybrid-attention models with a parallel layout of its own for each kind of layer.

Names load on first use, so importing layerwise, and planning with it, does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "ClusterSpec": "layerwise.spec",
    "LocalWorld": "layerwise.groups",
    "ModelSpec": "layerwise.spec",
    "PlannedLoader": "layerwise.data.loader",
    "Planner": "layerwise.planners",
    "ProcessWorld": "layerwise.groups",
    "StepPlan": "layerwise.plan",
    "StepSampler": "layerwise.data.sampler",
    "attention": "layerwise.runtime",
    "balance_loss": "layerwise.loss",
    "checkpoint": "layerwise.runtime",
    "current_routes": "layerwise.runtime",
    "load_cluster": "layerwise.spec",
    "load_model": "layerwise.spec",
    "plan_step": "layerwise.planners",
    "reduce_gradients": "layerwise.loss",
    "relocate": "layerwise.runtime",
    "solo_world": "layerwise.groups",
    "sum_gradients": "layerwise.train.sharding",
    "token_loss": "layerwise.loss",
}

__all__ = sorted(_HOMES)
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'layerwise' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
