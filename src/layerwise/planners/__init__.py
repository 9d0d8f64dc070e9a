"""Strategies: pure functions from sample lengths to a StepPlan; no tensor, no process, no environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from layerwise.cost import CostModel
from layerwise.errors import SpecError
from layerwise.plan import Ints, StepPlan
from layerwise.planners.dynamic import plan_dynamic
from layerwise.planners.halo import HaloOptions, plan_halo
from layerwise.planners.joint import JointOptions, plan_joint
from layerwise.planners.parents import plan_repack_parents
from layerwise.planners.problem import GroupOptions, StepProblem, check_lengths
from layerwise.planners.redistribute import plan_redistribute
from layerwise.planners.repack import Planned, RepackOptions, plan_repack
from layerwise.planners.static import StaticOptions, plan_static
from layerwise.spec import ClusterSpec, ModelSpec, record_from

# Of a sample that spans n ranks, a layer has n x n pairs of shards and tiles to plan and predict.
MAX_RANKS = 16384
MAX_TOKENS_PER_RANK = 2**31 - 1


class Strategy(NamedTuple):
    """The options that a strategy takes, and the function that makes micro-batches and notes from them."""

    options: type[StaticOptions] | type[GroupOptions]
    plan: Callable[[StepProblem, Any], Planned]


STRATEGIES: dict[str, Strategy] = {
    "static": Strategy(StaticOptions, lambda problem, options: (plan_static(problem, options), {})),
    "dynamic": Strategy(GroupOptions, lambda problem, options: (plan_dynamic(problem, options), {})),
    "halo": Strategy(HaloOptions, plan_halo),
    "redistribute": Strategy(RepackOptions, plan_redistribute),
    "repack": Strategy(RepackOptions, plan_repack),
    "repack+parents": Strategy(RepackOptions, plan_repack_parents),
    "joint": Strategy(JointOptions, plan_joint),
}


@dataclass(frozen=True, kw_only=True)
class Planner:
    """A strategy with its settings; calling it with the sample lengths of a step plans that step.

    Raises SpecError at once for an unknown strategy, an unknown option or an illegal value.
    """

    strategy: str
    cluster: ClusterSpec
    model: ModelSpec
    max_tokens_per_rank: int
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise SpecError(f"strategy={self.strategy!r} is unknown; legal values: {', '.join(STRATEGIES)}")
        if not 1 <= self.max_tokens_per_rank <= MAX_TOKENS_PER_RANK:
            raise SpecError(
                f"max_tokens_per_rank={self.max_tokens_per_rank} must be at least 1 and at most {MAX_TOKENS_PER_RANK}"
            )
        nodes, node = self.cluster.num_nodes, self.cluster.ranks_per_node
        if nodes * node > MAX_RANKS:
            raise SpecError(
                f"num_nodes={nodes} x ranks_per_node={node} = {nodes * node:,} ranks, but a step is planned for at "
                f"most {MAX_RANKS:,}; plan a part of the cluster with its share of the samples"
            )
        self._checked_options()

    def _checked_options(self) -> StaticOptions | GroupOptions:
        options = record_from(STRATEGIES[self.strategy].options, dict(self.options), f"strategy {self.strategy}")
        options.check(self.cluster)
        return options

    def __call__(self, lengths: Sequence[int] | Ints) -> StepPlan:
        """Plan one step of samples with these lengths in tokens. Raises DataError or InfeasibleError."""
        return self.plan(self.pose(lengths))

    def pose(self, lengths: Sequence[int] | Ints) -> StepProblem:
        """The problem of one step; planners that differ in nothing but strategy and options may share it."""
        return StepProblem(
            lengths=check_lengths(lengths),
            cost=CostModel(cluster=self.cluster, model=self.model),
            max_tokens_per_rank=self.max_tokens_per_rank,
        )

    def plan(self, problem: StepProblem) -> StepPlan:
        """As calling the planner, for a problem that a planner posed."""
        microbatches, notes = STRATEGIES[self.strategy].plan(problem, self._checked_options())
        plan = StepPlan(
            strategy=self.strategy,
            num_ranks=self.cluster.num_ranks,
            ranks_per_node=self.cluster.ranks_per_node,
            max_tokens_per_rank=self.max_tokens_per_rank,
            lengths=tuple(problem.lengths.tolist()),
            attention=problem.cost.attention,
            microbatches=microbatches,
            notes=notes,
            layer_types=self.model.all_layer_types,
            overlap_parts=self.cluster.overlap_parts,
        )
        plan.validate()
        return plan


def plan_step(
    lengths: Sequence[int] | Ints,
    *,
    cluster: ClusterSpec,
    model: ModelSpec,
    strategy: str,
    max_tokens_per_rank: int,
    **options: Any,
) -> StepPlan:
    """Plan one step: which rank holds which tokens and computes which attention; the plan is validated.

    lengths: tokens of each sample. options: the strategy's own, such as sp_degree for "static".
    Raises SpecError (settings), DataError (lengths) or InfeasibleError (a sample fits nowhere).
    """
    planner = Planner(
        strategy=strategy,
        cluster=cluster,
        model=model,
        max_tokens_per_rank=max_tokens_per_rank,
        options=options,
    )
    return planner(lengths)
