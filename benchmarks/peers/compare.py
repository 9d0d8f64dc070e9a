"""Run every planner on the same steps and add up where each wins."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.peers.task import Peer, Task
from layerwise.plan import StepPlan
from layerwise.planners import plan_step

BASE = "dynamic"
# Steps closer than this are a draw.
DRAW = 1e-3


class Outcome(NamedTuple):
    """What one planner made of one step."""

    step_s: float
    planning_ms: float
    fullest: float
    microbatches: int


@dataclass(frozen=True, kw_only=True)
class Row:
    """One planner on the steps of one source, beside our `dynamic`.

    relative: mean of predicted step seconds over those of `dynamic`; best and worst: the same of single steps.
    planning_ms: median CPU milliseconds of one step. fullest: tokens of the fullest rank over the budget, at most.
    won, lost: steps that are faster and slower than with `dynamic` by more than 0.1%. failed: steps without a plan,
    which the other figures leave out.
    """

    source: str
    peer: str
    steps: int
    relative: float
    best: float
    worst: float
    planning_ms: float
    fullest: float
    microbatches: float
    won: int
    lost: int
    failed: int


def ours(strategy: str) -> Peer:
    """One of our own strategies as a peer."""

    def plan(task: Task) -> StepPlan:
        return plan_step(
            task.lengths,
            cluster=task.cost.cluster,
            model=task.cost.model,
            strategy=strategy,
            max_tokens_per_rank=task.max_tokens_per_rank,
        )

    return Peer(strategy, plan)


def compare(
    source: str, tasks: Iterable[Task], peers: Sequence[Peer], advance: Callable[[], None] = lambda: None
) -> list[Row]:
    """One row for each peer, the first of which is our `dynamic`; `advance` is called after each step."""
    outcomes: list[list[Outcome | None]] = []
    for task in tasks:
        outcomes.append([_outcome(task, peer) for peer in peers])
        advance()
    base = [step[0] for step in outcomes]
    return [_row(source, peer.name, base, [step[i] for step in outcomes]) for i, peer in enumerate(peers)]


def _outcome(task: Task, peer: Peer) -> Outcome | None:
    started = time.process_time()
    plan = peer.plan(task)
    planning_ms = 1e3 * (time.process_time() - started)
    if plan is None:
        return None
    prediction = task.cost.predict(plan)
    return Outcome(
        step_s=prediction.seconds,
        planning_ms=planning_ms,
        fullest=float(prediction.tokens_per_rank.max()) / task.max_tokens_per_rank,
        microbatches=len(plan.microbatches),
    )


def _row(source: str, name: str, base: list[Outcome | None], own: list[Outcome | None]) -> Row:
    pairs = [(b, o) for b, o in zip(base, own, strict=True) if b is not None and o is not None]
    relative = np.array([o.step_s / b.step_s for b, o in pairs]) if pairs else np.array([np.nan])
    found = [o for _, o in pairs]
    return Row(
        source=source,
        peer=name,
        steps=len(own),
        relative=float(relative.mean()),
        best=float(relative.min()),
        worst=float(relative.max()),
        planning_ms=float(np.median([o.planning_ms for o in found])) if found else float("nan"),
        fullest=max((o.fullest for o in found), default=float("nan")),
        microbatches=float(np.mean([o.microbatches for o in found])) if found else float("nan"),
        won=int((relative < 1 - DRAW).sum()),
        lost=int((relative > 1 + DRAW).sum()),
        failed=len(own) - len(found),
    )
