"""An attention site in parts, so that the rows of some travel while another part's attention computes.

The runtime builds its routes from these parts and the cost model predicts from them, as with `traffic`.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from layerwise.plan import Ints, Table, Tile, tile_table
from layerwise.spec import AttentionSpec


def split_tiles(tiles: Table[Tile], spec: AttentionSpec, num_parts: int) -> tuple[Table[Tile], ...]:
    """`num_parts` tables with all tiles' work between them; some may lack tiles of some ranks, or have none.

    Samples whose tiles all have two KV heads or more are cut by heads, never inside a KV group, so no row of K or V
    travels twice. Others go to one part whole, balanced among the samples that have the same lowest rank.
    """
    kv0, kv1 = spec.kv_range(tiles.column("h0"), tiles.column("h1"))
    sample = tiles.column("sample")
    fewest_heads = np.full(int(sample.max(initial=-1)) + 1, spec.num_kv_heads)
    np.minimum.at(fewest_heads, sample, kv1 - kv0)
    is_cut = fewest_heads[sample] > 1
    cut, whole = tiles.rows[is_cut], tiles.rows[~is_cut]
    kv0, num_kv = kv0[is_cut], (kv1 - kv0)[is_cut]
    part_of_row = _balance(whole, num_parts)
    tables = []
    for part in range(num_parts):
        begin, end = (kv0 + num_kv * p // num_parts for p in (part, part + 1))
        rows = cut.copy()
        rows[:, 5], rows[:, 6] = begin * spec.queries_per_kv, end * spec.queries_per_kv
        tables.append(tile_table(np.concatenate([rows[begin < end], whole[part_of_row == part]])))
    return tuple(tables)


def _balance(rows: Ints, num_parts: int) -> Ints:
    """The part of each of these tiles, int64 [tiles]: samples in order of work, each to the part that has least."""
    samples, index = np.unique(rows[:, 0], return_inverse=True)
    _, rank, q0, q1, k0, h0, h1 = rows.T
    tile_work = (q1 - q0).astype(np.float64) * (q1 - k0) * (h1 - h0)
    work = np.bincount(index, weights=tile_work, minlength=len(samples))
    lowest = np.full(len(samples), rank.max(initial=0))
    np.minimum.at(lowest, index, rank)
    loads: dict[int, list[float]] = defaultdict(lambda: [0.0] * num_parts)
    part_of = np.zeros(len(samples), dtype=np.int64)
    order = np.argsort(-work, kind="stable")
    for sample, first_rank, more in zip(order.tolist(), lowest[order].tolist(), work[order].tolist(), strict=True):
        load = loads[first_rank]
        part_of[sample] = part = load.index(min(load))
        load[part] += more
    return part_of[index]
