"""What the cost model says of a plan: seconds, bytes and calls, of a layer, a micro-batch and a step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layerwise.cost.flops import Floats
from layerwise.plan import Ints


@dataclass(frozen=True, kw_only=True, eq=False)
class LayerTimes:
    """One layer on every rank, forward and backward together: seconds, float64 [num_ranks] each.

    to_tiles_s, from_tiles_s: how long the two exchanges keep the rank's links busy. hidden_s: of that, what runs beside
    attention of other parts (`ClusterSpec.overlap_parts`); float64 [2, 2, num_ranks] by pass (forward, backward) and
    exchange (to tiles, from tiles), zeros for one part. exposed_s is parameter and dispatch traffic that compute does
    not hide. slow_bytes: what all ranks together send between nodes.
    """

    linear_s: Floats
    attention_s: Floats
    to_tiles_s: Floats
    from_tiles_s: Floats
    hidden_s: Floats
    exposed_s: Floats
    slow_bytes: int

    @property
    def compute_s(self) -> Floats:
        """Linear work and attention."""
        return self.linear_s + self.attention_s

    @property
    def exchange_s(self) -> Floats:
        """Both exchanges of the attention site, but for what attention hides of them."""
        return np.asarray(self.to_tiles_s + self.from_tiles_s - self.hidden_s.sum(axis=(0, 1)))

    @property
    def total_s(self) -> Floats:
        """All of it."""
        return self.compute_s + self.exchange_s + self.exposed_s


@dataclass(frozen=True, kw_only=True, eq=False)
class PassPrediction:
    """All exchanges of one sort, forward and backward.

    seconds: what they, and the compute between them, add to the step.
    rank_fast_bytes, rank_slow_bytes: what each rank sends inside and between nodes, int64 [num_ranks].
    calls: all-to-all calls of each rank, int64 [num_ranks].
    """

    seconds: float
    rank_fast_bytes: Ints
    rank_slow_bytes: Ints
    calls: Ints

    @property
    def fast_bytes(self) -> int:
        """Bytes inside nodes, summed over ranks."""
        return int(self.rank_fast_bytes.sum())

    @property
    def slow_bytes(self) -> int:
        """Bytes between nodes, summed over ranks."""
        return int(self.rank_slow_bytes.sum())


@dataclass(frozen=True, kw_only=True, eq=False)
class KindPrediction(PassPrediction):
    """All layers of one kind.

    attention_flops: forward FLOPs of each rank's tiles in one layer of the kind, float64 [num_ranks].
    """

    attention_flops: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchTimes:
    """How long one micro-batch takes: what plans are compared by.

    rank_s: seconds of each rank if it never waited, float64 [num_ranks]. head_s: of the LM head.
    tokens: at home, int64 [num_ranks].
    times: what one layer of each kind takes on every rank. slow_bytes: between nodes, all kinds, moves and ranks.
    """

    seconds: float
    rank_s: Floats
    head_s: float
    tokens: Ints
    times: dict[str, LayerTimes]
    slow_bytes: int


@dataclass(frozen=True, kw_only=True, eq=False)
class MicrobatchPrediction(MicrobatchTimes):
    """Everything that is predicted of one micro-batch.

    moves: the passes that only move hidden states between layers; zero for most strategies.
    """

    kinds: dict[str, KindPrediction]
    moves: PassPrediction


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPrediction:
    """A whole step; `kinds` and `moves` sum over micro-batches.

    seconds: of the step.
    ideal_s: the same kernels with every layer's work spread evenly and no communication.
    mfu: model FLOPs over ranks x peak x seconds.
    tokens_per_rank: int64 [num_microbatches, num_ranks].
    """

    seconds: float
    ideal_s: float
    mfu: float
    head_s: float
    tokens_per_rank: Ints
    kinds: dict[str, KindPrediction]
    moves: PassPrediction
    microbatches: tuple[MicrobatchPrediction, ...]
