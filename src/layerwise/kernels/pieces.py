"""Pieces of tensors, and what becomes what: some tokens each, and of each token some neighbouring rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
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
