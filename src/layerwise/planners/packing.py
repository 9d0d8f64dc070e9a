"""Bin packing without domain knowledge: items of several loads into unlike bins with a capacity.

A bin is as high as its load; each dimension is as high as its highest bin, and the makespan is the sum of those
heights. A dimension may have a second row of loads: a bin is as high as the higher of both.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerwise.plan import Ints

Floats = NDArray[np.float64]

# The refinement minimises a smooth maximum over bins, log(sum(exp(sharpness * x))) / sharpness of shares x of the
# highest, which falls also where several bins tie. The less sharp, the less it gets stuck where one dimension falls and
# another rises; the sharper, the nearer to the maximum. A change must gain this share of the makespan.
COARSE, SHARP = ((16, 3e-4), (128, 1e-4)), ((1024, 5e-6),)
MAX_PARTNER_BINS = 12
MAX_PARTNERS = 32
# What float64 holds of exponentials, and of a few of them added up.
MAX_EXPONENT, MIN_WEIGHT = 700.0, 1e-300
# Gains below this share are rounding.
ROUNDING = 1e-12
# Dimensions below this share of the makespan are left as they are.
MIN_SHARE = 0.05
# The refinement ends after so many changes that did not lower the sum of heights.
PATIENCE = 3
# An item above this share of the mean bin is large.
ROCK_SHARE = 0.12


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Items and bins; bins of one class are alike.

    loads: float64 [rows, items, classes], what an item adds to a bin of the class.
    base: float64 [rows, bins], the load of an empty bin.
    bin_class: int64 [bins].
    tokens: int64 [items]; capacity_tokens: int64 [bins].
    allowed: bool [items, classes], or None where any item may go anywhere.
    second_of: rows after the first `dims` are second rows, of these dimensions.
    """

    loads: Floats
    base: Floats
    bin_class: Ints
    tokens: Ints
    capacity_tokens: Ints
    allowed: NDArray[np.bool_] | None = None
    second_of: tuple[int, ...] = ()

    @property
    def num_dims(self) -> int:
        """Dimensions, whose first rows come first."""
        return len(self.loads) - len(self.second_of)

    @cached_property
    def flat(self) -> Floats:
        """The loads, float64 [rows, items * classes]: of item i in class k at i * classes + k."""
        return np.ascontiguousarray(self.loads).reshape(len(self.loads), -1)

    def bin_loads(self, bin_of: Ints) -> Floats:
        """The load of every bin, float64 [rows, bins], for `bin_of` int64 [items]."""
        items = np.arange(len(bin_of))
        added = self.loads[:, items, self.bin_class[bin_of]]
        num_bins = len(self.bin_class)
        return np.stack([np.bincount(bin_of, weights=row, minlength=num_bins) for row in added]) + self.base

    def heights(self, loads: Floats) -> Floats:
        """How high bins of these loads (float64 [rows, ...]) are, float64 [dims, ...]."""
        if not self.second_of:
            return loads
        heights = loads[: self.num_dims].copy()
        for dim, row in zip(self.second_of, loads[self.num_dims :], strict=True):
            np.maximum(heights[dim], row, out=heights[dim])
        return heights

    def makespan(self, bin_of: Ints) -> float:
        """The sum over dimensions of the highest bin."""
        return float(self.heights(self.bin_loads(bin_of)).max(axis=1).sum())


def pack_longest_first(packing: Packing) -> Ints | None:
    """Bin of every item, int64 [items]: longest first, each where it ends lowest. None: found no room for one.

    Large items weigh every class of bins; small ones, which level whatever the large ones left, take the lowest bin.
    """
    heights, base = packing.loads.sum(axis=0), (packing.base - packing.base.min(axis=1, keepdims=True)).sum(axis=0)
    order = np.lexsort([np.arange(len(heights)), -packing.tokens, -heights.mean(axis=1)])
    smallest = heights.min(axis=1)
    is_rock = smallest > ROCK_SHARE * (smallest.sum() + base.sum()) / len(packing.bin_class)
    if packing.allowed is not None:
        is_rock |= ~packing.allowed.all(axis=1)
    bins = _Bins(packing, heights, base)
    if bins.put(order[is_rock[order]]) and bins.pour(order[~is_rock[order]]):
        return bins.bin_of
    return pack_tightly(packing)


