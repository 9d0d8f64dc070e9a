"""Runs of tokens, joined and cut into the pieces that an exchange copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerwise.kernels.rows import Piece
from layerwise.plan import Ints

# Runs of so many tokens are worth a copy of their own; shorter ones share an index.
LONG_RUN_TOKENS = 64

Pieces = dict[int, list[Piece]]


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

    @property
    def num_rows(self) -> int:
        """Rows of all runs."""
        return int((self.length * self.width).sum())

    def take(self, index: Ints | NDArray[np.bool_]) -> Runs:
        """Some of the runs."""
        return Runs(*(column[index] for column in self))

    def nonempty(self) -> Runs:
        """Those that have tokens."""
        return self.take(self.length > 0)

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


def cut(*sides: Runs) -> list[Pieces]:
    """The pieces by peer of each side, made alike: the sides are the same tokens in the same order in several tensors.

    Runs that continue one another are joined. A long run is a piece; short ones in a row are one piece with an index,
    whose tokens ascend.
    """
    if not len(sides[0].peer):
        return [{} for _ in sides]
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


def _pieces(runs: Runs, starts: Ints) -> Pieces:
    """Runs [starts[i], starts[i + 1]) as one piece each; without an index where they are one block."""
    counts = np.diff(starts, append=len(runs.peer))
    heads = runs.take(starts)
    num_tokens = np.add.reduceat(runs.length, starts)
    span = (runs.ends[starts + counts - 1] - heads.first) // heads.stride
    indexed = num_tokens != span
    tokens = iter(_indices(runs.take(np.repeat(indexed, counts)), heads.first[indexed], counts[indexed]))
    columns = (heads.first, heads.stride, heads.width, num_tokens, span)
    index = (next(tokens) if is_indexed else None for is_indexed in indexed.tolist())
    # Thousands of them: a named tuple's own constructors would take half of the time of a route.
    new_piece = partial(tuple.__new__, Piece)
    pieces: list[Piece] = list(map(new_piece, zip(*(column.tolist() for column in columns), index, strict=True)))
    cuts = np.flatnonzero(np.append(True, ~_same(heads.peer)))
    ends = [*cuts[1:].tolist(), len(pieces)]
    return {int(heads.peer[lo]): pieces[lo:hi] for lo, hi in zip(cuts.tolist(), ends, strict=True)}


def _indices(runs: Runs, first: Ints, counts: Ints) -> Sequence[Tensor]:
    """The tokens of each piece of `counts` runs, counted from its first row, int64 [tokens] each."""
    if not len(counts):
        return ()
    begins = (runs.first - np.repeat(first, counts)) // runs.stride
    ends = np.cumsum(runs.length)
    tokens = np.arange(ends[-1]) + np.repeat(begins - ends + runs.length, runs.length)
    return torch.from_numpy(tokens).split(np.diff(ends[np.cumsum(counts) - 1], prepend=0).tolist())
