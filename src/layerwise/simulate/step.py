"""One plan on one cluster, simulated: prediction, timeline and memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from layerwise.cost import CostModel, Memory, PassPrediction, StepPrediction, predict_memory
from layerwise.plan import StepPlan
from layerwise.simulate.timeline import MOVES, PHASES, Timeline, build_timeline
from layerwise.spec import ClusterSpec, ModelSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Simulation:
    """What the cost model predicts for a plan, when each rank does what, and what it holds."""

    plan: StepPlan
    cost: CostModel
    prediction: StepPrediction
    timeline: Timeline
    memory: Memory

    @property
    def gap_to_ideal_pct(self) -> float:
        """How much longer the step takes than the balanced ideal without communication, in percent of the ideal."""
        return 100 * (self.prediction.seconds / self.prediction.ideal_s - 1)

    @property
    def memory_warning(self) -> str | None:
        """Which ranks exceed the cluster's memory_bytes, or None."""
        return self.memory.warning(self.cost.cluster)

    def sent(self, kind: str) -> PassPrediction | None:
        """Bytes and calls of a kind of layers or of moves; None where a kind of sites sends nothing."""
        return self.prediction.moves if kind == MOVES else self.prediction.kinds.get(kind)

    def to_dict(self) -> dict[str, Any]:
        """All numbers but the single phases, ready for JSON; docs/simulate.md lists the fields."""
        prediction, memory = self.prediction, self.memory
        return {
            "seconds": prediction.seconds,
            "ideal_s": prediction.ideal_s,
            "gap_to_ideal_pct": self.gap_to_ideal_pct,
            "mfu": prediction.mfu,
            "tokens_per_rank": prediction.tokens_per_rank.tolist(),
            "kinds": {kind: self._kind_dict(kind) for kind in self.timeline.kinds},
            "memory": {
                "limit_bytes": self.cost.cluster.memory_bytes,
                "peak_bytes": memory.peak_bytes.tolist(),
                "peak_tokens": memory.peak_tokens.tolist(),
                "peak_site_tokens": {kind: tokens.tolist() for kind, tokens in memory.peak_site_tokens.items()},
                "parts_of_fullest_rank": memory.at_peak(memory.fullest_rank),
                "warning": self.memory_warning,
            },
            "notes": self.plan.notes,
        }

    def _kind_dict(self, kind: str) -> dict[str, Any]:
        phases = {name: s for name, s in zip(PHASES, self.timeline.phase_s(kind), strict=True) if s.any()}
        row: dict[str, Any] = {
            "num_layers": self.cost.model.num_layers_of(kind),
            "rank_mean_s": {name: float(s.mean()) for name, s in phases.items()},
            "rank_max_s": {name: float(s.max()) for name, s in phases.items()},
            "rank_mean_hidden_s": float(self.timeline.rank_hidden_s(kind).mean()),
        }
        sent = self.sent(kind)
        if sent is not None:
            row |= {
                "fast_bytes": sent.fast_bytes,
                "slow_bytes": sent.slow_bytes,
                "rank_fast_bytes": sent.rank_fast_bytes.tolist(),
                "rank_slow_bytes": sent.rank_slow_bytes.tolist(),
                "rank_calls": sent.calls.tolist(),
            }
        return row


def simulate(plan: StepPlan, cluster: ClusterSpec, model: ModelSpec, element_bytes: int | None = None) -> Simulation:
    """Predict a plan's step; `element_bytes` overrides the cluster's. The timeline lasts `prediction.seconds`."""
    cost = CostModel(cluster=cluster, model=model, element_bytes=element_bytes)
    return Simulation(
        plan=plan,
        cost=cost,
        prediction=cost.predict(plan),
        timeline=build_timeline(plan, cost),
        memory=predict_memory(plan, cluster, model, element_bytes),
    )
