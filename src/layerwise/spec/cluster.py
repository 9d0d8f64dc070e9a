"""The machine as the planner sees it: ranks, links, and how fast kernels are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator

from layerwise.spec.attention import AttentionSpec
from layerwise.spec.records import Rate, Record, divisors, read_settings, record_from

# More parts are more messages: on no cluster tried did more than a few pay.
MAX_OVERLAP_PARTS = 16

Efficiency = Annotated[float, Field(ge=1e-9, le=1)]


class EfficiencyTable(Record):
    """Share of the peak that a kernel reaches, by keys and query heads per tile: `efficiency[length][head]`.

    Between the entries it is interpolated linearly in log2 of both, beyond them it stays as at the nearest. It covers
    forward and backward together: their FLOPs, as docs/cost-model.md counts them, over their seconds and the peak.
    """

    lengths: tuple[int, ...] = Field(min_length=1)
    heads: tuple[int, ...] = Field(default=(1,), min_length=1)
    efficiency: tuple[tuple[float, ...], ...]

    @model_validator(mode="after")
    def _check(self) -> EfficiencyTable:
        for name in ("lengths", "heads"):
            axis = getattr(self, name)
            if axis[0] < 1 or any(a >= b for a, b in pairwise(axis)):
                raise ValueError(f"{name}={axis} must be at least 1 and ascend")
        shape = {len(row) for row in self.efficiency}
        if len(self.efficiency) != len(self.lengths) or shape != {len(self.heads)}:
            raise ValueError(
                f"efficiency has {len(self.efficiency)} rows of {sorted(shape)} columns; expected "
                f"{len(self.lengths)} rows (lengths) of {len(self.heads)} columns (heads)"
            )
        if not all(0 < value <= 1 for row in self.efficiency for value in row):
            raise ValueError(f"every efficiency lies in (0, 1], got {self.efficiency}")
        return self

    def at(self, length: Any, heads: Any) -> Any:
        """The efficiency for `length` keys and `heads` query heads; arrays that broadcast, or numbers."""
        row, along = _position(self.lengths, length)
        column, across = _position(self.heads, heads)
        table = np.pad(np.array(self.efficiency), ((0, 1), (0, 1)), mode="edge")
        near = table[row, column] * (1 - across) + table[row, column + 1] * across
        far = table[row + 1, column] * (1 - across) + table[row + 1, column + 1] * across
        return near * (1 - along) + far * along


# Told apart by what is given, so that a fault is explained once.
EfficiencyOrTable = Annotated[
    Annotated[Efficiency, Tag("number")] | Annotated[EfficiencyTable, Tag("table")],
    Discriminator(lambda value: "table" if isinstance(value, dict | EfficiencyTable) else "number"),
]


def _position(axis: tuple[int, ...], value: Any) -> tuple[Any, Any]:
    """The entry at or below `value`, and how far it lies towards the next, in log2."""
    where = np.interp(np.log2(np.maximum(value, 1)), np.log2(axis), np.arange(len(axis)))
    entry = np.asarray(where).astype(np.int64)
    return entry, where - entry


class ClusterSpec(Record):
    """The machine as the planner sees it, and how it is used; docs/cost-model.md has the formulas of these numbers.

    Rates are per rank; links between nodes are no faster than those inside. `sync` says where ranks wait for one
    another: at every layer (expert-parallel and FSDP collectives) or only at the optimizer step. `window_efficiency` is
    for all kinds but full attention, by default its `attention_efficiency`. `expert_parallel_degree` aligned ranks
    share the experts of a layer, `sharded_params` spreads every parameter over the ranks that would hold a copy
    (ZeRO-3); up to `overlap` of a layer's compute time hides this traffic. `recompute` runs each layer's forward a
    second time in backward. `overlap_parts` cuts every attention site into so many parts, whose exchanges run beside
    other parts' attention; 1: no overlap.
    """

    name: str = "cluster"
    num_nodes: int = Field(ge=1, le=2**32)
    ranks_per_node: int = Field(ge=1, le=2**16)
    fast_bytes_per_s: Rate = 160e9
    slow_bytes_per_s: Rate = 160e9 / 7.0
    message_latency_s: float = Field(default=10e-6, ge=0, le=3600)
    peak_flops_per_s: Rate = 989e12
    attention_efficiency: EfficiencyOrTable = 0.80
    window_efficiency: EfficiencyOrTable | None = None
    linear_efficiency: Efficiency = 0.72
    element_bytes: int = Field(default=2, ge=1, le=8, description="bytes of one activation on the wire")
    expert_parallel_degree: int = Field(default=1, ge=1)
    sharded_params: bool = False
    overlap: float = Field(default=1.0, ge=0, le=1)
    recompute: bool = False
    overlap_parts: int = Field(default=1, ge=1, le=MAX_OVERLAP_PARTS)
    memory_bytes: float | None = Field(default=None, gt=0, description="of one rank's accelerator")
    sync: Literal["layer", "step"] = "layer"

    @model_validator(mode="after")
    def _check(self) -> ClusterSpec:
        if self.num_ranks % self.expert_parallel_degree:
            raise ValueError(
                f"expert_parallel_degree={self.expert_parallel_degree} must divide the {self.num_ranks} ranks; "
                f"legal values: {divisors(self.num_ranks)}"
            )
        if self.slow_bytes_per_s > self.fast_bytes_per_s:
            raise ValueError(
                f"slow_bytes_per_s={self.slow_bytes_per_s:g} (between nodes) must be at most fast_bytes_per_s="
                f"{self.fast_bytes_per_s:g} (inside a node); swap them, or give both the lower rate"
            )
        return self

    def efficiency(self, spec: AttentionSpec, length: Any, heads: Any) -> Any:
        """Share of the peak of this attention's kernel, for `length` keys and `heads` query heads per tile."""
        use_full = spec.is_full or self.window_efficiency is None
        value = self.attention_efficiency if use_full else self.window_efficiency
        return value.at(length, heads) if isinstance(value, EfficiencyTable) else value

    @property
    def num_ranks(self) -> int:
        """All ranks of the cluster."""
        return self.num_nodes * self.ranks_per_node

    def node_of(self, rank: Any) -> Any:
        """The node of a rank, or of an array of ranks."""
        return rank // self.ranks_per_node


def load_cluster(source: str | Path) -> ClusterSpec:
    """A ClusterSpec from a YAML file or a preset name. Raises SpecError."""
    return record_from(ClusterSpec, read_settings(source, "cluster"), str(source))
