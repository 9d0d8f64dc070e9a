"""The reference model: a hybrid-attention decoder, dense or mixture-of-experts, on local packed rows."""

from layerwise.model.moe import RouterStats
from layerwise.model.transformer import HybridLM, LMOutput, ModelOptions

__all__ = ["HybridLM", "LMOutput", "ModelOptions", "RouterStats"]
