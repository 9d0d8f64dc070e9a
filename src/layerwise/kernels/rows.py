"""Rows of tensors to and from the flat buffers of an exchange, piece by piece.

A piece is some tokens of a tensor, and of each some neighbouring rows. Long runs of tokens are copied as a block; short
ones that follow one another share an index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerwise.plan import Ints


class Block(NamedTuple):
    """One piece: a view [tokens, width] of a tensor's elements, by size, strides and first element.

    tokens: int64, which tokens of the view the piece has; without it, all.
    """

    size: tuple[int, int]
    strides: tuple[int, int]
    first: int
    tokens: Tensor | None


@dataclass(frozen=True, eq=False)
class Pieces:
    """Pieces of a contiguous tensor, in units of its rows or of its elements.

    table: int64 [pieces, 6] of first, stride, width, num_tokens, span, begin. Token t of a piece has the units
        first + t * stride + [0, width), for t in [0, span). The piece has the `num_tokens` tokens that are listed from
        `begin`, distinct; where `begin` is -1, all.
    listed: int64, tokens of the pieces that do not have all.
    """

    table: Ints
    listed: Tensor

    def __len__(self) -> int:
        return len(self.table)

    @property
    def sizes(self) -> Ints:
        """Units of each piece."""
        sizes: Ints = self.table[:, 2] * self.table[:, 3]
        return sizes

    def take(self, index: NDArray[np.bool_]) -> Pieces:
        """Some of the pieces."""
        return Pieces(self.table[index], self.listed)

    def in_elements(self, width: int) -> Pieces:
        """The same pieces of rows in elements, where a row has `width`."""
        return Pieces(self.table * np.array([width, width, width, 1, 1, 1]), self.listed)

    def to(self, device: torch.device) -> Pieces:
        """The same pieces with their index on another device."""
        return Pieces(self.table, self.listed.to(device, non_blocking=True))

    def same_rows(self, other: Pieces) -> bool:
        """Whether both are known to be the same rows in the same order."""
        all_tokens = (self.table[:, 5] < 0).all() and (other.table[:, 5] < 0).all()
        return bool(all_tokens) and np.array_equal(self.table, other.table)

    @property
    def blocks(self) -> list[Block]:
        """The pieces one by one."""
        return [
            Block((span, width), (stride, 1), first, None if begin < 0 else self.listed[begin : begin + num_tokens])
            for first, stride, width, num_tokens, span, begin in self.table.tolist()
        ]


@dataclass(frozen=True, eq=False)
class Moves:
    """Pieces of one tensor that become pieces of another, both in elements: as many tokens, with as many of each."""

    sources: Pieces
    targets: Pieces

    @cached_property
    def blocks(self) -> list[tuple[Block, Block]]:
        """One by one, what becomes what."""
        return list(zip(self.sources.blocks, self.targets.blocks, strict=True))


def move_rows(x: Tensor, out: Tensor, moves: Moves, *, add: bool) -> None:
    """Copy, or add, elements of x to elements of out; both contiguous, of any shape. Targets may overlap to add."""
    if x.is_cuda and _has_triton():
        from layerwise.kernels.rows_triton import move_rows_triton

        move_rows_triton(x, out, moves, add=add)
        return
    x_begin, out_begin = x.storage_offset(), out.storage_offset()
    for source, target in moves.blocks:
        rows = x.as_strided(source.size, source.strides, x_begin + source.first)
        place = out.as_strided(target.size, target.strides, out_begin + target.first)
        if source.tokens is target.tokens is None and not add:
            place.copy_(rows)
        else:
            _move_listed(rows, place, source.tokens, target.tokens, add)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _move_listed(rows: Tensor, place: Tensor, source: Tensor | None, target: Tensor | None, add: bool) -> None:
    """Tokens of `rows` [span, width] to tokens of `place` [span', width], of either all where none are listed."""
    if source is not None and target is None and not add:
        torch.index_select(rows, 0, source, out=place)
        return
    if source is not None:
        rows = rows.index_select(0, source)
    if target is None:
        place.add_(rows) if add else place.copy_(rows)
    elif add:
        place.index_add_(0, target, rows.to(place.dtype))
    else:
        place.index_copy_(0, target, rows)
