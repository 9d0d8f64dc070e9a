"""The figures that the workload of the paper is to reach, and whether an evaluation reaches them."""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.evaluate.sensitivity import REPACKING
from layerwise.evaluate.steps import BASELINE
from layerwise.evaluate.table import IDEAL, Evaluation, Rows

# The paper: 22 of 200 steps; saves 5.95% and 3.75 points, with the parent solver 7.61% and 4.83; so an MFU near 59%.
WIDE_STEPS = (17, 27)
BASELINE_MFU_PCT = (57.5, 60.5)
SAVINGS_PCT = {"repack": 5.95, "repack+parents": 7.61}
MFU_POINTS = {"repack": 3.75, "repack+parents": 4.83}
# Beyond the paper: joint over repack+parents, and over the ideal.
JOINT_OVER_PARENTS = 1.5
JOINT_OVER_IDEAL = 0.8
BUDGET_S = 300.0
ROUNDING_PCT = 1e-6


@dataclass(frozen=True, kw_only=True)
class Check:
    """One figure: `measured` is to lie in [at_least, at_most]; None measured where the strategy is missing."""

    name: str
    measured: float | None
    at_least: float = -float("inf")
    at_most: float = float("inf")

    @property
    def reached(self) -> bool:
        """Whether the figure is there and within its limits."""
        return self.measured is not None and self.at_least <= self.measured <= self.at_most

    @property
    def limits(self) -> str:
        """The limits for people."""
        if self.at_most == float("inf"):
            return f">= {self.at_least:g}"
        return f"<= {self.at_most:g}" if self.at_least == -float("inf") else f"{self.at_least:g} to {self.at_most:g}"


def check_figures(evaluation: Evaluation, elapsed_s: float) -> list[Check]:
    """Every figure of the paper's table; `elapsed_s` are the seconds of the whole command."""
    wide = evaluation.wide
    checks = [
        Check(
            name="steps with wide parents",
            measured=evaluation.wide_steps,
            at_least=WIDE_STEPS[0],
            at_most=WIDE_STEPS[1],
        ),
        Check(
            name=f"MFU of {BASELINE}, %",
            measured=100 * wide[BASELINE].mfu if wide else None,
            at_least=BASELINE_MFU_PCT[0],
            at_most=BASELINE_MFU_PCT[1],
        ),
    ]
    for name, saving_pct in SAVINGS_PCT.items():
        checks.append(Check(name=f"{name} saves, %", measured=_figure(wide, name, "saving_pct"), at_least=saving_pct))
        points = _figure(wide, name, "mfu_points")
        checks.append(Check(name=f"{name} raises MFU, points", measured=points, at_least=MFU_POINTS[name]))
    joint = _figure(wide, "joint", "saving_pct")
    for name, share in (("repack+parents", JOINT_OVER_PARENTS), (IDEAL, JOINT_OVER_IDEAL)):
        other = _figure(wide, name, "saving_pct")
        ratio = joint / other if joint is not None and other else None
        checks.append(Check(name=f"saving of joint / saving of {name}", measured=ratio, at_least=share))
    for name in REPACKING:
        worst = _figure(evaluation.all, name, "worst_step_saving_pct")
        checks.append(Check(name=f"{name}, worst step saves, %", measured=worst, at_least=-ROUNDING_PCT))
    return [*checks, Check(name="seconds", measured=elapsed_s, at_most=BUDGET_S)]


def _figure(rows: Rows, strategy: str, field: str) -> float | None:
    return float(getattr(rows[strategy], field)) if strategy in rows else None
