"""The figures of each strategy over steps: mean seconds, saving with a confidence interval, MFU, gap, worst step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from layerwise.cost import Floats
from layerwise.evaluate.steps import BASELINE, StepResult

IDEAL = "ideal"
CONFIDENCE_PCT = 95.0
_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One strategy over some steps; percentages are 0 to 100, and savings are those of the baseline's seconds.

    step_s: mean. saving_pct: of the mean. saving_ci_pct: its 95% bootstrap interval, over pairs of steps; None where
    there is one step.
    mfu: model FLOPs of the steps over what the ranks could do in their seconds. mfu_points: above the baseline's.
    gap_to_ideal_pct: seconds above those of the ideal, in percent of the ideal's.
    worst_step_saving_pct: of the step where the strategy does worst; negative where it is slower than the baseline.
    fallback_share: wide parents left wide, of those that could be repacked; 0 where there are none.
    """

    step_s: float
    saving_pct: float
    saving_ci_pct: tuple[float, float] | None
    mfu: float
    mfu_points: float
    gap_to_ideal_pct: float
    worst_step_saving_pct: float
    fallback_share: float


Rows = dict[str, Figures]


def strategy_rows(steps: Sequence[StepResult], seed: int = 0) -> Rows:
    """The figures of every strategy, and of the ideal last; {} without steps."""
    if not steps:
        return {}
    step_s = {name: column(steps, name, "step_s") for name in steps[0].strategies}
    step_s[IDEAL] = column(steps, BASELINE, "ideal_s")
    return {name: _figures(steps, name, seconds, step_s, seed) for name, seconds in step_s.items()}


def column(steps: Sequence[StepResult], name: str, field: str) -> Floats:
    """One number of a strategy in every step, float64 [steps]."""
    return np.array([getattr(step.strategies[name], field) for step in steps], dtype=np.float64)


def savings_pct(steps: Sequence[StepResult], name: str) -> Floats:
    """What a strategy, or the ideal, saves in each step, float64 [steps]."""
    seconds = column(steps, BASELINE, "ideal_s") if name == IDEAL else column(steps, name, "step_s")
    return 100 * (1 - seconds / column(steps, BASELINE, "step_s"))


def _figures(steps: Sequence[StepResult], name: str, seconds: Floats, step_s: dict[str, Floats], seed: int) -> Figures:
    base = step_s[BASELINE]
    # Model FLOPs over those of all ranks at their peak: seconds of a machine that computes nothing else.
    peak_s = float((column(steps, BASELINE, "mfu") * base).sum())
    parents, fallbacks = (
        0.0 if name == IDEAL else column(steps, name, field).sum() for field in ("parents", "fallbacks")
    )
    return Figures(
        step_s=float(seconds.mean()),
        saving_pct=_saving_pct(base, seconds),
        saving_ci_pct=_interval_pct(base, seconds, seed),
        mfu=peak_s / float(seconds.sum()),
        mfu_points=100 * peak_s * float(1 / seconds.sum() - 1 / base.sum()),
        gap_to_ideal_pct=100 * (float(seconds.sum() / step_s[IDEAL].sum()) - 1),
        worst_step_saving_pct=float(100 * (1 - seconds / base).min()),
        fallback_share=float(fallbacks / parents) if parents else 0.0,
    )


def _saving_pct(base: Floats, seconds: Floats) -> float:
    return 100 * (1 - float(seconds.sum() / base.sum()))


def _interval_pct(base: Floats, seconds: Floats, seed: int) -> tuple[float, float] | None:
    """Percentile bootstrap: steps drawn with replacement, each with its baseline."""
    if len(base) == 1:
        return None
    drawn = np.random.default_rng(seed).integers(len(base), size=(_RESAMPLES, len(base)))
    savings = 100 * (1 - seconds[drawn].sum(axis=1) / base[drawn].sum(axis=1))
    outside = (100 - CONFIDENCE_PCT) / 2
    low, high = np.percentile(savings, [outside, 100 - outside]).tolist()
    return low, high


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The rows over the steps with wide parents, {} where there are none, and over all steps."""

    num_steps: int
    wide_steps: int
    wide: Rows
    all: Rows

    def to_json(self) -> dict[str, Any]:
        """`wide` of a strategy is null where no step has wide parents."""
        return {
            "num_steps": self.num_steps,
            "wide_steps": self.wide_steps,
            "strategies": {
                name: {"wide": asdict(self.wide[name]) if self.wide else None, "all": asdict(figures)}
                for name, figures in self.all.items()
            },
        }


def evaluate(steps: Sequence[StepResult], seed: int = 0) -> Evaluation:
    """Figures over all steps and over the wide ones; `seed` draws the bootstrap's resamples."""
    wide = [step for step in steps if step.wide]
    return Evaluation(
        num_steps=len(steps),
        wide_steps=len(wide),
        wide=strategy_rows(wide, seed),
        all=strategy_rows(steps, seed),
    )


COLUMNS = ("step s", "saved %", "95% interval", "MFU %", "MFU pts", "over ideal %", "worst saved %", "left wide %")


def cells(figures: Figures) -> list[str]:
    """The figures as text, in the order of COLUMNS."""
    interval = figures.saving_ci_pct
    return [
        f"{figures.step_s:#.4g}",
        f"{figures.saving_pct:.2f}",
        f"[{interval[0]:.2f}, {interval[1]:.2f}]" if interval else "-",
        f"{100 * figures.mfu:.2f}",
        f"{figures.mfu_points:+.2f}",
        f"{figures.gap_to_ideal_pct:.2f}",
        f"{figures.worst_step_saving_pct:.2f}",
        f"{100 * figures.fallback_share:.0f}",
    ]


def headings(evaluation: Evaluation) -> list[tuple[str, Rows]]:
    """The two tables with their titles; the first is left out where it is empty."""
    wide = f"Steps where {BASELINE} has parents wider than a node: {evaluation.wide_steps}"
    tables = [(wide, evaluation.wide), (f"All steps: {evaluation.num_steps}", evaluation.all)]
    return [(title, rows) for title, rows in tables if rows]


def narrow_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for 80 columns: headings break at spaces, all but the first column keep their cells whole."""
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    for index, name in enumerate(columns):
        shortest = max((len(row[index]) for row in rows), default=0) if index else None
        heading = name.replace(" ", "\n").replace("+", "\n+")
        table.add_column(heading, justify="right" if index else "left", vertical="bottom", min_width=shortest)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    return table


def render(evaluation: Evaluation, console: Console) -> None:
    """Print both tables."""
    for title, rows in headings(evaluation):
        console.print(narrow_table(title, ["strategy", *COLUMNS], [[name, *cells(f)] for name, f in rows.items()]))
        console.print()
    if not evaluation.wide:
        console.print(f"Under {BASELINE} no step has a parent wider than a node.")
