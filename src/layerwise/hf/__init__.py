"""Hugging Face models under a plan of layerwise, their code and weights untouched.

    families    which model types work, and why others are refused
    spec        model_spec: what the planner needs to know, read from a config
    attention   apply: attention layers follow the routes of the current micro-batch
    batches     planned micro-batches, shaped as these models take them
    loss        the token-weighted loss of a whole step

Needs transformers: pip install 'layerwise[hf]'.
"""

from layerwise.hf.attention import apply
from layerwise.hf.batches import Batch, batches
from layerwise.hf.loss import loss
from layerwise.hf.spec import model_spec

__all__ = ["Batch", "apply", "batches", "loss", "model_spec"]
