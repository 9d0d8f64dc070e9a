"""Cutting an attention site into parts, so that one part's rows travel while another part's attention computes."""

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
    part_of_sample = _balance(tiles.rows[~is_cut], num_parts)
    tables = []
    for part in range(num_parts):
        rows = tiles.rows[is_cut]
        begin, end = ((kv0 + (kv1 - kv0) * p // num_parts)[is_cut] for p in (part, part + 1))
        rows[:, 5], rows[:, 6] = begin * spec.queries_per_kv, end * spec.queries_per_kv
        whole = tiles.rows[~is_cut & np.isin(sample, [s for s, p in part_of_sample.items() if p == part])]
        tables.append(tile_table(np.concatenate([rows[begin < end], whole])))
    return tuple(tables)


def _balance(rows: Ints, num_parts: int) -> dict[int, int]:
    """The part of each sample of these tiles: largest first, each to the part that has the least."""
    work: dict[int, int] = defaultdict(int)
    lowest: dict[int, int] = {}
    for sample, rank, q0, q1, k0, h0, h1 in rows.tolist():
        work[sample] += (q1 - q0) * (q1 - k0) * (h1 - h0)
        lowest[sample] = min(rank, lowest.get(sample, rank))
    loads: dict[int, list[int]] = defaultdict(lambda: [0] * num_parts)
    parts = {}
    for sample in sorted(work, key=lambda s: (-work[s], s)):
        load = loads[lowest[sample]]
        parts[sample] = load.index(min(load))
        load[parts[sample]] += work[sample]
    return parts
