"""A workload of seconds, and results with known numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from layerwise.evaluate.gaps import Gap
from layerwise.evaluate.steps import StepResult, StrategyStep
from layerwise.evaluate.workload import Workload
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL


def small_workload(**settings: Any) -> Workload:
    """16 ranks on two nodes; short samples, and long ones that do not fit into one node."""
    base: dict[str, Any] = {
        "name": "small",
        "cluster": WIDE_CLUSTER.model_dump(),
        "model": WIDE_MODEL.model_dump(),
        "max_tokens_per_rank": 2560,
        "num_steps": 4,
        "cap_tokens": 30000,
        "mixture": {"short": 0.4, "long": 0.6},
        "lengths": {"short": narrow(200), "long": narrow(24000)},
    }
    return Workload(**base | settings)


def narrow(median_tokens: float) -> dict[str, float]:
    """Lengths close to one value."""
    return {"median_tokens": median_tokens, "sigma": 0.05, "tail_share": 0.01, "tail_index": 20}


def strategy_step(step_s: float, *, ideal_s: float = 6.0, mfu: float = 0.5, **notes: int) -> StrategyStep:
    return StrategyStep(
        step_s=step_s,
        ideal_s=ideal_s,
        mfu=mfu,
        slow_bytes=0,
        parents=notes.get("parents", 0),
        fallbacks=notes.get("fallbacks", 0),
        tokens_per_rank=np.array([[10, 20], [30, 10]]),
        gaps={"full_attention": Gap(ideal_s=ideal_s, imbalance_s=step_s - ideal_s, exchange_s=0.0, exposed_s=0.0)},
    )


def step_result(*, wide: bool = True, **strategies: StrategyStep) -> StepResult:
    return StepResult(num_samples=3, num_tokens=70, longest_tokens=30, wide=wide, strategies=strategies)
