"""Rows of tensors to and from the flat buffers of an exchange, piece by piece.

Long runs of tokens are copied as a block; short ones that follow one another share an index.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from layerwise.kernels.pieces import Moves

# What a move holds at a time of rows that are listed on both sides, or converted; it stays in the cache.
SCRATCH_ELEMENTS = 1 << 15


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
    # Torch has no call for what is listed on both sides, nor one that converts and adds: some tokens after others.
    num_tokens, width = rows.shape if source is None else (len(source), rows.shape[1])
    step = max(1, num_tokens if source is None and not add else SCRATCH_ELEMENTS // width)
    for first in range(0, num_tokens, step):
        part = slice(first, first + step)
        if target is None:
            place[part].add_(_some(rows, source, part))
        elif add:
            place.index_add_(0, target[part], _some(rows, source, part).to(place.dtype))
        else:
            place.index_copy_(0, target[part], _some(rows, source, part))


def _some(rows: Tensor, source: Tensor | None, part: slice) -> Tensor:
    return rows[part] if source is None else rows.index_select(0, source[part])
