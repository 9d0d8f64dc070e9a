"""The plan of one optimizer step: which rank holds which tokens, and which rank computes which attention.

    StepPlan
      lengths                      tokens of each sample of the step
      attention                    {layer kind: AttentionSpec}
      microbatches: MicrobatchPlan
        shards   (sample, rank, lo, hi)              the rank owns tokens [lo, hi): the home of hidden states
        shards_by_kind  {layer kind: shards}         kinds whose layers keep hidden states elsewhere; mostly none
        tiles    {layer kind: (sample, rank, q0, q1, k0, h0, h1)}
                 the rank computes queries [q0, q1) x keys [k0, q1) x query heads [h0, h1)
        parents  the wide groups that the tiles of full-attention layers came from, for reports

A plan holds all ranks' work, so it can be checked as a whole, hashed, printed and stored. Tables are columns (numpy),
since a step may have hundreds of thousands of rows; iterating one yields Shard and Tile records.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field, fields
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import PlanError
from layerwise.spec import MAX_OVERLAP_PARTS, AttentionSpec

Ints = NDArray[np.int64]

# Where hidden states lie before the first layer and after the last, and in layers of kinds without shards of their own.
HOME = "home"


class Shard(NamedTuple):
    """The rank owns tokens [lo, hi) of the sample."""

    sample: int
    rank: int
    lo: int
    hi: int


class Tile(NamedTuple):
    """The rank computes attention of queries [q0, q1) over keys [k0, q1) for query heads [h0, h1)."""

    sample: int
    rank: int
    q0: int
    q1: int
    k0: int
    h0: int
    h1: int


RowT = TypeVar("RowT", Shard, Tile)
MAX_KEY_BITS = 62


class Table(Generic[RowT]):
    """Read-only int64 columns of Shard or Tile rows, sorted so that equal plans are equal bytes."""

    def __init__(self, row_type: type[RowT], rows: Ints | Iterable[RowT], order: tuple[str, ...]) -> None:
        array = np.asarray(rows if isinstance(rows, np.ndarray) else list(rows), dtype=np.int64)
        array = array.reshape(-1, len(row_type._fields))
        columns = [array[:, row_type._fields.index(name)] for name in order]
        self.rows: Ints = np.ascontiguousarray(array[_row_order(columns)])
        self.rows.setflags(write=False)
        self.row_type: type[RowT] = row_type

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[RowT]:
        return (self.row_type(*row) for row in self.rows.tolist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Table) and self.row_type is other.row_type and np.array_equal(self.rows, other.rows)

    __hash__ = None  # type: ignore[assignment]

    def take(self, mask: NDArray[np.bool_]) -> Table[RowT]:
        """Some of the rows, bool [rows]."""
        part = copy(self)
        part.rows = self.rows[mask]
        part.rows.setflags(write=False)
        return part

    def column(self, name: str) -> Ints:
        """One field of every row, int64 [rows]."""
        return self.rows[:, self.row_type._fields.index(name)]


def _row_order(columns: list[Ints]) -> Ints:
    """Sorts rows by the first column, then the next: by one number for as many columns as that holds, mostly all."""
    if not len(columns[0]):
        return np.zeros(0, dtype=np.int64)
    key, bits = np.zeros_like(columns[0]), 0
    for column in columns:
        lowest = column.min()
        width = int(column.max() - lowest).bit_length()
        bits += width
        if bits > MAX_KEY_BITS:
            break
        key = (key << width) + (column - lowest)
    order = np.argsort(key, kind="stable")
    key = key[order]
    has_ties = bits > MAX_KEY_BITS and bool((key[1:] == key[:-1]).any())
    return np.lexsort(columns[::-1]) if has_ties else order


def shard_table(rows: Ints | Iterable[Shard]) -> Table[Shard]:
    """Shards sorted by sample, then position: the order in which a rank packs its tokens."""
    return Table(Shard, rows, ("sample", "lo", "hi", "rank"))


def tile_table(rows: Ints | Iterable[Tile]) -> Table[Tile]:
    """Tiles sorted by sample, then heads, then queries."""
    return Table(Tile, rows, ("sample", "h0", "h1", "q0", "q1", "rank", "k0"))


@dataclass(frozen=True, kw_only=True)
class Parent:
    """A group of ranks [first_rank, first_rank + sp_degree) that shares the full attention of its samples."""

    first_rank: int
    sp_degree: int
    samples: tuple[int, ...]
    repacked: bool = False


@dataclass(frozen=True, kw_only=True)
class MicrobatchPlan:
    """One forward and backward pass over some of the step's samples.

    shards: the home: embeddings, LM head and loss, and all layers of kinds that `shards_by_kind` does not name.
    Hidden states move in a pass of their own wherever consecutive layers keep them on different shards.
    """

    shards: Table[Shard]
    tiles: dict[str, Table[Tile]]
    parents: tuple[Parent, ...] = ()
    shards_by_kind: dict[str, Table[Shard]] = field(default_factory=dict)

    @property
    def places(self) -> dict[str, Table[Shard]]:
        """Every table of shards: the home, then those of the kinds that have their own."""
        return {HOME: self.shards, **self.shards_by_kind}

    def shards_at(self, kind: str) -> Table[Shard]:
        """Where hidden states lie in layers of this kind, or at HOME."""
        return self.shards_by_kind.get(kind, self.shards)

    @property
    def samples(self) -> Ints:
        """Step-wide indices of the samples in this micro-batch, ascending."""
        return np.unique(self.shards.column("sample"))

    def tokens_per_rank(self, num_ranks: int, kind: str = HOME) -> Ints:
        """Tokens that each rank holds at home, or in layers of a kind, int64 [num_ranks]."""
        return _tokens_per_rank(self.shards_at(kind), num_ranks)


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """A whole optimizer step.

    notes: counters that the strategy wants reported (fallbacks, moves). layer_types: the kind of every layer of the
    model that it was made for; empty where the planner does not say. overlap_parts: each attention site runs in so many
    parts, whose exchanges run while other parts' attention computes.
    """

    strategy: str
    num_ranks: int
    ranks_per_node: int
    max_tokens_per_rank: int
    lengths: tuple[int, ...]
    attention: dict[str, AttentionSpec]
    microbatches: tuple[MicrobatchPlan, ...]
    notes: dict[str, int] = field(default_factory=dict)
    layer_types: tuple[str, ...] = ()
    overlap_parts: int = 1

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole step."""
        return sum(self.lengths)

    def validate(self) -> None:
        """Raise PlanError unless every token and every attention score is computed exactly once, within budget."""
        if self.overlap_parts not in range(1, MAX_OVERLAP_PARTS + 1):
            raise PlanError(
                f"overlap_parts={self.overlap_parts!r} must be a whole number, 1 (no overlap) to {MAX_OVERLAP_PARTS}"
            )
        lengths = np.asarray(self.lengths, dtype=np.int64)
        seen = np.concatenate([m.samples for m in self.microbatches]) if self.microbatches else np.zeros(0, np.int64)
        if not np.array_equal(np.sort(seen), np.arange(len(lengths))):
            missing = sorted(set(range(len(lengths))) - set(seen.tolist()))
            raise PlanError(
                f"{len(lengths)} samples, each in exactly one micro-batch; missing {missing[:5]}, planned {len(seen)}"
            )
        for index, microbatch in enumerate(self.microbatches):
            where = f"strategy {self.strategy!r}, micro-batch {index}"
            _check_places(microbatch, self.attention, where)
            for place, shards in microbatch.places.items():
                at = where if place == HOME else f"{where}, shards of {place}"
                _check_shards(shards, lengths, self.num_ranks, self.max_tokens_per_rank, at)
            if set(microbatch.tiles) != set(self.attention):
                raise PlanError(
                    f"{where}: tiles for {sorted(microbatch.tiles)}, but the model has {sorted(self.attention)}"
                )
            for kind, tiles in microbatch.tiles.items():
                _check_tiles(
                    tiles,
                    self.attention[kind],
                    lengths,
                    microbatch.samples,
                    self.num_ranks,
                    f"{where}, {kind}",
                )

    def digest(self) -> int:
        """A 63-bit hash of everything that ranks must agree on."""
        size = (self.num_ranks, self.ranks_per_node, self.max_tokens_per_rank, self.overlap_parts)
        head = (self.strategy, *size, self.lengths, self.layer_types)
        state = hashlib.blake2b(repr(head).encode(), digest_size=8)
        for kind, spec in sorted(self.attention.items()):
            state.update(f"{kind}:{spec!r}".encode())
        for microbatch in self.microbatches:
            state.update(b"shards" + microbatch.shards.rows.tobytes())
            for kind, shards in sorted(microbatch.shards_by_kind.items()):
                state.update(f"shards of {kind}".encode() + shards.rows.tobytes())
            for kind, tiles in sorted(microbatch.tiles.items()):
                state.update(kind.encode() + tiles.rows.tobytes())
        return int.from_bytes(state.digest(), "big") >> 1

    def to_json(self) -> str:
        """The plan as JSON text; `from_json` gives an equal plan back."""
        return json.dumps(
            {
                "format": "layerwise-plan-1",
                "strategy": self.strategy,
                "num_ranks": self.num_ranks,
                "ranks_per_node": self.ranks_per_node,
                "max_tokens_per_rank": self.max_tokens_per_rank,
                "lengths": self.lengths,
                "attention": {kind: spec.model_dump() for kind, spec in self.attention.items()},
                "shard_fields": Shard._fields,
                "tile_fields": Tile._fields,
                "microbatches": [
                    {
                        "shards": m.shards.rows.tolist(),
                        "shards_by_kind": {kind: shards.rows.tolist() for kind, shards in m.shards_by_kind.items()},
                        "tiles": {kind: tiles.rows.tolist() for kind, tiles in m.tiles.items()},
                        "parents": [vars(parent) for parent in m.parents],
                    }
                    for m in self.microbatches
                ],
                "notes": self.notes,
                "layer_types": self.layer_types,
                "overlap_parts": self.overlap_parts,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> StepPlan:
        """Read back what `to_json` wrote, validated. Raises PlanError."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data.pop("format") != "layerwise-plan-1":
                raise PlanError("not a layerwise-plan-1 file")
            del data["shard_fields"], data["tile_fields"]
            data["lengths"] = tuple(data["lengths"])
            data["layer_types"] = tuple(data["layer_types"])
            data["attention"] = {kind: AttentionSpec(**spec) for kind, spec in data["attention"].items()}
            data["microbatches"] = tuple(_microbatch_from(m) for m in data["microbatches"])
            plan = cls(**{f.name: data.pop(f.name) for f in fields(cls)}, **data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise PlanError(f"not a readable plan file: {error}") from error
        plan.validate()
        return plan


def _microbatch_from(data: dict[str, Any]) -> MicrobatchPlan:
    return MicrobatchPlan(
        shards=shard_table(np.array(data["shards"], dtype=np.int64)),
        tiles={kind: tile_table(np.array(rows, dtype=np.int64)) for kind, rows in data["tiles"].items()},
        parents=tuple(Parent(**{**p, "samples": tuple(p["samples"])}) for p in data["parents"]),
        shards_by_kind={
            kind: shard_table(np.array(rows, dtype=np.int64)) for kind, rows in data["shards_by_kind"].items()
        },
    )


def _tokens_per_rank(shards: Table[Shard], num_ranks: int) -> Ints:
    sizes = shards.column("hi") - shards.column("lo")
    return np.bincount(shards.column("rank"), weights=sizes, minlength=num_ranks).astype(np.int64)


def _check_ranks(table: Table[Any], num_ranks: int, where: str) -> None:
    ranks = table.column("rank")
    if len(ranks) and not (ranks.min() >= 0 and ranks.max() < num_ranks):
        raise PlanError(
            f"{where}: rank {ranks.max() if ranks.max() >= num_ranks else ranks.min()} is not in [0, {num_ranks})"
        )


def _check_places(microbatch: MicrobatchPlan, attention: dict[str, AttentionSpec], where: str) -> None:
    """Only the model's layer kinds may have shards of their own, and they hold the samples that the home holds."""
    for kind, shards in microbatch.shards_by_kind.items():
        if kind not in attention:
            raise PlanError(f"{where}: shards of layer kind {kind!r}, but the model has {sorted(attention)}")
        if not np.array_equal(np.unique(shards.column("sample")), microbatch.samples):
            raise PlanError(f"{where}, shards of {kind}: samples other than those of the home shards")


def _check_shards(shards: Table[Shard], lengths: Ints, num_ranks: int, budget: int, where: str) -> None:
    """Sorted by (sample, lo), each sample's shards must start at 0, meet end to start, and stop at its length."""
    _check_ranks(shards, num_ranks, where)
    sample, lo, hi = (shards.column(name) for name in ("sample", "lo", "hi"))
    first = np.diff(sample, prepend=-1) != 0
    last = np.diff(sample, append=len(lengths)) != 0
    expected_lo = np.where(first, 0, np.roll(hi, 1))
    bad = (lo != expected_lo) | (hi <= lo) | (last & (hi != lengths[sample]))
    if bad.any():
        row = Shard(*shards.rows[int(np.argmax(bad))].tolist())
        raise PlanError(
            f"{where}: {row} does not continue its sample: tokens [0, {lengths[row.sample]}) must each be owned once, "
            f"and this shard should start at {int(expected_lo[np.argmax(bad)])} and not be empty"
        )
    tokens = _tokens_per_rank(shards, num_ranks)
    if tokens.max(initial=0) > budget:
        raise PlanError(
            f"{where}: rank {int(tokens.argmax())} holds {int(tokens.max())} tokens, max_tokens_per_rank={budget}"
        )


def _check_tiles(
    tiles: Table[Tile], spec: AttentionSpec, lengths: Ints, samples: Ints, num_ranks: int, where: str
) -> None:
    """Tiles must cover [0, L) x [0, H) once, start at the mask's first key, and not tear a KV group.

    Rectangles cover a rectangle exactly once if and only if their signed corners (the mixed second difference of the
    indicator function) add up to its corners; this needs no pairwise comparison. So all positive corners, and the
    rectangle's negative ones, must be the same points as all others.
    """
    _check_ranks(tiles, num_ranks, where)
    sample, q0, q1, k0, h0, h1 = (tiles.column(name) for name in ("sample", "q0", "q1", "k0", "h0", "h1"))
    if not np.array_equal(sample[np.diff(sample, prepend=-1) != 0], samples):
        raise PlanError(f"{where}: tiles for samples other than those of the shards")
    size = spec.queries_per_kv
    torn = ((h0 // size != (h1 - 1) // size) & ((h0 % size != 0) | (h1 % size != 0))) | (h1 <= h0)
    for bad, rule in (
        ((q1 <= q0) | (q0 < 0), "has no queries, or some before its sample"),
        ((h0 < 0) | (h1 > spec.num_heads), f"has heads outside [0, {spec.num_heads})"),
        (torn, f"tears a KV group ({size} query heads per KV head)"),
        (k0 != spec.first_key(q0), "does not start at the first key that its mask needs"),
    ):
        if bad.any():
            row = Tile(*tiles.rows[int(np.argmax(bad))].tolist())
            raise PlanError(f"{where}: {row} {rule}; first key needed: {spec.first_key(row.q0)}")

    num_heads, width = spec.num_heads, int(lengths.max(initial=0)) + 1

    def corner(sample: Ints, query: Ints, head: Any) -> Ints:
        return (sample * width + query) * (num_heads + 1) + head

    start, end = np.zeros_like(samples), lengths[samples]
    plus = [corner(sample, q0, h0), corner(sample, q1, h1), corner(samples, start, num_heads), corner(samples, end, 0)]
    minus = [corner(sample, q0, h1), corner(sample, q1, h0), corner(samples, start, 0), corner(samples, end, num_heads)]
    added, taken = np.sort(np.concatenate(plus)), np.sort(np.concatenate(minus))
    if not np.array_equal(added, taken):
        key, bad_head = divmod(int(np.minimum(added, taken)[int(np.argmax(added != taken))]), num_heads + 1)
        bad_sample, bad_query = divmod(key, width)
        raise PlanError(
            f"{where}: sample {bad_sample} is not covered exactly once near query {bad_query}, head {bad_head} "
            f"(queries [0, {lengths[bad_sample]}) x heads [0, {spec.num_heads}))"
        )
