"""Medians and spreads of what was measured, and the figures that it is to reach."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from benchmarks.evaluate.figures import Check
from benchmarks.two_hosts.records import Predicted, Results, Run, Variant
from layerwise.cost import Floats
from layerwise.runtime import MOVES
from layerwise.spec import FULL

BASELINE = "dynamic"
RATIO_PCT, BYTES_PCT, PREDICTION_PCT = 5.0, 2.0, 10.0
SPARSE_SHARE = 0.2
# What "visibly slower" is, in percent of the step.
VISIBLE_PCT = 1.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Measured:
    """One variant; every property is of a step, the mean over the steps, or the median over repetitions of that."""

    variant: Variant
    runs: list[Run]
    predicted: list[Predicted]
    overhead_bytes: float

    @cached_property
    def seconds(self) -> Floats:
        """Of a step in each repetition, float64 [repetitions]."""
        return self._by_repetition([run.step_s for run in self.runs])

    @property
    def step_s(self) -> float:
        """Of a step."""
        return float(np.median(self.seconds))

    @property
    def predicted_s(self) -> float:
        """What the cost model says of a step."""
        return float(np.mean([p.step_s for p in self.predicted]))

    @property
    def error_pct(self) -> float:
        """How much longer a step took than predicted."""
        return 100 * (self.step_s / self.predicted_s - 1)

    @property
    def mfu(self) -> float:
        """Model FLOPs of paced compute over what the paced accelerators could do in the measured time."""
        return float(np.mean([p.mfu * p.step_s for p in self.predicted])) / self.step_s

    @property
    def kinds(self) -> list[str]:
        """Layer kinds, and moves where there are any, that exchange anything."""
        return sorted({kind for run in self.runs for kind in run.exchange_s})

    def transfer_s(self, kind: str) -> tuple[float, float]:
        """Seconds of waiting in the all-to-alls of a kind since their last rank had come: slowest rank, mean rank."""
        return self._over_ranks(
            [np.subtract(run.exchange_s.get(kind, 0), run.wait_s.get(kind, 0)) for run in self.runs]
        )

    def wait_s(self, kind: str) -> tuple[float, float]:
        """Seconds of waiting in the all-to-alls of a kind before their last rank had come: slowest rank, mean rank."""
        return self._over_ranks([np.asarray(run.wait_s.get(kind, 0)) for run in self.runs])

    def predicted_exchange_s(self, kind: str) -> float:
        """What the cost model says of the slowest rank's exchanges."""
        return float(np.mean([p.exchange_s.get(kind, 0.0) for p in self.predicted]))

    @property
    def counted_bytes(self) -> float:
        """Between hosts, by the runtime's own count."""
        return float(np.mean([run.counted_bytes for run in self.runs]))

    @property
    def interface_bytes(self) -> float:
        """Between hosts, by the interfaces' counters, without headers of packets and gloo's own bytes per message."""
        return float(np.mean([run.sent.payload_bytes - self.overhead_bytes * run.messages for run in self.runs]))

    @property
    def bytes_error_pct(self) -> float:
        """By how much the interfaces' count exceeds ours; 0 where nothing is to cross."""
        return 100 * (self.interface_bytes / self.counted_bytes - 1) if self.counted_bytes else 0.0

    def _over_ranks(self, values: list[Floats]) -> tuple[float, float]:
        parts = [self._by_repetition([float(pick(v)) for v in values]) for pick in (np.max, np.mean)]
        return float(np.median(parts[0])), float(np.median(parts[1]))

    def _by_repetition(self, values: list[float]) -> Floats:
        repetitions = np.array([run.repetition for run in self.runs])
        return np.array([np.mean(np.array(values)[repetitions == r]) for r in np.unique(repetitions)])


def summarize(results: Results) -> dict[str, Measured]:
    """The measurements by the variant's name."""
    return {
        variant.name: Measured(
            variant=variant,
            runs=[run for run in results.runs if run.strategy == variant.name],
            predicted=[p for p in results.predicted if p.strategy == variant.name],
            overhead_bytes=results.message_overhead_bytes,
        )
        for variant in results.settings.variants
    }


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Percent of the steps of `of` that `by` saves: median and quartiles over repetitions, and as predicted."""

    pct: float
    low_pct: float
    high_pct: float
    predicted_pct: float


def saving(measured: dict[str, Measured], by: str, of: str) -> Saving:
    """A repetition measures both within minutes, so their quotient there is what counts."""
    fast, slow = measured[by], measured[of]
    low, middle, high = np.percentile(100 * (1 - fast.seconds / slow.seconds), [25, 50, 75]).tolist()
    return Saving(pct=middle, low_pct=low, high_pct=high, predicted_pct=100 * (1 - fast.predicted_s / slow.predicted_s))


def sparse_transfer_s(measured: Measured) -> float:
    """Seconds of the slowest rank in the exchanges of all layers without full attention."""
    return sum(measured.transfer_s(kind)[0] for kind in measured.kinds if kind not in (FULL, MOVES))


def check_figures(results: Results) -> list[Check]:
    """The figures to reach, as far as their strategies were measured."""
    measured, ratio = summarize(results), results.settings.ratio
    checks = [
        Check(
            name="fast link / slow link",
            measured=results.links.ratio,
            at_least=ratio * (1 - RATIO_PCT / 100),
            at_most=ratio * (1 + RATIO_PCT / 100),
        )
    ]
    if {BASELINE, "repack"} <= measured.keys():
        share = sparse_transfer_s(measured["repack"]) / sparse_transfer_s(measured[BASELINE])
        checks.append(Check(name="sparse exchange, repack / dynamic", measured=share, at_most=SPARSE_SHARE))
    if {"repack", "redistribute"} <= measured.keys():
        pct = saving(measured, "repack", "redistribute").pct
        checks.append(Check(name="repack saves over redistribute, %", measured=pct, at_least=VISIBLE_PCT))
    if {BASELINE, "repack+parents"} <= measured.keys():
        found = saving(measured, "repack+parents", BASELINE)
        # Predicted, or as near as the spread of the repetitions lets one see.
        least = found.predicted_pct - (found.high_pct - found.low_pct) / 2
        checks.append(Check(name="repack+parents saves over dynamic, %", measured=found.pct, at_least=least))
    if {"repack+parents", "joint"} <= measured.keys():
        pct = saving(measured, "joint", "repack+parents").pct
        checks.append(Check(name="joint saves over repack+parents, %", measured=pct, at_least=0.0))
    for name, row in measured.items():
        if row.variant.overlap_parts > 1:
            found = saving(measured, name, row.variant.strategy)
            least = -(found.high_pct - found.low_pct) / 2
            checks.append(Check(name=f"{name}: saves over none, %", measured=found.pct, at_least=least))
    limits = {"at_least": -PREDICTION_PCT, "at_most": PREDICTION_PCT}
    for name, row in measured.items():
        checks.append(Check(name=f"{name}: step beyond predicted, %", measured=row.error_pct, **limits))
    for name, row in measured.items():
        if row.counted_bytes:
            limits = {"at_least": -BYTES_PCT, "at_most": BYTES_PCT}
            checks.append(Check(name=f"{name}: interface bytes beyond ours, %", measured=row.bytes_error_pct, **limits))
    return checks
