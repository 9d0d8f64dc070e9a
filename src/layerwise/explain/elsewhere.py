"""A plan with one sample moved: on aligned blocks of ranks of every width, in its own micro-batch.

Shards and tiles of the other samples stay as they are. Of the blocks of one width, the one that is predicted to be
fastest is taken, among the few that the loads of their ranks favour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerwise.cost import CostModel, Floats, LayerCost, MicrobatchTimes
from layerwise.plan import HOME, Ints, MicrobatchPlan, Parent, StepPlan, shard_table, tile_table
from layerwise.planners.estimate import prefers_halo
from layerwise.planners.layout import Placement, batched, halo_tile_rows, pour_level, tile_rows
from layerwise.planners.partitions import aligned_blocks
from layerwise.planners.problem import degree_ladder
from layerwise.spec import FULL

# Blocks of one width that are predicted.
NUM_PREDICTED = 3


class Elsewhere(NamedTuple):
    """The sample's layers of `kinds` on the ranks [first, first + degree); no micro-batch where it has no room there.

    needed_tokens: of the fullest of these ranks. seconds: of the step.
    """

    kinds: frozenset[str]
    first: int
    degree: int
    needed_tokens: int
    microbatch: MicrobatchPlan | None = None
    seconds: float | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Moving:
    """Sample `sample` of a plan, which moves within micro-batch `index`."""

    plan: StepPlan
    index: int
    sample: int
    cost: CostModel

    @property
    def microbatch(self) -> MicrobatchPlan:
        """Its micro-batch as planned."""
        return self.plan.microbatches[self.index]

    @cached_property
    def others(self) -> list[MicrobatchTimes]:
        """Predictions of the other micro-batches."""
        rest = self.plan.microbatches[: self.index] + self.plan.microbatches[self.index + 1 :]
        return [self.cost.time_microbatch(microbatch) for microbatch in rest]

    @cached_property
    def others_s(self) -> Floats:
        """Seconds of each rank in the other micro-batches, float64 [num_ranks]."""
        return np.sum([np.zeros(self.plan.num_ranks), *(part.rank_s for part in self.others)], axis=0)

    def predict(self, microbatch: MicrobatchPlan) -> float:
        """Seconds of the step with this micro-batch in place of the planned one."""
        return self.cost.step_s([*self.others, self.cost.time_microbatch(microbatch)])

    def places(self) -> Iterator[Elsewhere]:
        """The best other block of every width for all layers; where full attention is apart, also for the rest."""
        kinds, home, parent = frozenset(self.plan.attention), self._home, self._parent
        repacked = parent is not None and parent.repacked
        group = (parent.first_rank, parent.sp_degree) if parent else home
        yield from self._places(kinds, (0, self.plan.num_ranks), None if repacked else group)
        if repacked:
            yield from self._places(kinds - {FULL}, group, home)

    @property
    def _parent(self) -> Parent | None:
        return next((parent for parent in self.microbatch.parents if self.sample in parent.samples), None)

    @property
    def _home(self) -> tuple[int, int]:
        """The first of the ranks that own the sample, and how many there are."""
        owners = _of(self.microbatch.shards.rows, self.sample)[:, 1]
        return int(owners.min()), int(np.ptp(owners)) + 1

    def _places(
        self, kinds: frozenset[str], within: tuple[int, int], current: tuple[int, int] | None
    ) -> Iterator[Elsewhere]:
        """The best block of every width among those in the `within[1]` ranks from `within[0]`, but the current one."""
        cluster = self.cost.cluster
        widest = within[1] if FULL in kinds else min(within[1], cluster.ranks_per_node)
        for width in degree_ladder(cluster):
            first, end = aligned_blocks(width, cluster.num_ranks, cluster.ranks_per_node)
            chosen = (first >= within[0]) & (end <= within[0] + within[1]) & (width <= widest)
            if current is not None:
                chosen &= (first != current[0]) | (end - first != current[1])
            if chosen.any():
                yield self._best(kinds, first, end, chosen)

    def _best(self, kinds: frozenset[str], first: Ints, end: Ints, chosen: NDArray[np.bool_]) -> Elsewhere:
        """The fastest of the chosen blocks; `first` and `end` are those of all blocks of this width."""
        needed = self._needed_tokens(kinds, first, end)
        fits = chosen & (needed <= self.plan.max_tokens_per_rank)
        if not fits.any():
            block = int(np.where(chosen, needed, needed.max() + 1).argmin())
            return Elsewhere(kinds, int(first[block]), int(end[block] - first[block]), int(needed[block]))
        guess_s = np.where(fits, self._guess_s(kinds, first, end, int(fits.argmax())), np.inf)
        tried = []
        for block in np.argsort(guess_s, kind="stable")[: min(NUM_PREDICTED, int(fits.sum()))].tolist():
            place = Elsewhere(kinds, int(first[block]), int(end[block] - first[block]), int(needed[block]))
            for microbatch in self._variants(place):
                tried.append(place._replace(microbatch=microbatch, seconds=self.predict(microbatch)))
        return min(tried, key=lambda place: place.seconds or 0.0)

    def _needed_tokens(self, kinds: frozenset[str], first: Ints, end: Ints) -> Ints:
        """Tokens of each block's fullest rank with the sample there in parts as level as can be, int64 [blocks]."""
        degree, length = end - first, self.plan.lengths[self.sample]
        needed = np.zeros_like(first)
        for place in self._rest.places:
            if place == HOME or place in kinds:
                tokens = self._rest.tokens_per_rank(self.plan.num_ranks, place)
                level = -(-(np.add.reduceat(tokens, first) + length) // degree)
                needed = np.maximum.reduce([needed, np.maximum.reduceat(tokens, first), level])
        return needed

    def _guess_s(self, kinds: frozenset[str], first: Ints, end: Ints, example: int) -> Floats:
        """Seconds of the step by sums of loads, of the sample alone on an example block and of the rest, per block."""
        place = Elsewhere(kinds, int(first[example]), int(end[example] - first[example]), 0)
        alone = self._keep(lambda sample: sample == self.sample)
        own = self._load_s(self._moved(alone, place, level=False)).max(axis=1, keepdims=True)
        rest = self._load_s(self._rest)
        if self.cost.cluster.sync == "step":
            rest, own = rest.sum(axis=0, keepdims=True) + self.others_s, own.sum(axis=0, keepdims=True)
        there = np.maximum.reduceat(rest, first, axis=1) + own
        highest = np.maximum(rest.max(axis=1, keepdims=True), there).sum(axis=0)
        return np.asarray(highest + 1e-6 * there.sum(axis=0))  # of equals, the block with least to do

    def _load_s(self, microbatch: MicrobatchPlan) -> Floats:
        """Compute and exchange of each rank by layer kind, and its LM head: float64 [kinds + 1, num_ranks]."""
        times = self.cost.layer_times(microbatch)
        rows = [
            layer.num_layers * (times[layer.kind].compute_s + times[layer.kind].exchange_s)
            for layer in self.cost.layers
        ]
        return np.stack([*rows, self.cost.head_token_s * microbatch.tokens_per_rank(self.plan.num_ranks)])

    def _variants(self, place: Elsewhere) -> list[MicrobatchPlan]:
        """The micro-batch with the sample there in equal parts where they fit, and in parts that level the ranks."""
        level, equal = (self._moved(self.microbatch, place, level=level) for level in (True, False))
        fullest = max(int(equal.tokens_per_rank(self.plan.num_ranks, at).max()) for at in equal.places)
        if fullest > self.plan.max_tokens_per_rank:
            return [level]
        return [equal] if equal.places == level.places else [equal, level]

    def _moved(self, microbatch: MicrobatchPlan, place: Elsewhere, *, level: bool) -> MicrobatchPlan:
        """The micro-batch with the sample there; full attention stays behind where `place.kinds` is without it."""
        shards = {
            at: shard_table(np.concatenate([_but(table.rows, self.sample), self._shards(place, at, level)]))
            if at == HOME or at in place.kinds
            else table
            for at, table in microbatch.places.items()
        }
        tiles = dict(microbatch.tiles)
        for layer in self.cost.layers:
            if layer.kind in place.kinds:
                own = _of(shards.get(layer.kind, shards[HOME]).rows, self.sample)
                rows = np.concatenate([_but(tiles[layer.kind].rows, self.sample), self._tiles(layer, place, own)])
                tiles[layer.kind] = tile_table(rows)
        return MicrobatchPlan(shards=shards.pop(HOME), tiles=tiles, shards_by_kind=shards)

    def _shards(self, place: Elsewhere, at: str, level: bool) -> Ints:
        """Shard rows in equal parts, or in parts that level the tokens of the ranks at home or in a layer kind."""
        ranks = np.arange(place.first, place.first + place.degree)
        tokens = self._rest.tokens_per_rank(self.plan.num_ranks, at)[ranks]
        parts = pour_level(self.plan.lengths[self.sample], tokens if level else tokens * 0)
        hi = np.cumsum(parts)
        return np.stack([np.full_like(ranks, self.sample), ranks, hi - parts, hi], axis=1)[parts > 0]

    def _tiles(self, layer: LayerCost, place: Elsewhere, shards: Ints) -> Ints:
        """Tile rows by heads, or, in kinds where the plan has halos, by whichever the estimate prefers."""
        lengths = np.array(self.plan.lengths, dtype=np.int64)
        own = lengths[[self.sample]]
        if layer.kind in self._halo_kinds and prefers_halo(self.cost, layer, own, place.degree)[0]:
            return halo_tile_rows(shards, layer.spec)
        placement = Placement(*np.array([[self.sample], [place.first], [place.degree]], dtype=np.int64))
        return tile_rows(batched(placement, lengths), layer.spec)

    @cached_property
    def _halo_kinds(self) -> frozenset[str]:
        """Kinds in which some sample has several tiles with all heads: each rank computes its own queries."""
        kinds = []
        for kind, tiles in self.microbatch.tiles.items():
            spec = self.plan.attention[kind]
            is_whole = tiles.column("h1") - tiles.column("h0") == spec.num_heads
            if spec.is_local and (np.bincount(tiles.column("sample")[is_whole]) > 1).any():
                kinds.append(kind)
        return frozenset(kinds)

    @cached_property
    def _rest(self) -> MicrobatchPlan:
        return self._keep(lambda sample: sample != self.sample)

    def _keep(self, keeps: Callable[[Ints], NDArray[np.bool_]]) -> MicrobatchPlan:
        """The micro-batch with the rows of some samples only."""
        microbatch = self.microbatch
        places = {at: table.take(keeps(table.rows[:, 0])) for at, table in microbatch.places.items()}
        tiles = {kind: table.take(keeps(table.rows[:, 0])) for kind, table in microbatch.tiles.items()}
        return replace(microbatch, shards=places.pop(HOME), tiles=tiles, shards_by_kind=places)


def _of(rows: Ints, sample: int) -> Ints:
    return rows[rows[:, 0] == sample]


def _but(rows: Ints, sample: int) -> Ints:
    return rows[rows[:, 0] != sample]
