"""The question that every strategy answers, and the sizes of groups that answers are made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar, cast

import numpy as np
from pydantic import Field

from layerwise.cost import CostModel
from layerwise.errors import DataError, InfeasibleError, SpecError
from layerwise.plan import Ints, MicrobatchPlan
from layerwise.spec import ClusterSpec, Record

AnswerT = TypeVar("AnswerT")
# So few samples that every candidate can be predicted, and so many that trying one more takes long.
HANDFUL, MANY_SAMPLES = 12, 2000


class GroupOptions(Record):
    """Options of the strategies that choose the width of their groups.

    max_sp_degree: the widest group allowed; None allows all ranks.
    """

    max_sp_degree: int | None = Field(default=None, ge=1)

    def check(self, cluster: ClusterSpec) -> None:
        """Raise SpecError unless the cluster can form groups of max_sp_degree ranks."""
        legal = degree_ladder(cluster)
        if self.max_sp_degree is not None and self.max_sp_degree not in legal:
            raise SpecError(
                f"max_sp_degree={self.max_sp_degree}: groups are powers of two inside a node of "
                f"{cluster.ranks_per_node} ranks, or whole nodes; legal on {cluster.num_ranks} ranks: {legal}"
            )


@dataclass(frozen=True, kw_only=True, eq=False)
class StepProblem:
    """Sample lengths in tokens (int64 [samples]), the cost model, and a rank's tokens per micro-batch.

    What several strategies ask of the same step is worked out once and kept in `known`.
    """

    lengths: Ints
    cost: CostModel
    max_tokens_per_rank: int
    known: dict[Any, Any] = field(default_factory=dict, repr=False)

    def once(self, question: Any, answer: Callable[[], AnswerT]) -> AnswerT:
        """`answer()`, or what it was when the same question about this step was asked before."""
        if question not in self.known:
            self.known[question] = answer()
        return cast(AnswerT, self.known[question])

    @property
    def cluster(self) -> ClusterSpec:
        """The cluster planned for."""
        return self.cost.cluster

    @cached_property
    def work_s(self) -> np.ndarray:
        """Seconds of each sample on one rank, all layers, no communication: float64 [samples]."""
        seconds = self.cost.head_token_s * self.lengths
        for layer in self.cost.layers:
            seconds = seconds + layer.num_layers * (layer.token_s * self.lengths + layer.sample_s(self.lengths))
        return np.asarray(seconds)

    def predicted_s(self, microbatches: Sequence[MicrobatchPlan]) -> float:
        """Predicted seconds of the step in these micro-batches."""
        return self.cost.step_s([self.cost.time_microbatch(microbatch) for microbatch in microbatches])

    def estimates_are_bounds(self, degrees: Ints) -> bool:
        """Whether predictions are no less than the estimates of groups of these degrees.

        Estimates do not know what attention hides of exchanges, nor which rank gets the larger share where heads do not
        divide; and in a group wider than the heads a rank with fewer queries gets fewer keys.
        """
        divides = (
            spec.num_heads % degree == 0 and 0 in (spec.num_kv_heads % degree, degree % spec.num_kv_heads)
            for spec in self.cost.attention.values()
            for degree in np.unique(degrees).tolist()
        )
        return self.cluster.overlap_parts == 1 and all(divides)

    @property
    def fewest_microbatches(self) -> int:
        """Micro-batches that the tokens of the step need at least."""
        return -(-int(self.lengths.sum()) // (self.cluster.num_ranks * self.max_tokens_per_rank))

    def check_fits(self, largest_group: int, change: str) -> None:
        """Raise InfeasibleError where a sample exceeds `largest_group` ranks; `change` names the way out."""
        longest = int(self.lengths.argmax())
        length, limit = int(self.lengths[longest]), largest_group * self.max_tokens_per_rank
        if length > limit:
            raise InfeasibleError(
                f"sample {longest} has {length} tokens, but the largest group has {largest_group} ranks x "
                f"max_tokens_per_rank={self.max_tokens_per_rank} = {limit} tokens; raise max_tokens_per_rank "
                f"to at least {-(-length // largest_group)}, {change}, or shorten the sample"
            )


def check_lengths(lengths: Sequence[int] | Ints) -> Ints:
    """The lengths as int64 [samples]. Raises DataError for no samples, empty ones and fractions."""
    array = np.asarray(lengths)
    if array.ndim != 1 or array.size == 0:
        raise DataError(f"a step needs at least one sample length, got {array.size} in {array.ndim} dimension(s)")
    if array.dtype.kind not in "iu":
        raise DataError(f"sample lengths are whole numbers of tokens, got {array.dtype} (first: {array.flat[0]})")
    if array.min() < 1:
        raise DataError(f"sample {int(array.argmin())} has {int(array.min())} tokens; every sample needs at least 1")
    return array.astype(np.int64)


def degree_ladder(cluster: ClusterSpec) -> list[int]:
    """Sizes of groups, ascending: powers of two inside a node, the node, powers of two of them, all ranks."""
    sizes = []
    size = 1
    while size < cluster.ranks_per_node:
        sizes.append(size)
        size *= 2
    size = cluster.ranks_per_node
    while size < cluster.num_ranks:
        sizes.append(size)
        size *= 2
    return [*sizes, cluster.num_ranks]
