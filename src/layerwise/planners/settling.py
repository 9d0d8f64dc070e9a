"""A placement of a handful of samples, improved by one change at a time: a sample moves, two swap, or two nodes do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerwise.cost import Floats
from layerwise.plan import Ints

# A round over all samples must save this share of the seconds, or it is the last; at most so many are made.
MIN_GAIN, MAX_ROUNDS = 1e-6, 6
# Seconds of tables of what every rank does: float64 [..., dims, ranks] -> [...].
Seconds = Callable[[Floats], Floats]


@dataclass(frozen=True, kw_only=True, eq=False)
class Choices:
    """What each sample adds to the ranks of each block that it may be put on.

    inside: bool [blocks, ranks].
    added: float64 [dims + 1, samples, blocks], seconds on each rank of the block and, last, tokens.
    capacity_tokens: of one rank.
    exchanged: int64 [exchanges, blocks], the block that each becomes where two nodes change places.
    """

    inside: NDArray[np.bool_]
    added: Floats
    capacity_tokens: int
    exchanged: Ints

    def parts(self, samples: Ints, blocks: Ints) -> Floats:
        """What samples add to every rank on these blocks, float64 [n, dims + 1, ranks], for int64 [n] each."""
        return self.added[:, samples, blocks].T[:, :, None] * self.inside[blocks][:, None, :]

    def table(self, chosen: Ints) -> Floats:
        """Seconds and tokens of every rank, float64 [dims + 1, ranks], for the block of each sample."""
        return np.asarray(self.parts(np.arange(len(chosen)), chosen).sum(axis=0))


def settle(choices: Choices, chosen: Ints, seconds: Seconds) -> Ints:
    """The block of each sample, int64 [samples], after the changes that save time; `chosen` must fit."""

    def cost_s(tables: Floats) -> Floats:
        fits = tables[:, -1].max(axis=-1) <= choices.capacity_tokens
        return np.where(fits, seconds(tables[:, :-1]), np.inf)

    best_s = float(cost_s(choices.table(chosen)[None])[0])
    for _ in range(MAX_ROUNDS):
        before_s = best_s
        for change in range(2 * len(chosen) + 1):
            ways, tables = _changes(choices, chosen, change)
            found = cost_s(tables)
            if found.min(initial=np.inf) < best_s:
                best_s, chosen = float(found.min()), ways[int(found.argmin())]
        if best_s > before_s * (1 - MIN_GAIN):
            break
    return chosen


def _changes(choices: Choices, chosen: Ints, change: int) -> tuple[Ints, Floats]:
    """One kind of change, int64 [ways, samples], and the tables after it: a move, a swap, or, at last, nodes."""
    samples, blocks = np.arange(len(chosen)), np.arange(len(choices.inside))
    item, swaps = divmod(change, 2)
    if item == len(chosen):
        ways = choices.exchanged[:, chosen]
        return ways, np.array([choices.table(way) for way in (chosen, *ways)])[1:]
    rest = choices.table(chosen) - choices.parts(samples[item : item + 1], chosen[item : item + 1])[0]
    ways = np.repeat(chosen[None], len(samples if swaps else blocks), axis=0)
    if not swaps:
        ways[:, item] = blocks
        return ways, rest + choices.parts(np.full_like(blocks, item), blocks)
    ways[samples, samples] = chosen[item]
    ways[:, item] = chosen
    here = np.full_like(samples, item)
    # Swapped with itself, the item stays: its own row must not be taken away twice.
    moved = choices.parts(samples, chosen[here]) - choices.parts(samples, chosen) * (samples != item)[:, None, None]
    moved[item] = 0
    return ways, rest + moved + choices.parts(here, chosen)
