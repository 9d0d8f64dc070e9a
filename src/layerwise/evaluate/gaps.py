"""Where the seconds of a step above the ideal sit: by layer kind, and by what the slowest rank does there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import numpy as np

from layerwise.cost import CostModel, Floats, LayerCost, LayerTimes, StepPrediction
from layerwise.plan import Ints, StepPlan

HEAD, MOVES = "lm_head", "moves"


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Seconds of all layers of a kind in a step; the four add up to what these layers take.

    ideal_s: the work spread evenly. imbalance_s: compute of the rank waited for, above that. exchange_s: its two
    exchanges per layer, but for what attention hides. exposed_s: its parameter and dispatch traffic that compute does
    not hide.
    """

    ideal_s: float
    imbalance_s: float
    exchange_s: float
    exposed_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return sum(astuple(self))


def mean_gap(gaps: Sequence[Gap]) -> Gap:
    """The mean over steps, part by part."""
    ideal_s, imbalance_s, exchange_s, exposed_s = np.mean([astuple(gap) for gap in gaps], axis=0).tolist()
    return Gap(ideal_s=ideal_s, imbalance_s=imbalance_s, exchange_s=exchange_s, exposed_s=exposed_s)


def split_gap(plan: StepPlan, prediction: StepPrediction, cost: CostModel) -> dict[str, Gap]:
    """The gap of each layer kind, of the LM head, and of passes that only move hidden states between layers.

    Their totals add up to the predicted seconds of the step.
    """
    lengths = np.array(plan.lengths, dtype=np.int64)
    spent: dict[str, Floats] = {layer.kind: np.zeros(3) for layer in cost.layers}
    slowest = int(np.sum([part.rank_s for part in prediction.microbatches], axis=0).argmax())
    for part in prediction.microbatches:
        for kind, times in part.times.items():
            rank = int(times.total_s.argmax()) if cost.cluster.sync == "layer" else slowest
            spent[kind] += _parts(times, rank)
    gaps: dict[str, Gap] = {
        layer.kind: _gap(layer, lengths, spent[layer.kind], cost.cluster.num_ranks) for layer in cost.layers
    }
    head_ideal_s = cost.head_token_s * float(lengths.sum()) / cost.cluster.num_ranks
    gaps[HEAD] = Gap(ideal_s=head_ideal_s, imbalance_s=prediction.head_s - head_ideal_s, exchange_s=0.0, exposed_s=0.0)
    gaps[MOVES] = Gap(ideal_s=0.0, imbalance_s=0.0, exchange_s=prediction.moves.seconds, exposed_s=0.0)
    return gaps


def _parts(times: LayerTimes, rank: int) -> Floats:
    """Compute, exchange and exposed traffic of one rank in one layer."""
    return np.array([times.compute_s[rank], times.exchange_s[rank], times.exposed_s[rank]])


def _gap(layer: LayerCost, lengths: Ints, spent: Floats, num_ranks: int) -> Gap:
    level_s = (layer.token_s * float(lengths.sum()) + float(layer.sample_s(lengths).sum())) / num_ranks
    compute_s, exchange_s, exposed_s = (layer.num_layers * spent).tolist()
    ideal_s = float(layer.num_layers * level_s)
    return Gap(ideal_s=ideal_s, imbalance_s=compute_s - ideal_s, exchange_s=exchange_s, exposed_s=exposed_s)
