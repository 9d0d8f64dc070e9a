"""What lies where on the wire: rows of several tensors in one flat buffer, by peer, then tensor, then piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from layerwise.kernels.rows import Moves, Piece
from layerwise.route import RowMap, Side


@dataclass(frozen=True, eq=False)
class Wire:
    """One exchange as copies, each with one entry per tensor.

    pack: rows to the elements of the send buffer; stay: this rank's own rows to their place; unpack: elements of the
    receive buffer to rows. send_splits, recv_splits: elements per peer, none to ourselves.
    """

    pack: tuple[Moves, ...]
    stay: tuple[Moves, ...]
    unpack: tuple[Moves, ...]
    send_splits: list[int]
    recv_splits: list[int]


def wire_of(maps: tuple[RowMap, ...], widths: tuple[int, ...], me: int) -> Wire:
    """The exchange of tensors with these row widths; remembered by the first map, which has the same others always."""
    wires = maps[0].wires
    if widths not in wires:
        pack, send_splits = _lay_out([m.src for m in maps], widths, me)
        unpack, recv_splits = _lay_out([m.dst for m in maps], widths, me)
        wires[widths] = Wire(
            pack=tuple(Moves(rows, flat) for rows, flat in pack),
            stay=tuple(Moves(m.src.pieces[me], m.dst.pieces[me]) for m in maps),
            unpack=tuple(Moves(flat, rows) for rows, flat in unpack),
            send_splits=send_splits,
            recv_splits=recv_splits,
        )
    return wires[widths]


def _lay_out(
    sides: Sequence[Side], widths: tuple[int, ...], me: int
) -> tuple[list[tuple[tuple[Piece, ...], tuple[Piece, ...]]], list[int]]:
    """For each tensor its pieces and where they lie in the buffer, and the elements per peer."""
    rows: list[list[Piece]] = [[] for _ in sides]
    flat: list[list[Piece]] = [[] for _ in sides]
    ends, offset = [0], 0
    for peer in range(len(sides[0].pieces)):
        for index, (side, width) in enumerate(zip(sides, widths, strict=True)):
            for piece in side.pieces[peer] if peer != me else ():
                size = piece.width * width
                rows[index].append(piece)
                flat[index].append(Piece(offset, size, size, piece.num_tokens, piece.num_tokens))
                offset += piece.num_tokens * size
        ends.append(offset)
    splits = [end - begin for begin, end in pairwise(ends)]
    return [(tuple(r), tuple(f)) for r, f in zip(rows, flat, strict=True)], splits
