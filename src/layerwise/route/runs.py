"""Runs of tokens, joined and cut into the pieces that an exchange copies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from layerwise.plan import Ints

# Runs of so many tokens are worth a copy of their own; shorter ones share an index.
LONG_RUN_TOKENS = 64


class Cut(NamedTuple):
    """Pieces of rows, their table and listed tokens as in `layerwise.kernels.rows.Pieces`, and the peer of each."""

    table: Ints
    listed: Ints
    peer: Ints


class Runs(NamedTuple):
    """Runs of neighbouring tokens of one tensor, in wire order; int64 [runs] each.

    `length` tokens with rows first + t * stride + [0, width), to or from `peer`. Runs of one `group` have the same
    peer and heads, so their rows differ by whole tokens.
    """

    peer: Ints
    group: Ints
    first: Ints
    stride: Ints
    width: Ints
    length: Ints

    def take(self, index: Ints | NDArray[np.bool_]) -> Runs:
        """Some of the runs."""
        return Runs(*(column[index] for column in self))

    def nonempty(self) -> Runs:
        """Those that have tokens."""
        is_live = self.length > 0
        return self if is_live.all() else self.take(is_live)

    def of_peer(self, peer: int) -> Runs:
        """Those of one peer."""
        return self.take(self.peer == peer)

    def but_peer(self, peer: int) -> Runs:
        """Those of all others."""
        return self.take(self.peer != peer)

    @property
    def ends(self) -> Ints:
        """The row where the next token of each run would begin."""
        return self.first + self.length * self.stride


def cut(*sides: Runs) -> list[Cut]:
    """The pieces of each side, made alike: the sides are the same tokens in the same order in several tensors.

    Runs that continue one another are joined. A long run is a piece; short ones in a row are one piece with an index,
    whose tokens ascend.
    """
    if not len(sides[0].peer):
        return [Cut(np.zeros((0, 6), np.int64), *np.zeros((2, 0), np.int64)) for _ in sides]
    joined = _all((_same(side.group) & (side.first[1:] == side.ends[:-1])) for side in sides)
    starts = np.flatnonzero(np.append(True, ~joined))
    sides = tuple(side.take(starts)._replace(length=np.add.reduceat(side.length, starts)) for side in sides)
    long = sides[0].length >= LONG_RUN_TOKENS
    together = _all((_same(side.group) & (side.first[1:] >= side.ends[:-1])) for side in sides) & ~long[1:] & ~long[:-1]
    starts = np.flatnonzero(np.append(True, ~together))
    return [_pieces(side, starts) for side in sides]


def _same(column: Ints) -> NDArray[np.bool_]:
    """For each entry but the first: whether it equals the one before it."""
    same: NDArray[np.bool_] = column[1:] == column[:-1]
    return same


def _all(conditions: Iterable[NDArray[np.bool_]]) -> NDArray[np.bool_]:
    return np.logical_and.reduce(list(conditions))


def _pieces(runs: Runs, starts: Ints) -> Cut:
    """Runs [starts[i], starts[i + 1]) as one piece each; without an index where they are one block."""
    ends = np.append(starts[1:], len(runs.peer))
    heads = runs.take(starts)
    num_tokens = np.add.reduceat(runs.length, starts)
    span = (runs.ends[ends - 1] - heads.first) // heads.stride
    is_listed = num_tokens != span
    sizes = np.where(is_listed, num_tokens, 0)
    begin = np.where(is_listed, np.cumsum(sizes) - sizes, -1)
    table = np.stack([heads.first, heads.stride, heads.width, num_tokens, span, begin], axis=1)
    counts = (ends - starts)[is_listed]
    listed = _tokens(runs.take(np.repeat(is_listed, ends - starts)), np.repeat(heads.first[is_listed], counts))
    return Cut(table, listed, heads.peer)


def _tokens(runs: Runs, first: Ints) -> Ints:
    """The tokens of the runs one after the other, each counted from the row `first` [runs]."""
    begins = (runs.first - first) // runs.stride
    ends = np.cumsum(runs.length)
    return np.arange(runs.length.sum()) + np.repeat(begins - ends + runs.length, runs.length)
