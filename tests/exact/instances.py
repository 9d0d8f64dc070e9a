"""Small random planning problems: few ranks, few samples, long-tailed lengths; a seed names each one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from layerwise.cost import CostModel
from layerwise.plan import StepPlan
from layerwise.planners import Planner, plan_step
from layerwise.planners.problem import StepProblem
from layerwise.spec import ClusterSpec, ModelSpec
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL

# Shares of the ranks' token budget that a step fills; a full one makes the packing hard.
LOOSE_FILL, TIGHT_FILL = (0.3, 0.6), (0.88, 0.99)


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """One step to plan; `seed` and `nodes` make it again."""

    seed: int
    lengths: tuple[int, ...]
    cluster: ClusterSpec
    model: ModelSpec
    budget: int

    def __repr__(self) -> str:
        cluster = self.cluster
        return (
            f"seed={self.seed} {cluster.num_nodes}x{cluster.ranks_per_node} sync={cluster.sync} "
            f"latency_s={cluster.message_latency_s:g} budget={self.budget} lengths={list(self.lengths)}"
        )

    @cached_property
    def cost(self) -> CostModel:
        """What judges every plan."""
        return CostModel(cluster=self.cluster, model=self.model)

    def pose(self) -> StepProblem:
        """The problem that every strategy answers."""
        return Planner(strategy="repack", cluster=self.cluster, model=self.model, max_tokens_per_rank=self.budget).pose(
            self.lengths
        )

    def plan(self, strategy: str, **options: object) -> StepPlan:
        """What the package answers."""
        return plan_step(
            self.lengths,
            cluster=self.cluster,
            model=self.model,
            strategy=strategy,
            max_tokens_per_rank=self.budget,
            **options,
        )


def random_instance(seed: int, nodes: tuple[tuple[int, int], ...]) -> Instance:
    """The instance of this seed on one of `nodes` (number of nodes, ranks of each).

    Seeds alternate between both kinds of sync, latency on and off, and loose and tight budgets. The rates are those at
    which samples of thousands of tokens are worth wide groups, and the slow link and the messages hurt.
    """
    rng = np.random.default_rng(seed)
    num_nodes, ranks_per_node = nodes[int(rng.integers(len(nodes)))]
    cluster = WIDE_CLUSTER.model_copy(
        update={
            "num_nodes": num_nodes,
            "ranks_per_node": ranks_per_node,
            "sync": ("layer", "step")[seed % 2],
            "message_latency_s": (0.0, 1e-3)[seed // 2 % 2],
        }
    )
    num_samples = int(rng.integers(4, 10))
    lengths = np.exp(rng.normal(6.5, 1.1, num_samples)).astype(np.int64) + 1
    fill = rng.uniform(*(TIGHT_FILL if seed // 4 % 2 else LOOSE_FILL))
    budget = int(np.ceil(lengths.sum() / (fill * cluster.num_ranks)))
    return Instance(seed=seed, lengths=tuple(lengths.tolist()), cluster=cluster, model=WIDE_MODEL, budget=budget)
