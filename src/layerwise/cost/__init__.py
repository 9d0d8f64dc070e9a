"""What a plan costs: FLOPs, seconds, bytes, memory, and the lower bounds of all of these. No torch.

model       seconds and bytes of a plan, layer by layer
prediction  what it says: of a layer, a micro-batch and a step
work        what every rank does in a micro-batch, and how parts add up to one
layer       the seconds of one layer's work, whoever does it
overlap     what attention hides of exchanges
flops       FLOPs and parameters of a model
bounds      what no plan of a step gets below
memory      bytes that every rank holds at once
"""

from layerwise.cost.bounds import GapRow, bound_step, fewest_microbatches, gap_rows
from layerwise.cost.flops import (
    BACKWARD_ATTENTION,
    BACKWARD_LINEAR,
    Floats,
    attention_flops,
    dense_weights,
    expert_weights,
    head_flops_per_token,
    linear_flops_per_token,
    model_flops,
    pair_flops,
)
from layerwise.cost.layer import LayerCost
from layerwise.cost.memory import Memory, kept_elements_per_token, predict_memory, site_bytes
from layerwise.cost.model import EXCHANGES, MOVE_PASSES, CostModel, predict
from layerwise.cost.prediction import LayerTimes, MicrobatchPrediction, MicrobatchTimes, PassPrediction, StepPrediction
from layerwise.cost.work import Sent, Work

__all__ = [
    "BACKWARD_ATTENTION",
    "BACKWARD_LINEAR",
    "EXCHANGES",
    "MOVE_PASSES",
    "CostModel",
    "Floats",
    "GapRow",
    "LayerCost",
    "LayerTimes",
    "Memory",
    "MicrobatchPrediction",
    "MicrobatchTimes",
    "PassPrediction",
    "Sent",
    "StepPrediction",
    "Work",
    "attention_flops",
    "bound_step",
    "dense_weights",
    "expert_weights",
    "fewest_microbatches",
    "gap_rows",
    "head_flops_per_token",
    "kept_elements_per_token",
    "linear_flops_per_token",
    "model_flops",
    "pair_flops",
    "predict",
    "predict_memory",
    "site_bytes",
]