def pack_tightly(packing: Packing) -> Ints | None:
    """Bin of every item, int64 [items], where room is what is short: longest first, each where least is left."""
    free, bin_of = packing.capacity_tokens.copy(), np.full(len(packing.tokens), -1, dtype=np.int64)
    for item in np.argsort(-packing.tokens, kind="stable").tolist():
        has_room = free >= packing.tokens[item]
        if packing.allowed is not None:
            has_room &= packing.allowed[item, packing.bin_class]
        if not has_room.any():
            return None
        bin_of[item] = np.where(has_room, free, np.iinfo(np.int64).max).argmin()
        free[bin_of[item]] -= packing.tokens[item]
    return bin_of


class _Bins:
    """Bins being filled, by class; the heaps hold (height, bin) of each class that has bins."""

    def __init__(self, packing: Packing, heights: Floats, base: Floats) -> None:
        self.packing = packing
        self.used, self.kind = np.unique(packing.bin_class, return_inverse=True)
        self.heights = heights[:, self.used]
        self.bin_of = np.full(len(heights), -1, dtype=np.int64)
        self.free = packing.capacity_tokens.tolist()
        self.heaps: list[list[tuple[float, int]]] = [[] for _ in self.used]
        for index, (kind, height) in enumerate(zip(self.kind.tolist(), base.tolist(), strict=True)):
            self.heaps[kind].append((height, index))
        for heap in self.heaps:
            heapq.heapify(heap)

    def put(self, items: Ints) -> bool:
        """Put large items, longest first, each where it ends lowest; False where no bin has room for one."""
        free, heaps, placed = self.free, self.heaps, []
        rises_s, allowed = self.heights[items], self.packing.allowed
        may_enter = np.ones(rises_s.shape, bool) if allowed is None else allowed[np.ix_(items, self.used)]
        columns = (column.tolist() for column in (self.packing.tokens[items], rises_s, may_enter))
        for need, rises, may in zip(*columns, strict=True):
            lowest, into, found = np.inf, -1, (0.0, -1)
            for kind, heap in enumerate(heaps):
                entry = heap[0]
                if entry[0] + rises[kind] >= lowest or not may[kind]:
                    continue
                if free[entry[1]] < need:
                    entry = min((other for other in heap if free[other[1]] >= need), default=(np.inf, -1))
                if entry[0] + rises[kind] < lowest:
                    lowest, into, found = entry[0] + rises[kind], kind, entry
            if into < 0:
                return False
            heap, index = heaps[into], found[1]
            if heap[0] is found:
                heapq.heapreplace(heap, (lowest, index))
            else:
                heap[heap.index(found)] = (lowest, index)
                heapq.heapify(heap)
            free[index] -= need
            placed.append(index)
        self.bin_of[items] = placed
        return True

    def pour(self, items: Ints) -> bool:
        """Put small items, longest first, each into the lowest bin that has room; False where none has."""
        heap = [entry for heap in self.heaps for entry in heap]
        heapq.heapify(heap)
        free, kinds, num_kinds, replace = self.free, self.kind.tolist(), len(self.heaps), heapq.heapreplace
        rises = self.heights[items].ravel().tolist()  # of item i in a bin of class k: [i * num_kinds + k]
        placed, full = [], []
        at = 0
        for need in self.packing.tokens[items].tolist():
            level, index = heap[0]
            while free[index] < need:
                full.append(heapq.heappop(heap))
                if not heap:
                    return False
                level, index = heap[0]
            replace(heap, (level + rises[at + kinds[index]], index))
            at += num_kinds
            free[index] -= need
            placed.append(index)
            while full:
                heapq.heappush(heap, full.pop())
        self.bin_of[items] = placed
        return True


def refine(packing: Packing, bin_of: Ints, is_near: bool = False, max_steps: int = 64) -> Ints:
    """Move or swap items out of the highest bins; returns a `bin_of` that is no higher.

    is_near: the bins are nearly level, and only the last descent is worth its time.
    """
    for sharpness, min_gain in SHARP if is_near else COARSE + SHARP:
        bin_of = _descend(packing, bin_of, sharpness, min_gain, max_steps)
    return bin_of


