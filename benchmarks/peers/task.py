"""The question that every peer answers, and how its answer is judged: our CostModel on Shards and Tiles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from layerwise.cost import CostModel
from layerwise.plan import Ints, Parent, StepPlan
from layerwise.planners.estimate import GroupClass, exposed_s, group_base, group_loads
from layerwise.planners.layout import lay_out

NUM_PREDICTED = 2

# A micro-batch of a peer: disjoint groups of ranks and the samples of each.
Groups = list[Parent]


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """One step: sample lengths in tokens (int64 [samples]), and the tokens that a rank may hold at a time."""

    lengths: Ints
    cost: CostModel
    max_tokens_per_rank: int

    @property
    def num_ranks(self) -> int:
        """Ranks of the cluster."""
        return self.cost.cluster.num_ranks

    @cached_property
    def fewest_microbatches(self) -> int:
        """Micro-batches that the tokens need at least."""
        return -(-int(self.lengths.sum()) // (self.num_ranks * self.max_tokens_per_rank))

    @cached_property
    def degrees(self) -> list[int]:
        """Widths of groups that fill the cluster: powers of two."""
        return [1 << i for i in range(self.num_ranks.bit_length()) if self.num_ranks % (1 << i) == 0]

    def plan(self, microbatches: list[Groups], max_tokens_per_rank: int | None = None) -> StepPlan:
        """These groups as Shards and Tiles, checked. `max_tokens_per_rank` is for peers that keep another rule."""
        plan = StepPlan(
            strategy="peer",
            num_ranks=self.num_ranks,
            ranks_per_node=self.cost.cluster.ranks_per_node,
            max_tokens_per_rank=max_tokens_per_rank or self.max_tokens_per_rank,
            lengths=tuple(self.lengths.tolist()),
            attention=self.cost.attention,
            microbatches=tuple(lay_out(self.lengths, self.cost.attention, groups) for groups in microbatches),
        )
        plan.validate()
        return plan

    def estimate_s(self, groups: Groups) -> float:
        """Seconds of one micro-batch by the planners' closed form, thousands of times faster than the prediction."""
        degrees = sorted({group.sp_degree for group in groups})
        classes = [GroupClass(degree) for degree in degrees]
        loads, base = group_loads(self.cost, self.lengths, classes).loads, group_base(self.cost, classes)
        column = [degrees.index(group.sp_degree) for group in groups]
        heights = [base[:, c] + loads[:, list(g.samples), c].sum(axis=1) for g, c in zip(groups, column, strict=True)]
        samples = [sample for group in groups for sample in group.samples]
        return float(np.max(heights, axis=0).sum()) + exposed_s(self.cost, self.lengths[samples])

    def fastest(self, answers: list[list[Groups]], max_tokens_per_rank: int | None = None) -> StepPlan | None:
        """The answer with the least predicted seconds, of the NUM_PREDICTED with the least estimate; None of none."""
        answers = sorted(answers, key=lambda microbatches: sum(map(self.estimate_s, microbatches)))[:NUM_PREDICTED]
        plans = [self.plan(microbatches, max_tokens_per_rank) for microbatches in answers]
        return min(plans, key=self.seconds, default=None)

    def seconds(self, plan: StepPlan) -> float:
        """Predicted seconds of the step."""
        return self.cost.predict(plan).seconds


class Peer(NamedTuple):
    """A planner: its name in tables and what it answers; None where it finds no plan."""

    name: str
    plan: Callable[[Task], StepPlan | None]


def parents_from(first_rank_of: list[tuple[int, int]], members: list[list[int]]) -> Groups:
    """Groups (first rank, degree) with their samples; groups without samples are left out."""
    return [
        Parent(first_rank=first, sp_degree=degree, samples=tuple(samples))
        for (first, degree), samples in zip(first_rank_of, members, strict=True)
        if samples
    ]
