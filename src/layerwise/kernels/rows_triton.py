"""Moves of rows in one kernel launch per tensor, on CUDA; and on the CPU in Triton's interpreter, for tests.

The pieces are cut into chunks of a few tokens, one program each. Copies of all pieces run at once. Pieces that are
added may name the same rows, so they run one after another: sums have one order, and no atomics.
"""

from __future__ import annotations

from itertools import pairwise
from math import gcd
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from layerwise.kernels.pieces import Moves, Pieces
from layerwise.plan import Ints

CHUNK_TOKENS = 16
BLOCK_ELEMENTS = 128
MAX_ALIGN = 8  # elements; 16 bytes of bfloat16


@triton.jit
def _move_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    chunks_ptr,
    index_ptr,
    ADD: tl.constexpr,
    TOKENS: tl.constexpr,
    ELEMENTS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One chunk: x_first, x_stride, x_index, out_first, out_stride, out_index, num_tokens, num_elements per token.

    Firsts, strides and num_elements are multiples of ALIGN, so that loads and stores may be of several elements.
    """
    chunk = chunks_ptr + tl.program_id(0) * 8
    lane = tl.arange(0, TOKENS)
    is_token = lane < tl.load(chunk + 6)
    num_elements = tl.multiple_of(tl.load(chunk + 7), ALIGN)
    rows = x_ptr + _offsets(chunk, index_ptr, lane, is_token, ALIGN)
    places = out_ptr + _offsets(chunk + 3, index_ptr, lane, is_token, ALIGN)
    for start in range(0, num_elements, ELEMENTS):
        element = start + tl.arange(0, ELEMENTS)
        mask = is_token[:, None] & (element < num_elements)[None, :]
        values = tl.load(rows[:, None] + element[None, :], mask=mask)
        target = places[:, None] + element[None, :]
        if ADD:
            values = tl.load(target, mask=mask) + values.to(out_ptr.dtype.element_ty)
        tl.store(target, values, mask=mask)


@triton.jit
def _offsets(side, index_ptr, lane, is_token, ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]
    """The first element of each token: of those in the index, or where it begins at 0 as they come."""
    begin = tl.load(side + 2)
    listed = tl.load(index_ptr + begin + lane, mask=is_token, other=0)
    token = tl.where(begin + lane * 0 > 0, listed, lane)
    return tl.multiple_of(tl.load(side), ALIGN) + token * tl.multiple_of(tl.load(side + 1), ALIGN)


class _Launches(NamedTuple):
    """chunks: int64 [chunks, 8], see the kernel. listed: int64 tokens, first a chunk of zeros for pieces without any.

    ends: the number of chunks up to the end of each piece. align: divides all offsets, a power of two.
    """

    chunks: Tensor
    listed: Tensor
    ends: list[int]
    align: int


_launches: WeakKeyDictionary[Moves, _Launches] = WeakKeyDictionary()


def move_rows_triton(x: Tensor, out: Tensor, moves: Moves, *, add: bool) -> None:
    """See move_rows."""
    if not len(moves.sources):
        return
    if moves not in _launches:
        _launches[moves] = _prepare(moves, x.device)
    chunks, listed, ends, align = _launches[moves]
    cuts = [0, *ends] if add else [0, ends[-1]]
    for begin, end in pairwise(cuts):
        _move_kernel[(end - begin,)](x, out, chunks[begin:], listed, add, CHUNK_TOKENS, BLOCK_ELEMENTS, align)


def _prepare(moves: Moves, device: torch.device) -> _Launches:
    """Offsets and strides in elements."""
    width, num_tokens = moves.sources.table[:, 2], moves.sources.table[:, 3]
    counts = -(-num_tokens // CHUNK_TOKENS)
    ends = np.cumsum(counts)
    begin = (np.arange(ends[-1]) - np.repeat(ends - counts, counts)) * CHUNK_TOKENS
    length = np.minimum(np.repeat(num_tokens, counts) - begin, CHUNK_TOKENS)
    columns, indices = [], [torch.zeros(CHUNK_TOKENS, dtype=torch.int64, device=device)]
    for pieces in (moves.sources, moves.targets):
        columns += _places(pieces, counts, begin, sum(map(len, indices)))
        indices.append(pieces.listed)
    chunks = np.stack([*columns, length, np.repeat(width, counts)], axis=1)
    align = gcd(MAX_ALIGN, int(np.gcd.reduce(chunks[:, [0, 1, 3, 4, 7]], axis=None)))
    return _Launches(torch.from_numpy(chunks).to(device, non_blocking=True), torch.cat(indices), ends.tolist(), align)


def _places(pieces: Pieces, counts: Ints, begin: Ints, listed: int) -> list[Ints]:
    """First element, elements per token, and begin in the index, or 0, of every chunk; int64 [chunks] each.

    listed: where in the index the pieces' listed tokens begin.
    """
    first, stride, index = (np.repeat(pieces.table[:, column], counts) for column in (0, 1, 5))
    is_listed = index >= 0
    return [first + np.where(is_listed, 0, begin * stride), stride, np.where(is_listed, listed + index + begin, 0)]