def _descend(packing: Packing, bin_of: Ints, sharpness: int, min_gain: float, max_steps: int) -> Ints:
    bins = _Filled(packing, bin_of, sharpness)
    best, best_s, num_vain = bin_of, bins.makespan_s, 0
    for _ in range(max_steps):
        change = bins.best_change()
        if change.gain <= min_gain or num_vain == PATIENCE:
            break
        bins.make(change)
        num_vain += 1
        if bins.makespan_s < best_s * (1 - ROUNDING):
            best, best_s, num_vain = bins.bin_of.copy(), bins.makespan_s, 0
    return best


class _Change(NamedTuple):
    """An item goes to the bin `target`, and `partner` comes from there in exchange, unless that is -1.

    gain: as a share of the makespan.
    """

    gain: float
    item: int
    partner: int
    target: int


class _Filled:
    """Bins with items in them, which change places one at a time.

    loads: float64 [rows, bins]; free: tokens, int64 [bins]. heights: float64 [dims, bins]; scale: the highest of each
    dimension. weights: of the heights, as of `_weights`; total: their sum over bins. order: bins, the lowest first.
    """

    def __init__(self, packing: Packing, bin_of: Ints, sharpness: int) -> None:
        self.packing, self.bin_of, self.sharpness = packing, bin_of.copy(), sharpness
        self.loads = packing.bin_loads(bin_of)
        used = np.bincount(bin_of, weights=packing.tokens, minlength=len(packing.bin_class)).astype(np.int64)
        self.free = packing.capacity_tokens - used
        self._measure()

    def _measure(self) -> None:
        self.heights = self.packing.heights(self.loads)
        scale = self.heights.max(axis=1)
        self.makespan_s = float(scale.sum())
        self.scale = np.where(scale > 0, scale, 1.0)
        self.weights = _weights(self.heights / self.scale[:, None], self.sharpness)
        self.total = self.weights.sum(axis=1)
        self.order = np.argsort(self.heights.sum(axis=0), kind="stable")

    def make(self, change: _Change) -> None:
        """Let the change happen."""
        packing, hot = self.packing, int(self.bin_of[change.item])
        if change.partner >= 0:
            self.bin_of[change.partner] = hot
        self.bin_of[change.item] = change.target
        for index, sign in ((hot, -1), (change.target, 1)):
            kind = packing.bin_class[index]
            self.loads[:, index] += sign * packing.loads[:, change.item, kind]
            self.free[index] -= sign * packing.tokens[change.item]
            if change.partner >= 0:
                self.loads[:, index] -= sign * packing.loads[:, change.partner, kind]
                self.free[index] += sign * packing.tokens[change.partner]
        self._measure()

    def best_change(self) -> _Change:
        """Of all changes that lower the highest bin of some dimension, the one that leaves them lowest."""
        partners, targets = self._partners()
        found = [self._lowering(row, hot, partners, targets) for row, hot in self._highest()]
        items, partners, targets = (np.concatenate(columns) for columns in zip(*found, strict=True))
        if not len(items):
            return _Change(0.0, -1, -1, -1)
        above = self._above(items, partners, targets)
        best = int(above.argmin())
        gain = float(self.scale @ np.log(self.total)) / self.sharpness - float(above[best])
        return _Change(gain / self.makespan_s, int(items[best]), int(partners[best]), int(targets[best]))

    def _highest(self) -> list[tuple[int, int]]:
        """The row and the bin that each dimension's height is that of; low dimensions are left out."""
        num_dims, hottest = len(self.heights), self.loads.argmax(axis=1).tolist()
        rows = list(range(num_dims))
        for row, dim in enumerate(self.packing.second_of, start=num_dims):
            if self.loads[row, hottest[row]] > self.loads[dim, hottest[dim]]:
                rows[dim] = row
        is_high = (self.scale >= MIN_SHARE * self.makespan_s).tolist()
        return [(row, hottest[row]) for row, high in zip(rows, is_high, strict=True) if high]

    def _lowering(self, row: int, hot: int, partners: Ints, targets: Ints) -> tuple[Ints, Ints, Ints]:
        """Changes of items of bin `hot` that lower it in this row, and leave the other below what it was."""
        packing, loads, bins = self.packing, self.packing.loads[row], self.loads[row]
        items = _every_kth(np.flatnonzero(self.bin_of == hot))
        hot_class, target_class, is_swap = packing.bin_class[hot], packing.bin_class[targets], partners >= 0
        after = loads[items][:, target_class]
        after += bins[targets] - loads[partners, target_class] * is_swap
        grows = packing.tokens[items][:, None] - packing.tokens[partners] * is_swap
        lowers = after < bins[hot]
        lowers &= loads[items, hot_class][:, None] > loads[partners, hot_class] * is_swap
        lowers &= grows <= self.free[targets]
        lowers &= grows >= -self.free[hot]
        if packing.allowed is not None:
            lowers &= packing.allowed[items][:, target_class]
            lowers &= packing.allowed[partners, hot_class] | ~is_swap
        at, column = np.nonzero(lowers)
        return items[at], partners[column], targets[column]

    def _partners(self) -> tuple[Ints, Ints]:
        """What an item may trade with, and its bin: nothing (-1) in a lower bin, or an item of a low bin."""
        movable, is_low = self.order[:MAX_PARTNERS], np.zeros(len(self.order), dtype=bool)
        is_low[movable[:MAX_PARTNER_BINS]] = True
        swaps = _every_kth(np.flatnonzero(is_low[self.bin_of]))
        return np.concatenate([np.full(len(movable), -1), swaps]), np.concatenate([movable, self.bin_of[swaps]])

    def _above(self, items: Ints, partners: Ints, targets: Ints) -> Floats:
        """How far the smooth makespan is above the present one after each change, float64 [changes]."""
        packing, hot, is_swap = self.packing, self.bin_of[items], partners >= 0
        num_classes = packing.loads.shape[2]
        after = np.empty((len(self.loads), 2, len(items)))
        for side, (bins, sign) in enumerate(((hot, -1), (targets, 1))):
            kind = packing.bin_class[bins]
            moving = packing.flat.take(items * num_classes + kind, axis=1)
            moving -= packing.flat.take(is_swap * partners * num_classes + kind, axis=1) * is_swap
            after[:, side] = self.loads.take(bins, axis=1) + sign * moving
        heights = packing.heights(after)
        heights /= self.scale[:, None, None]
        weights = _weights(heights, self.sharpness)
        total = self.total[:, None] - self.weights.take(hot, axis=1) - self.weights.take(targets, axis=1)
        # All bins may be far lower now, and rounding may leave less than nothing where both were nearly empty.
        np.maximum(total, MIN_WEIGHT, out=total)
        total += weights[:, 0]
        total += weights[:, 1]
        return np.asarray(self.scale @ np.log(total, out=total) / self.sharpness)


