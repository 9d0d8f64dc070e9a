"""Every sample on the narrowest aligned block of ranks that keeps them level; blocks of different samples may overlap.

A rank may own shards of several widths: whole short samples beside parts of long ones. The child solver and `joint`
both place samples this way, in one parent's nodes or in the whole cluster.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import NamedTuple

import numpy as np

from layerwise.cost import Floats
from layerwise.plan import Ints
from layerwise.planners.layout import Placement
from layerwise.planners.partitions import aligned_blocks
from layerwise.planners.settling import Choices, Seconds, settle


class Search(NamedTuple):
    """How hard to look.

    tolerances: seconds above the level, as a share of it, that a narrower block may cost; tried in this order.
    rock_share: a sample above this share of the level in any dimension is large: it may take more than one rank.
    settles: go through all tolerances, and settle what was found.
    """

    tolerances: tuple[float, ...]
    rock_share: float
    settles: bool = False


QUICK = Search((0.01,), 0.25)
USUAL = Search((0.004, 0.03), 0.25)
FINE = Search((0.002, 0.006, 0.012, 0.022, 0.04, 0.08), 0.02)
THOROUGH = Search((0.0, 0.004, 0.015, 0.03, 0.06, 0.12, 0.25), 0.0, settles=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Nest:
    """Samples to place on the ranks [first_rank, first_rank + num_ranks), whose nodes have `ranks_per_node`.

    loads: float64 [dims, samples, widths], seconds that a sample adds to each rank of a block.
    widths: sizes of blocks, ascending, the first 1.
    lengths: int64 [samples], in tokens; capacity_tokens: of one rank.
    floor: float64 [dims], seconds up to which a dimension costs nothing, since something else takes as long.
    pour_by_total: small samples level the sum of all dimensions, not the first.
    spread: a sample, by its place among these, that goes on the widest block whether or not it needs that.
    """

    samples: Ints
    lengths: Ints
    loads: Floats
    widths: Sequence[int]
    first_rank: int
    num_ranks: int
    ranks_per_node: int
    capacity_tokens: int
    search: Search
    floor: Floats | float = 0.0
    pour_by_total: bool = False
    spread: int | None = None

    @cached_property
    def level(self) -> Floats:
        """Seconds of every rank where all are level and nothing communicates, or the floor; float64 [dims]."""
        return np.asarray(np.maximum(self.loads[:, :, 0].sum(axis=1) / self.num_ranks, self.floor))

    @cached_property
    def rise(self) -> Floats:
        """How far the level rises because a sample communicates on a block, float64 [dims, samples, widths]."""
        extra = self.loads * np.array(self.widths) - self.loads[:, :, :1]
        return np.asarray(np.maximum(extra, 0, out=extra) / self.num_ranks)

    @cached_property
    def rise_s(self) -> Floats:
        """The sum of `rise` over dimensions, float64 [samples, widths]."""
        return np.asarray(self.rise.sum(axis=0))


def nest(problem: Nest, seconds: Seconds) -> tuple[Floats, Placement] | None:
    """The best of a few tolerances, or None: seconds of every rank, float64 [dims, ranks], and the placement.

    `seconds` says what such tables of seconds cost.
    """
    level_s = float(problem.level.sum())
    least_s = float(seconds(np.repeat(problem.level[:, None], problem.num_ranks, axis=1)))
    best, best_s = None, np.inf
    for tolerance in problem.search.tolerances:
        if not problem.search.settles and best_s <= least_s + tolerance * level_s:
            break  # it is more level already than this tolerance asks for
        placed = _nest(problem, tolerance)
        if placed is not None and (placed_s := float(seconds(placed[0]))) < best_s:
            best, best_s = placed, placed_s
    if best is None or not problem.search.settles:
        return best
    starts = [best[1], *_on_whole_nodes(problem)]
    return min((_settled(problem, start, seconds) for start in starts), key=lambda settled: float(seconds(settled[0])))


def _on_whole_nodes(problem: Nest) -> Iterator[Placement]:
    """Every sample on the widest blocks that lie inside a node, longest first, if it fits: as level as can be there."""
    width = max(width for width in problem.widths if width <= problem.ranks_per_node)
    first, end = aligned_blocks(width, problem.num_ranks, problem.ranks_per_node)
    tokens, degree = np.zeros(len(first), dtype=np.int64), end - first
    block_of = np.zeros(len(problem.samples), dtype=np.int64)
    for item in np.argsort(-problem.lengths, kind="stable"):
        after = tokens + -(-problem.lengths[item] // degree)
        block_of[item] = after.argmin()
        tokens[block_of[item]] = after.min()
    if tokens.max() <= problem.capacity_tokens:
        yield Placement(problem.samples, problem.first_rank + first[block_of], degree[block_of])


def _settled(problem: Nest, placement: Placement, seconds: Seconds) -> tuple[Floats, Placement]:
    widths: dict[tuple[int, int], int] = {}
    for index, width in enumerate(problem.widths):
        blocks = aligned_blocks(width, problem.num_ranks, problem.ranks_per_node)
        for block in zip(*(column.tolist() for column in blocks), strict=True):
            widths.setdefault(block, index)
    first, end = np.array(list(widths)).T
    ranks = np.arange(problem.num_ranks)
    share_tokens = -(-problem.lengths[:, None] // (end - first))
    choices = Choices(
        inside=(first[:, None] <= ranks) & (ranks < end[:, None]),
        added=np.concatenate([problem.loads[:, :, list(widths.values())], share_tokens[None]]),
        capacity_tokens=problem.capacity_tokens,
        exchanged=_exchanged_nodes(first, end, problem),
    )
    placed = zip((placement.first - problem.first_rank).tolist(), placement.degree.tolist(), strict=True)
    blocks_of = {block: number for number, block in enumerate(widths)}
    chosen = settle(choices, np.array([blocks_of[lo, lo + degree] for lo, degree in placed]), seconds)
    settled = Placement(placement.sample, problem.first_rank + first[chosen], (end - first)[chosen])
    return choices.table(chosen)[:-1], settled


def _exchanged_nodes(first: Ints, end: Ints, problem: Nest) -> Ints:
    """For every two nodes, the number of the block that each becomes where they change places."""
    number = {block: index for index, block in enumerate(zip(first.tolist(), end.tolist(), strict=True))}
    size, rows = problem.ranks_per_node, []
    for low, high in combinations(range(0, problem.num_ranks - size + 1, size), 2):
        shift = {low: high - low, high: low - high}
        moved = [shift.get(lo // size * size, 0) if hi - lo <= size else 0 for lo, hi in number]
        rows.append([number[lo + by, hi + by] for (lo, hi), by in zip(number, moved, strict=True)])
    return np.array(rows, dtype=np.int64).reshape(-1, len(number))


def _nest(problem: Nest, tolerance: float) -> tuple[Floats, Placement] | None:
    single, level = problem.loads[:, :, 0], problem.level
    is_rock = np.any(single > problem.search.rock_share * level[:, None], axis=0)
    size = (single / np.where(level > 0, level, 1)[:, None]).max(axis=0)
    if problem.spread is not None:  # before all others
        is_rock[problem.spread], size[problem.spread] = True, np.inf
    order = np.lexsort([np.arange(len(size)), -size])
    # Small samples level the first dimension at the end; of the others, they add about as much to every rank.
    base = single[:, ~is_rock].sum(axis=1) / problem.num_ranks
    base[0] = 0.0
    state = _Ranks(problem, base, tolerance)
    for item in order[is_rock[order]].tolist():
        if not state.put(item, widths_from=len(problem.widths) - 1 if item == problem.spread else 0):
            return None
    state.height -= base[:, None]
    if not state.pour(order[~is_rock[order]]):
        return None
    placement = Placement(problem.samples, problem.first_rank + state.first, state.degree)
    return state.height, placement


class _Ranks:
    """Ranks being filled: seconds `height` float64 [dims, ranks], and tokens.

    The heap holds (share of the level that is used, rank); an entry whose share is not the rank's own is out of date.
    """

    def __init__(self, problem: Nest, base: Floats, tolerance: float) -> None:
        self.problem, self.level, self.single = problem, problem.level, problem.loads[:, :, 0]
        self.allowed_s = tolerance * float(self.level.sum())
        # What only communication adds to is measured by the sum of all levels.
        self.unit = np.where(self.level > 0, self.level, self.level.sum())
        self.height = np.repeat(base[:, None], problem.num_ranks, axis=1)
        self.tokens = np.zeros(problem.num_ranks, dtype=np.int64)
        self.first = np.zeros(len(problem.samples), dtype=np.int64)
        self.degree = np.ones(len(problem.samples), dtype=np.int64)
        self.blocks = [aligned_blocks(width, problem.num_ranks, problem.ranks_per_node) for width in problem.widths]
        self.used = (self.height / self.unit[:, None]).sum(axis=0).tolist()
        self.heap = [(share, rank) for rank, share in enumerate(self.used)]

    def put(self, item: int, widths_from: int = 0) -> bool:
        """Put a large sample on the narrowest block that stays level, or on the one that rises least above."""
        if not widths_from and self._put_on_emptiest_rank(item):
            return True
        choice = self._best_block(item, widths_from)
        if choice is None:
            return False
        index, lo, hi = choice
        self.height[:, lo:hi] += self.problem.loads[:, item, index, None]
        self.tokens[lo:hi] += -(-int(self.problem.lengths[item]) // (hi - lo))
        self.first[item], self.degree[item] = lo, hi - lo
        if index:
            self.level = self.level + self.problem.rise[:, item, index]
            self.unit = self.unit + self.problem.rise[:, item, index]
        for rank, share in enumerate((self.height[:, lo:hi] / self.unit[:, None]).sum(axis=0).tolist(), start=lo):
            self.used[rank] = share
            heapq.heappush(self.heap, (share, rank))
        return True

    def _put_on_emptiest_rank(self, item: int) -> bool:
        """Put the whole sample on the rank that is used least, if it stays level: right for most samples, and quick."""
        while self.used[self.heap[0][1]] != self.heap[0][0]:
            heapq.heappop(self.heap)
        rank, length = self.heap[0][1], self.problem.lengths[item]
        if self.tokens[rank] + length > self.problem.capacity_tokens:
            return False
        # So few numbers are added faster one by one.
        before, added, level = (row.tolist() for row in (self.height[:, rank], self.single[:, item], self.level))
        after = [x + y for x, y in zip(before, added, strict=True)]
        if sum(max(x - y, 0) for x, y in zip(after, level, strict=True)) > self.allowed_s:
            return False
        self.height[:, rank] = after
        self.tokens[rank] += length
        self.first[item] = rank
        self.used[rank] = sum(x / y for x, y in zip(after, self.unit.tolist(), strict=True))
        heapq.heapreplace(self.heap, (self.used[rank], rank))
        return True

    def _best_block(self, item: int, widths_from: int) -> tuple[int, int, int] | None:
        """Index of a width, first rank and end of the narrowest block that stays level; else the one that costs least.

        A width that cannot be level on any ranks is weighed only where it may cost less than the one found.
        """
        problem = self.problem
        lowest = self.height.min(axis=1)[:, None] + problem.loads[:, item]
        least_s = np.maximum(lowest - self.level[:, None], 0).sum(axis=0)
        best, skipped = (np.inf, -1, -1), []
        for index, above_s in enumerate(least_s.tolist()[widths_from:], start=widths_from):
            if above_s > self.allowed_s:
                skipped.append(index)
                continue
            block, above_s = self._lowest_block(item, index)
            best = min(best, (above_s + float(problem.rise_s[item, index]), index, block))
            if above_s <= self.allowed_s:
                break
        for index in skipped:
            if least_s[index] + problem.rise_s[item, index] <= best[0]:
                block, above_s = self._lowest_block(item, index)
                best = min(best, (above_s + float(problem.rise_s[item, index]), index, block))
        costs_s, index, block = best
        if costs_s == np.inf:
            return None
        return index, int(self.blocks[index][0][block]), int(self.blocks[index][1][block])

    def _lowest_block(self, item: int, index: int) -> tuple[int, float]:
        """The block of this width that the sample leaves lowest, and seconds above the level; infinite without room."""
        first, end = self.blocks[index]
        share = -(-int(self.problem.lengths[item]) // (end - first))
        has_room = np.maximum.reduceat(self.tokens, first) + share <= self.problem.capacity_tokens
        if not has_room.any():
            return 0, np.inf
        after = np.maximum.reduceat(self.height, first, axis=1) + self.problem.loads[:, item, index, None]
        above_s = np.maximum(after - self.level[:, None], 0).sum(axis=0)
        used = (after / self.unit[:, None]).sum(axis=0)
        rank = np.where(has_room, above_s + 1e-6 * used * self.level.sum(), np.inf)
        block = int(rank.argmin())
        return block, float(above_s[block])

    def pour(self, items: Ints) -> bool:
        """Put small samples, longest first, each whole on the rank that has least to do; shared where none has room."""
        while len(items):
            placed = self._pour_whole(items)
            if placed < len(items) and not self.put(int(items[placed])):
                return False
            items = items[placed + 1 :]
        return True

    def _pour_whole(self, items: Ints) -> int:
        """How many of the items, in order, found room on the lowest rank."""
        loads, lengths = self.problem.loads[:, items, 0], self.problem.lengths[items]
        dims = slice(None) if self.problem.pour_by_total else slice(1)
        heap = list(zip(self.height[dims].sum(axis=0).tolist(), range(self.problem.num_ranks), strict=True))
        heapq.heapify(heap)
        free = (self.problem.capacity_tokens - self.tokens).tolist()
        ranks: list[int] = []
        for length, rise in zip(lengths.tolist(), loads[dims].sum(axis=0).tolist(), strict=True):
            low, rank = heap[0]
            if free[rank] < length:
                break
            heapq.heapreplace(heap, (low + rise, rank))
            free[rank] -= length
            ranks.append(rank)
        count = len(ranks)
        self.first[items[:count]] = ranks
        for row, height in zip(loads[:, :count], self.height, strict=True):
            height += np.bincount(ranks, weights=row, minlength=self.problem.num_ranks)
        tokens = np.bincount(ranks, weights=lengths[:count], minlength=self.problem.num_ranks)
        self.tokens += tokens.astype(np.int64)
        return count
