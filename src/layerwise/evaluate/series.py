"""What the pictures of an evaluation show, as plain numbers: one source for interactive pictures and for files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.cost import Floats
from layerwise.evaluate.gaps import HEAD, MOVES, mean_gap
from layerwise.evaluate.sensitivity import REPACKING, VariantResult
from layerwise.evaluate.steps import BASELINE, StepResult
from layerwise.evaluate.table import IDEAL, savings_pct
from layerwise.labels import kind_label
from layerwise.plan import Ints
from layerwise.report.plots import INK
from layerwise.report.plots import colours_of as run_colours

_LABELS = {HEAD: "LM head", MOVES: "moves between layers"}
PART_COLOURS = {"imbalance": "#64a3d1", "exchange": "#d9682b", "exposed traffic": "#8a94a0"}


def strategy_colours(steps: Sequence[StepResult]) -> dict[str, str]:
    """The colour of every strategy, the same in every picture of the project, and of the ideal."""
    return colours_of(list(steps[0].strategies))


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """As `strategy_colours`, for names."""
    return {**run_colours({name: [] for name in names}), IDEAL: INK}


def gain_series(steps: Sequence[StepResult]) -> dict[str, Floats]:
    """Saving of every strategy but the baseline, and of the ideal, in percent of each step: float64 [steps]."""
    names = [name for name in steps[0].strategies if name != BASELINE]
    return {name: savings_pct(steps, name) for name in [*names, IDEAL]}


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenPanel:
    """Tokens of a strategy in one step, int64 [micro-batches, ranks]."""

    strategy: str
    title: str
    tokens: Ints


def token_panels(steps: Sequence[StepResult]) -> list[TokenPanel]:
    """The baseline and each repacking strategy, in the step where one of these saves the most."""
    names = [name for name in steps[0].strategies if name in REPACKING]
    best = np.max([savings_pct(steps, name) for name in names], axis=0) if names else np.zeros(len(steps))
    index = int(best.argmax())
    panels = []
    for name in [BASELINE, *names]:
        tokens = steps[index].strategies[name].tokens_per_rank
        fullest = float(tokens.max(axis=1).sum() / tokens.mean(axis=1).sum())
        title = f"{name}: step {index}, fullest rank over mean {fullest:.3f}"
        panels.append(TokenPanel(strategy=name, title=title, tokens=tokens))
    return panels


@dataclass(frozen=True, kw_only=True, eq=False)
class GapBar:
    """Mean seconds above the ideal of one strategy in the layers of one kind, by part."""

    kind: str
    strategy: str
    parts_s: dict[str, float]


def gap_bars(steps: Sequence[StepResult]) -> list[GapBar]:
    """A bar per layer kind and strategy; kinds without any gap are left out."""
    bars = []
    for kind in steps[0].strategies[BASELINE].gaps:
        for name in steps[0].strategies:
            gap = mean_gap([step.strategies[name].gaps[kind] for step in steps])
            parts = zip(PART_COLOURS, (gap.imbalance_s, gap.exchange_s, gap.exposed_s), strict=True)
            bars.append(GapBar(kind=_LABELS.get(kind) or kind_label(kind), strategy=name, parts_s=dict(parts)))
    shown = {bar.kind for bar in bars if any(bar.parts_s.values())}
    return [bar for bar in bars if bar.kind in shown]


@dataclass(frozen=True, kw_only=True, eq=False)
class AxisPanel:
    """Savings in percent along the values of one setting, by strategy."""

    values: list[str]
    savings_pct: dict[str, list[float]]
    colours: dict[str, str]


def by_axis(results: Sequence[VariantResult]) -> dict[str, AxisPanel]:
    """A panel per setting, in the order given."""
    panels = {}
    for axis in dict.fromkeys(result.axis for result in results):
        on_axis = [result for result in results if result.axis == axis]
        names = [name for name in on_axis[0].evaluation.all if name != BASELINE]
        panels[axis] = AxisPanel(
            values=[result.value for result in on_axis],
            savings_pct={name: [r.evaluation.all[name].saving_pct for r in on_axis] for name in names},
            colours=colours_of(names),
        )
    return panels
