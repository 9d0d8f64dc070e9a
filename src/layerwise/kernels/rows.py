"""Rows of tensors to and from the flat buffers of an exchange, piece by piece.

Long runs of tokens are copied as a block; short ones that follow one another share an index.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from layerwise.kernels.pieces import Moves


def move_rows(x: Tensor, out: Tensor, moves: Moves, *, add: bool) -> None:
    """Copy, or add, elements of x to elements of out; both contiguous, of any shape. Targets may overlap to add."""
    if x.is_cuda and _has_triton():
        from layerwise.kernels.rows_triton import move_rows_triton  # imports triton

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
