"""static: every sample on a group of sp_degree ranks, the same for all layers (what most trainers do)."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from layerwise.errors import SpecError
from layerwise.plan import MicrobatchPlan
from layerwise.planners.estimate import GroupClass
from layerwise.planners.grouping import group_samples
from layerwise.planners.layout import lay_out
from layerwise.planners.packing import split_parts
from layerwise.planners.partitions import tile_cluster
from layerwise.planners.problem import StepProblem
from layerwise.spec import ClusterSpec, Record
from layerwise.spec.records import divisors


class StaticOptions(Record):
    """sp_degree: ranks that share each sample; None means the ranks of one node."""

    sp_degree: int | None = Field(default=None, ge=1)

    def check(self, cluster: ClusterSpec) -> None:
        """Raise SpecError unless groups of sp_degree ranks fill the cluster and align with its nodes."""
        node = cluster.ranks_per_node
        legal = [k for k in divisors(cluster.num_ranks) if node % k == 0 or k % node == 0]
        if self.sp_degree is not None and self.sp_degree not in legal:
            raise SpecError(
                f"sp_degree={self.sp_degree} must divide the {cluster.num_ranks} ranks, and divide or be a "
                f"multiple of ranks_per_node={node}; legal values: {legal}"
            )


def plan_static(problem: StepProblem, options: StaticOptions) -> tuple[MicrobatchPlan, ...]:
    """Samples balanced over equal groups by predicted seconds, in as few micro-batches as fit the budget."""
    degree = options.sp_degree or problem.cluster.ranks_per_node
    problem.check_fits(degree, "raise sp_degree")
    for num_microbatches in range(problem.fewest_microbatches, len(problem.lengths) + 1):
        ways = (False, True) if num_microbatches > 1 else (True,)
        plans = [_try_split(problem, degree, num_microbatches, together) for together in ways]
        found = [plan for plan in plans if plan is not None]
        if len(found) == 1:
            return found[0]
        if found:
            return min(found, key=problem.predicted_s)
    raise AssertionError("one sample per micro-batch always fits")


def _try_split(
    problem: StepProblem, degree: int, num_microbatches: int, longest_together: bool
) -> tuple[MicrobatchPlan, ...] | None:
    capacity = problem.cluster.num_ranks * problem.max_tokens_per_rank
    part_of = split_parts(
        problem.lengths, problem.work_s, num_microbatches, capacity, longest_together=longest_together
    )
    if part_of is None:
        return None
    microbatches = []
    num_ranks = problem.cluster.num_ranks
    partition = tile_cluster((degree,) * (num_ranks // degree), num_ranks, problem.cluster.ranks_per_node)
    for part in range(num_microbatches):
        samples = np.flatnonzero(part_of == part)
        found = group_samples(problem, samples, [partition], GroupClass) if len(samples) else []
        if not found:
            return None
        microbatches.append(lay_out(problem.lengths, problem.cost.attention, found[0].parents()))
    return tuple(microbatches)