def _every_kth(items: Ints) -> Ints:
    return items[:: -(-len(items) // MAX_PARTNERS) or 1]


def _weights(shares: Floats, sharpness: int) -> Floats:
    """exp(sharpness * (share - 1)), within float64; overwrites `shares`, of the highest bin of each dimension."""
    shares -= 1
    shares *= sharpness
    np.minimum(shares, MAX_EXPONENT, out=shares)  # a bin far above all others
    return np.asarray(np.exp(shares, out=shares))


def split_parts(
    tokens: Ints, work: Floats, num_parts: int, capacity_tokens: int, *, longest_together: bool
) -> Ints | None:
    """Part of every item, int64 [items], with level tokens and at most `capacity_tokens` in each part.

    `longest_together` fills part after part with the longest items left; otherwise every part gets its share
    of work. None where the items do not fit this way.
    """
    if num_parts == 1:
        return np.zeros(len(tokens), dtype=np.int64) if tokens.sum() <= capacity_tokens else None
    if not longest_together:
        loads = np.stack([tokens / tokens.sum(), work / work.sum()])[:, :, None]
        return pack_longest_first(
            Packing(
                loads=loads,
                base=np.zeros((2, num_parts)),
                bin_class=np.zeros(num_parts, dtype=np.int64),
                tokens=tokens,
                capacity_tokens=np.full(num_parts, capacity_tokens),
            )
        )
    level = min(capacity_tokens, -(-int(tokens.sum()) // num_parts))
    used, part_of = [0] * num_parts, np.full(len(tokens), -1, dtype=np.int64)
    for item in np.argsort(-tokens, kind="stable").tolist():
        need = int(tokens[item])
        part = next((p for p in range(num_parts) if used[p] + need <= level), None)
        if part is None:
            part = min(range(num_parts), key=used.__getitem__)
        if used[part] + need > capacity_tokens:
            return None
        used[part] += need
        part_of[item] = part
    return part_of
