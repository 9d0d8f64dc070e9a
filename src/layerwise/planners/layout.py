"""From groups to Shards and Tiles: cut samples into equal parts, and heads or queries into equal work.

Any length divides over any group (13 over 4 is 4, 3, 3, 3), KV groups are never torn, and no row is empty.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from layerwise.plan import Ints, MicrobatchPlan, Parent, Shard, Tile, shard_table, tile_table
from layerwise.spec import FULL, AttentionSpec


@dataclass(frozen=True, eq=False)
class Placement:
    """Sample `sample[i]` is shared by the ranks [first[i], first[i] + degree[i]); int64 [samples] each."""

    sample: Ints
    first: Ints
    degree: Ints


def place(parents: Sequence[Parent]) -> Placement:
    """Every sample on all ranks of its group."""
    counts = [len(parent.samples) for parent in parents]
    samples = np.fromiter(chain.from_iterable(parent.samples for parent in parents), np.int64, sum(counts))
    first, degree = (
        np.repeat(np.array([getattr(parent, name) for parent in parents], dtype=np.int64), counts)
        for name in ("first_rank", "sp_degree")
    )
    return Placement(samples, first, degree)


def lay_out(
    lengths: Ints,
    attention: Mapping[str, AttentionSpec],
    parents: Iterable[Parent],
    children: Mapping[Parent, Placement] | None = None,
) -> MicrobatchPlan:
    """The micro-batch of these groups.

    A parent in `children` keeps its full-attention tiles on all its ranks, while its samples' shards, and
    their tiles of all other layer kinds, go where the children say.
    """
    children, parents = children or {}, sorted(parents, key=lambda p: p.first_rank)
    wide = owners = batched(place(parents), lengths)
    if children:
        parts = [place([parent for parent in parents if parent not in children]), *children.values()]
        columns = (np.concatenate([getattr(p, name) for p in parts]) for name in ("sample", "first", "degree"))
        owners = batched(Placement(*columns), lengths)
    return MicrobatchPlan(
        shards=shard_table(shard_rows(owners)),
        tiles={kind: tile_table(tile_rows(wide if kind == FULL else owners, spec)) for kind, spec in attention.items()},
        parents=tuple(_marked(parent, bool(children) and parent in children) for parent in parents if parent.samples),
    )


def _marked(parent: Parent, repacked: bool) -> Parent:
    return parent if parent.repacked == repacked else replace(parent, repacked=repacked)


class Batch(NamedTuple):
    """The samples of one SP degree; `turn` numbers the samples of each group, longest first. int64 [samples] each."""

    degree: int
    sample: Ints
    first: Ints
    length: Ints
    turn: Ints
    begins: Ints  # the first sample of the sample's group

    def rows(self, *columns: Ints) -> Ints:
        """Rows of a table, int64 [samples x degree, columns]; a column broadcasts to [samples, degree]."""
        table = np.empty((len(self.sample), self.degree, len(columns)), dtype=np.int64)
        for index, column in enumerate(columns):
            table[..., index] = column
        return table.reshape(-1, len(columns))


def batched(placement: Placement, lengths: Ints) -> list[Batch]:
    """The samples placed, by their SP degree."""
    batches = []
    for degree in np.unique(placement.degree).tolist():
        chosen = np.flatnonzero(placement.degree == degree)
        sample, first = placement.sample[chosen], placement.first[chosen]
        order = np.lexsort([sample, -lengths[sample], first])
        sample, first = sample[order], first[order]
        starts = np.diff(first, prepend=-1) != 0
        begins = np.maximum.accumulate(np.where(starts, np.arange(len(first)), 0))
        batches.append(Batch(degree, sample, first, lengths[sample], np.arange(len(first)) - begins, begins))
    return batches


def shard_rows(batches: Iterable[Batch]) -> Ints:
    """Shard rows, int64 [shards, 4]: each sample in equal contiguous parts on its ranks.

    Samples that share a group take turns in who gets the tokens left over, so a group's ranks differ by one
    at most.
    """
    rows = [np.zeros((0, len(Shard._fields)), dtype=np.int64)]
    for batch in batches:
        base, extra = np.divmod(batch.length, batch.degree)
        before = np.cumsum(extra) - extra
        offset = before - before[batch.begins]
        position = np.arange(batch.degree)
        sizes = base[:, None] + ((position - offset[:, None]) % batch.degree < extra[:, None])
        hi = np.cumsum(sizes, axis=1)
        table = batch.rows(batch.sample[:, None], batch.first[:, None] + position, hi - sizes, hi)
        rows.append(table[sizes.reshape(-1) > 0])
    return np.concatenate(rows)


def level_shard_rows(placement: Placement, lengths: Ints, num_ranks: int) -> Ints:
    """Shard rows, int64 [shards, 4]: each sample in contiguous parts that leave the ranks of its block level.

    Narrow samples first, so that the widest, which can reach most ranks, fill what the others left. No rank ends with
    more tokens than equal parts would give the fullest.
    """
    alone = placement.degree == 1
    own, rank = placement.sample[alone], placement.first[alone]
    rows = [np.stack([own, rank, lengths[own] * 0, lengths[own]], axis=1)]
    tokens = np.bincount(rank, weights=lengths[own], minlength=num_ranks).astype(np.int64)
    for index in np.lexsort([placement.sample, -lengths[placement.sample], placement.degree])[
        int(alone.sum()) :
    ].tolist():
        sample, first, degree = (int(column[index]) for column in vars(placement).values())
        parts = pour_level(int(lengths[sample]), tokens[first : first + degree])
        tokens[first : first + degree] += parts
        hi = np.cumsum(parts)
        ranks = np.arange(first, first + degree)
        rows.append(np.stack([np.full(degree, sample), ranks, hi - parts, hi], axis=1)[parts > 0])
    return np.concatenate(rows)


def pour_level(amount: int, heights: Ints) -> Ints:
    """`amount` in parts, int64 [heights], that raise the lowest heights to one level, as water would, to within 1."""
    order = np.argsort(heights, kind="stable")
    low = heights[order]
    # With the k lowest raised to the next one's height, this much is used.
    used = np.arange(len(low)) * low - (np.cumsum(low) - low)
    count = int(np.searchsorted(used, amount, side="right"))
    level, extra = divmod(amount + int(low[:count].sum()), count)
    parts = np.zeros_like(heights)
    parts[order[:count]] = level - low[:count] + (np.arange(count) < extra)
    return parts


class HeadShare(NamedTuple):
    """One rank's share of a sample's attention: heads [h0, h1), part `part` of `parts` of the queries."""

    h0: int
    h1: int
    part: int
    parts: int

    @property
    def heads(self) -> float:
        """The share in heads."""
        return (self.h1 - self.h0) / self.parts


@lru_cache(maxsize=1024)
def head_shares(degree: int, spec: AttentionSpec) -> tuple[HeadShare, ...]:
    """The shares of `degree` ranks, largest first.

    Whole KV groups while there are enough; then query heads of one KV group; then query ranges of one head, except
    that a linear mixer needs its samples whole: ranks beyond its heads get a share without heads.
    """
    size = spec.queries_per_kv
    used = min(degree, spec.num_heads) if spec.linear else degree
    if used <= spec.num_kv_heads:
        shares = [HeadShare(lo * size, hi * size, 0, 1) for lo, hi in _even_ranges(spec.num_kv_heads, used)]
    else:
        shares = []
        for kv_head, (lo, hi) in enumerate(_even_ranges(used, spec.num_kv_heads)):
            shares += _shares_of_kv_group(kv_head * size, size, hi - lo)
    shares += [HeadShare(0, 0, 0, 1)] * (degree - used)
    return tuple(sorted(shares, key=lambda share: -share.heads))


def _shares_of_kv_group(first_head: int, num_heads: int, num_ranks: int) -> list[HeadShare]:
    if num_ranks <= num_heads:
        return [HeadShare(first_head + lo, first_head + hi, 0, 1) for lo, hi in _even_ranges(num_heads, num_ranks)]
    shares = []
    for head, (lo, hi) in enumerate(_even_ranges(num_ranks, num_heads), start=first_head):
        shares += [HeadShare(head, head + 1, part, hi - lo) for part in range(hi - lo)]
    return shares


def _even_ranges(total: int, parts: int) -> list[tuple[int, int]]:
    """[0, total) in `parts` ranges whose sizes differ by one at most, larger ones first."""
    base, extra = divmod(total, parts)
    ends = [base * i + min(i, extra) for i in range(parts + 1)]
    return list(pairwise(ends))


def tile_rows(batches: Iterable[Batch], spec: AttentionSpec) -> Ints:
    """Tile rows, int64 [tiles, 7]: each sample's queries x heads on its ranks, in shares of equal work.

    Where shares are unequal, samples that share a group take turns in who gets the larger ones.
    """
    rows = [np.zeros((0, len(Tile._fields)), dtype=np.int64)]
    for batch in batches:
        shares = head_shares(batch.degree, spec)
        num_larger = sum(share.heads > shares[-1].heads for share in shares)
        cuts = {parts: query_cuts(batch.length, parts, spec) for parts in {share.parts for share in shares}}
        q0, q1 = (np.stack([cuts[s.parts][:, s.part + end] for s in shares], axis=1) for end in (0, 1))
        position = (np.arange(batch.degree) + (batch.turn * num_larger)[:, None]) % batch.degree
        h0, h1 = (np.array(heads) for heads in zip(*((s.h0, s.h1) for s in shares), strict=True))
        table = batch.rows(batch.sample[:, None], batch.first[:, None] + position, q0, q1, spec.first_key(q0), h0, h1)
        rows.append(table[((q0 < q1) & (h0 < h1)).reshape(-1)])
    return np.concatenate(rows)


def halo_tile_rows(shards: Ints, spec: AttentionSpec) -> Ints:
    """Tile rows, int64 [shards, 7]: each shard's own queries with all heads, and the earlier keys that they see.

    Where the mask is narrow, only the last keys before the shard travel: the halo.
    """
    sample, rank, lo, hi = shards.T
    heads = np.full_like(lo, spec.num_heads)
    return np.stack([sample, rank, lo, hi, spec.first_key(lo), np.zeros_like(lo), heads], axis=1)


def query_cuts(lengths: Ints, parts: int, spec: AttentionSpec) -> Ints:
    """Cuts of each sample's queries into parts of equal attention pairs, int64 [samples, parts + 1]."""
    if parts == 1:
        return np.stack([lengths * 0, lengths], axis=1)
    goal = spec.pairs(lengths * 0, lengths)[:, None] * np.arange(parts + 1) // parts
    low, high = np.zeros_like(goal), np.broadcast_to(lengths[:, None], goal.shape)
    while (low < high).any():
        middle = (low + high) // 2
        enough = spec.pairs(middle * 0, middle) >= goal
        low, high = np.where(enough, low, np.minimum(middle + 1, high)), np.where(enough, middle, high)
    return low
