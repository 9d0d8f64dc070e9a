"""What lies where on the wire: rows of several tensors in one flat buffer, by peer, then tensor, then piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.kernels.pieces import Moves, Pieces
from layerwise.plan import Ints
from layerwise.route import RowMap, Side


@dataclass(frozen=True, eq=False)
class Wire:
    """One exchange as copies, each with one entry per tensor.

    pack: elements of rows to those of the send buffer; stay: this rank's own rows to their place; unpack: elements of
    the receive buffer to those of rows. send_splits, recv_splits: elements per peer, none to ourselves.
    """

    pack: tuple[Moves, ...]
    stay: tuple[Moves, ...]
    unpack: tuple[Moves, ...]
    send_splits: list[int]
    recv_splits: list[int]


def wire_of(maps: tuple[RowMap, ...], widths: tuple[int, ...], me: int, num_peers: int) -> Wire:
    """The exchange of tensors with these row widths; remembered by the first map, which has the same others always."""
    wires = maps[0].wires
    if widths not in wires:
        pack, send_splits = _lay_out([m.src for m in maps], widths, me, num_peers)
        unpack, recv_splits = _lay_out([m.dst for m in maps], widths, me, num_peers)
        own = zip(*(_own_pieces([getattr(m, end) for m in maps], widths, me) for end in ("src", "dst")), strict=True)
        wires[widths] = Wire(
            pack=tuple(Moves(rows, flat) for rows, flat in pack),
            stay=tuple(Moves(source, target) for source, target in own),
            unpack=tuple(Moves(flat, rows) for rows, flat in unpack),
            send_splits=send_splits,
            recv_splits=recv_splits,
        )
    return wires[widths]


def _own_pieces(sides: Sequence[Side], widths: tuple[int, ...], me: int) -> list[Pieces]:
    return [side.pieces.take(side.peer == me).in_elements(w) for side, w in zip(sides, widths, strict=True)]


def _lay_out(
    sides: Sequence[Side], widths: tuple[int, ...], me: int, num_peers: int
) -> tuple[list[tuple[Pieces, Pieces]], list[int]]:
    """For each tensor the pieces of other peers and where they lie in the buffer, and the elements per peer."""
    rows = [side.pieces.take(side.peer != me).in_elements(w) for side, w in zip(sides, widths, strict=True)]
    ends = np.cumsum([len(pieces) for pieces in rows])
    peer, sizes = (np.concatenate(a) for a in ([side.peer[side.peer != me] for side in sides], [r.sizes for r in rows]))
    order = np.argsort(peer, kind="stable")
    first = np.empty_like(sizes)
    first[order] = np.cumsum(sizes[order]) - sizes[order]
    splits = np.zeros(num_peers, np.int64)
    np.add.at(splits, peer, sizes)
    return [(r, _flat(r, f)) for r, f in zip(rows, np.split(first, ends[:-1]), strict=True)], splits.tolist()


def _flat(pieces: Pieces, first: Ints) -> Pieces:
    """Where the same elements lie in a buffer, token after token from these elements on."""
    width, num_tokens = pieces.table[:, 2], pieces.table[:, 3]
    table = np.stack([first, width, width, num_tokens, num_tokens, np.full_like(first, -1)], axis=1)
    return Pieces(table, pieces.listed)
