"""Rows of tensors to and from the flat buffers of an exchange, piece by piece.

A piece is some tokens of a tensor, and of each some neighbouring rows. Long runs of tokens are copied as a block; short
ones that follow one another share an index.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor


class Piece(NamedTuple):
    """`num_tokens` x `width` rows of a contiguous [rows, C] tensor.

    Token t has rows first + t * stride + [0, width), for t in [0, span). The piece has the tokens that `tokens` lists,
    int64 [num_tokens] and distinct; without it, all of them.
    """

    first: int
    stride: int
    width: int
    num_tokens: int
    span: int
    tokens: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Rows of the piece."""
        return self.num_tokens * self.width

    def to(self, device: torch.device) -> Piece:
        """The same piece with its index on another device."""
        return self if self.tokens is None else self._replace(tokens=self.tokens.to(device, non_blocking=True))

    def same_rows(self, other: Piece) -> bool:
        """Whether both are known to name the same rows in the same order."""
        places = {(p.first, p.stride, p.width, p.num_tokens) for p in (self, other)}
        return self.tokens is None and other.tokens is None and len(places) == 1

    def block(self, x: Tensor) -> Tensor:
        """The view of x [rows, C] that holds the piece: [span, width * C]."""
        num_columns = x.shape[1]
        return x.as_strided(
            (self.span, self.width * num_columns),
            (self.stride * num_columns, 1),
            x.storage_offset() + self.first * num_columns,
        )


@dataclass(frozen=True, eq=False)
class Moves:
    """Pieces of one tensor that become pieces of another, each as many tokens with as many elements of each.

    The rows of the two tensors may be of different width: those of a flat buffer are its elements.
    """

    sources: tuple[Piece, ...]
    targets: tuple[Piece, ...]


def move_rows(x: Tensor, out: Tensor, moves: Moves, *, add: bool) -> None:
    """Copy, or add, rows of x [rows, C] to rows of out [rows', C']; both contiguous. Targets may overlap to add."""
    if x.is_cuda and _has_triton():
        from layerwise.kernels.rows_triton import move_rows_triton

        move_rows_triton(x, out, moves, add=add)
        return
    for source, target in zip(moves.sources, moves.targets, strict=True):
        _move(x, out, source, target, add)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _move(x: Tensor, out: Tensor, source: Piece, target: Piece, add: bool) -> None:
    rows, place = source.block(x), target.block(out)
    if source.tokens is not None and target.tokens is None and not add:
        torch.index_select(rows, 0, source.tokens, out=place)
        return
    if source.tokens is not None:
        rows = rows.index_select(0, source.tokens)
    if target.tokens is None:
        place.add_(rows) if add else place.copy_(rows)
    elif add:
        place.index_add_(0, target.tokens, rows.to(out.dtype))
    else:
        place.index_copy_(0, target.tokens, rows)
