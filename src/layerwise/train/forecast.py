"""What the cost model says of each step's plan, and of `dynamic` in its place; made on the thread that plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from layerwise.errors import InfeasibleError
from layerwise.plan import StepPlan
from layerwise.planners import STRATEGIES, Planner
from layerwise.planners.problem import StepProblem

BASELINE = "dynamic"


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted seconds of a step, and of the same step under `dynamic`: None where that cannot place it.

    took_s: what the forecast itself took, on the thread that plans.
    """

    step_s: float
    dynamic_s: float | None
    took_s: float

    @property
    def saving(self) -> float | None:
        """The share of `dynamic`'s step that the plan saves; below 0 where it is slower."""
        return None if self.dynamic_s is None else 1 - self.step_s / self.dynamic_s


class Forecaster:
    """A planner that also makes a forecast of each plan; `of` gives them in the order of the plans."""

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        known = STRATEGIES[BASELINE].options.model_fields
        options = {key: value for key, value in planner.options.items() if key in known}
        self._baseline = replace(planner, strategy=BASELINE, options=options)
        self._made: deque[tuple[StepPlan, Forecast]] = deque()

    def __call__(self, lengths: Sequence[int]) -> StepPlan:
        """As calling the planner."""
        problem = self._planner.pose(lengths)
        plan = self._planner.plan(problem)
        begin_s = perf_counter()
        step_s = problem.cost.predict(plan).seconds
        dynamic_s = step_s if self._planner.strategy == BASELINE else self._baseline_s(problem)
        self._made.append((plan, Forecast(step_s=step_s, dynamic_s=dynamic_s, took_s=perf_counter() - begin_s)))
        return plan

    def _baseline_s(self, problem: StepProblem) -> float | None:
        try:
            return problem.cost.predict(self._baseline.plan(problem)).seconds
        except InfeasibleError:
            return None

    def of(self, plan: StepPlan) -> Forecast:
        """The forecast of the oldest plan that was not asked for yet, which must be this one."""
        made, forecast = self._made.popleft()
        assert made is plan, "plans are used in the order in which they are made"
        return forecast
