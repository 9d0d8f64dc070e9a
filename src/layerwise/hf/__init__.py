"""Hugging Face models under a plan of layerwise, their code and weights untouched.

    families    which model types work, and why others are refused
    spec        model_spec: what the planner needs to know, read from a config
    attention   apply: the layers follow the routes of the current micro-batch
    mixers      linear-attention, state-space and convolution layers, on whole samples
    batches     planned micro-batches, shaped as these models take them
    loss        the token-weighted loss of a whole step
    trainer     PlannedTrainer: transformers.Trainer over planned steps

Needs transformers: pip install 'layerwise[hf]'. PlannedTrainer needs accelerate too, and loads on first use.
"""

from typing import Any

from layerwise.hf.attention import apply
from layerwise.hf.batches import Batch, batches
from layerwise.hf.loss import loss
from layerwise.hf.spec import model_spec

__all__ = ["Batch", "PlannedTrainer", "apply", "batches", "loss", "model_spec"]


def __getattr__(name: str) -> Any:
    if name != "PlannedTrainer":
        raise AttributeError(f"module 'layerwise.hf' has no attribute {name!r}")
    from layerwise.hf.trainer import PlannedTrainer

    return PlannedTrainer
