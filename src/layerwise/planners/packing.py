"""Bin packing without domain knowledge: items of several loads into unlike bins with a capacity.

A bin's height is its load; each dimension is as high as its highest bin, and the makespan is the sum of those
heights.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerwise.plan import Ints

Floats = NDArray[np.float64]

# The refinement minimises a p-norm over bins instead of the maximum, p = 2**4: it falls smoothly where several bins
# tie. But where one dimension falls and another rises it may be stuck: hence once more with p = 2**7, nearly the
# maximum. A change must gain this share of the makespan.
DESCENTS = ((4, 3e-4), (7, 1e-5))
MAX_PARTNER_BINS = 12
MAX_PARTNERS = 32
# The refinement ends after so many changes that did not lower the sum of heights.
PATIENCE = 3
# An item above this share of the mean bin is large.
ROCK_SHARE = 0.12


@dataclass(frozen=True, kw_only=True, eq=False)
class Packing:
    """Items and bins; bins of one class are alike.

    loads: float64 [dims, items, classes], what an item adds to a bin of the class.
    base: float64 [dims, bins], the load of an empty bin.
    bin_class: int64 [bins].
    tokens: int64 [items]; capacity_tokens: int64 [bins].
    allowed: bool [items, classes], or None where any item may go anywhere.
    """

    loads: Floats
    base: Floats
    bin_class: Ints
    tokens: Ints
    capacity_tokens: Ints
    allowed: NDArray[np.bool_] | None = None

    def bin_loads(self, bin_of: Ints) -> Floats:
        """The load of every bin, float64 [dims, bins], for `bin_of` int64 [items]."""
        items = np.arange(len(bin_of))
        added = self.loads[:, items, self.bin_class[bin_of]]
        num_bins = len(self.bin_class)
        return np.stack([np.bincount(bin_of, weights=row, minlength=num_bins) for row in added]) + self.base

    def makespan(self, bin_of: Ints) -> float:
        """The sum over dimensions of the highest bin."""
        return float(self.bin_loads(bin_of).max(axis=1).sum())


def pack_longest_first(packing: Packing) -> Ints | None:
    """Bin of every item, int64 [items]: longest first, each where it ends lowest. None: found no room for one.

    Large items weigh every class of bins; small ones, which level whatever the large ones left, take the lowest bin.
    """
    heights, base = packing.loads.sum(axis=0), packing.base.sum(axis=0)
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


def refine(packing: Packing, bin_of: Ints, max_steps: int = 64) -> Ints:
    """Move or swap items out of the highest bins; returns a `bin_of` that is no higher."""
    for norm_doublings, min_gain in DESCENTS:
        bin_of = _descend(packing, bin_of, norm_doublings, min_gain, max_steps)
    return bin_of


def _descend(packing: Packing, bin_of: Ints, norm_doublings: int, min_gain: float, max_steps: int) -> Ints:
    best, num_vain = bin_of, 0
    bin_of = bin_of.copy()
    round_ = _Round(packing, bin_of, norm_doublings)
    best_s = round_.makespan_s
    for _ in range(max_steps):
        change = max(round_.best_change(hot) for hot in round_.highest_bins())
        if change.gain <= min_gain or num_vain == PATIENCE:
            break
        if change.partner >= 0:
            bin_of[change.partner] = bin_of[change.item]
        bin_of[change.item] = change.target
        round_ = _Round(packing, bin_of, norm_doublings)
        num_vain += 1
        if round_.makespan_s < best_s:
            best, best_s, num_vain = bin_of.copy(), round_.makespan_s, 0
    return best


class _Change(NamedTuple):
    """An item goes to the bin `target`, and `partner` comes from there in exchange, unless that is -1.

    gain: as a share of the makespan.
    """

    gain: float
    item: int
    partner: int
    target: int


class _Round:
    """Items in bins, and what all changes of one round share.

    loads: float64 [dims, bins]. powers: of the loads over the highest of their dimension; total: their sum. norm_s: the
    p-norms of all dimensions. order: bins, the lowest first.
    """

    def __init__(self, packing: Packing, bin_of: Ints, norm_doublings: int) -> None:
        self.packing, self.bin_of, self.doublings = packing, bin_of, norm_doublings
        self.loads = packing.bin_loads(bin_of)
        self.height = self.loads.max(axis=1)
        self.makespan_s = float(self.height.sum())
        self.scale = np.where(self.height > 0, self.height, 1.0)
        self.powers = _power(self.loads / self.scale[:, None], self.doublings)
        self.total = self.powers.sum(axis=1)
        self.norm_s = float((self.scale * _root(self.total, self.doublings)).sum())
        self.order = np.argsort(self.loads.sum(axis=0), kind="stable")
        used = np.bincount(bin_of, weights=packing.tokens, minlength=len(packing.bin_class)).astype(np.int64)
        self.free = packing.capacity_tokens - used

    def highest_bins(self) -> list[int]:
        """The highest bin of every dimension, each once."""
        return sorted(set(self.loads.argmax(axis=1).tolist()))

    def best_change(self, hot: int) -> _Change:
        """Of all changes of an item of bin `hot`, the one after which the norm is least."""
        packing = self.packing
        items = _every_kth(np.flatnonzero(self.bin_of == hot))
        partners, targets = self._partners(hot)
        if not len(items) or not len(targets):
            return _Change(0.0, -1, -1, -1)
        is_swap = partners >= 0
        hot_class, target_class = packing.bin_class[hot], packing.bin_class[targets]
        # All as shares of the highest bin of their dimension, before they broadcast to items x partners.
        scale = self.scale[:, None]
        moving = packing.loads[:, items] / scale[:, None]
        arriving = packing.loads[:, partners, hot_class] * is_swap / scale
        leaving = packing.loads[:, partners, target_class] * is_swap
        powers = np.empty((2, len(scale), len(items), len(partners)))
        np.add((self.loads[:, [hot]] / scale - moving[:, :, hot_class])[:, :, None], arriving[:, None], out=powers[0])
        np.take(moving, target_class, axis=2, out=powers[1])
        powers[1] += ((self.loads[:, targets] - leaving) / scale)[:, None]
        with np.errstate(over="ignore"):  # a bin far above all others
            powers = _power(powers, self.doublings)
        # Rounding may leave less than nothing where both bins are nearly empty.
        rest = np.maximum(self.total[:, None] - self.powers[:, [hot]] - self.powers[:, targets], 0)
        norm = powers[0]
        norm += powers[1]
        norm += rest[:, None]
        norm_s = np.where(
            self._fits(items, partners, targets, hot),
            (self.scale @ _root(norm, self.doublings).reshape(len(scale), -1)).reshape(norm.shape[1:]),
            np.inf,
        )
        row, column = divmod(int(norm_s.argmin()), len(partners))
        gain = (self.norm_s - float(norm_s[row, column])) / self.makespan_s
        return _Change(gain, int(items[row]), int(partners[column]), int(targets[column]))

    def _partners(self, hot: int) -> tuple[Ints, Ints]:
        """What an item of bin `hot` may trade with: nothing (-1) in a lower bin, or an item of a low bin."""
        movable = self.order[: MAX_PARTNERS + 1]
        movable = movable[movable != hot][:MAX_PARTNERS]
        low = np.zeros(len(self.order), dtype=bool)
        low[movable[:MAX_PARTNER_BINS]] = True
        swaps = _every_kth(np.flatnonzero(low[self.bin_of]))
        return np.concatenate([np.full(len(movable), -1), swaps]), np.concatenate([movable, self.bin_of[swaps]])

    def _fits(self, items: Ints, partners: Ints, targets: Ints, hot: int) -> NDArray[np.bool_]:
        """Whether both bins stay within capacity and allow their new items, bool [items, partners]."""
        packing, is_swap = self.packing, partners >= 0
        grows = packing.tokens[items][:, None] - (packing.tokens[partners] * is_swap)[None, :]
        fits = (grows <= self.free[targets][None, :]) & (-grows <= self.free[hot])
        if packing.allowed is not None:
            fits &= packing.allowed[items][:, packing.bin_class[targets]]
            fits &= (packing.allowed[partners, packing.bin_class[hot]] | ~is_swap)[None, :]
        return np.asarray(fits)


def _every_kth(items: Ints) -> Ints:
    return items[:: -(-len(items) // MAX_PARTNERS) or 1]


def _power(x: Floats, doublings: int) -> Floats:
    x = x * x
    for _ in range(doublings - 1):
        np.multiply(x, x, out=x)
    return x


def _root(x: Floats, doublings: int) -> Floats:
    x = np.sqrt(x)
    for _ in range(doublings - 1):
        np.sqrt(x, out=x)
    return x


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
