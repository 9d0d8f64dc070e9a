"""A plan for people: plain rows that anything can print, and tables of them for a terminal. No torch.

Tokens, bytes and calls are exact; every second and the MFU are predictions of the cost model.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from layerwise.cost import CostModel, Floats, GapRow, StepPrediction, bound_step, gap_rows
from layerwise.labels import counted, format_bytes
from layerwise.plan import Ints, Shard, StepPlan, Table, Tile
from layerwise.spec import FULL, ClusterSpec, ModelSpec


@dataclass(frozen=True, kw_only=True)
class GroupRow:
    """Groups of one role and SP degree, over all micro-batches. Children are those of repacked parents."""

    role: str
    sp_degree: int
    num_groups: int
    num_samples: int
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class LoadRow:
    """How level something is over ranks: the highest, the mean and the lowest rank of any micro-batch."""

    name: str
    highest: float
    mean: float
    lowest: float


@dataclass(frozen=True, kw_only=True)
class KindRow:
    """The layers of one kind in the whole step; calls are those of the busiest rank, for one layer."""

    kind: str
    num_layers: int
    calls_per_layer: int
    fast_bytes: int
    slow_bytes: int
    predicted_s: float


@dataclass(frozen=True, kw_only=True)
class SampleRow:
    """Where one sample sits; ranks are inclusive spans such as "0-15"."""

    sample: int
    num_tokens: int
    microbatch: int
    owner_ranks: str
    attention_ranks: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class PlanSummary:
    """What a person wants to know about a plan."""

    strategy: str
    num_ranks: int
    ranks_per_node: int
    max_tokens_per_rank: int
    num_samples: int
    num_tokens: int
    num_microbatches: int
    groups: tuple[GroupRow, ...]
    loads: tuple[LoadRow, ...]
    kinds: tuple[KindRow, ...]
    gaps: tuple[GapRow, ...]
    predicted_s: float
    predicted_ideal_s: float
    predicted_mfu: float
    predicted_head_s: float
    notes: dict[str, int]
    samples: tuple[SampleRow, ...]


def summarize(plan: StepPlan, cluster: ClusterSpec, model: ModelSpec, *, num_samples: int = 0) -> PlanSummary:
    """The summary of a plan, with a row for each of the `num_samples` longest samples."""
    cost = CostModel(cluster=cluster, model=model)
    prediction = cost.predict(plan)
    return PlanSummary(
        strategy=plan.strategy,
        num_ranks=plan.num_ranks,
        ranks_per_node=plan.ranks_per_node,
        max_tokens_per_rank=plan.max_tokens_per_rank,
        num_samples=len(plan.lengths),
        num_tokens=plan.num_tokens,
        num_microbatches=len(plan.microbatches),
        groups=_group_rows(plan),
        loads=_load_rows(prediction),
        kinds=_kind_rows(prediction, cost),
        gaps=gap_rows(prediction, bound_step(plan.lengths, cost, plan.max_tokens_per_rank)),
        predicted_s=prediction.seconds,
        predicted_ideal_s=prediction.ideal_s,
        predicted_mfu=prediction.mfu,
        predicted_head_s=prediction.head_s,
        notes=dict(plan.notes),
        samples=_sample_rows(plan, num_samples),
    )


def _group_rows(plan: StepPlan) -> tuple[GroupRow, ...]:
    """Parents by SP degree, then the blocks that the samples of repacked parents live on."""
    members: dict[tuple[str, int], list[tuple[tuple[int, int], int]]] = defaultdict(list)
    for index, microbatch in enumerate(plan.microbatches):
        spans = _rank_spans(microbatch.shards)
        for parent in microbatch.parents:
            role = "parent, repacked" if parent.repacked else "group"
            for sample in parent.samples:
                members[role, parent.sp_degree].append(((index, parent.first_rank), sample))
                if parent.repacked:
                    first, last = spans[sample]
                    members["child", last - first + 1].append(((index, first), sample))
    order = ["group", "parent, repacked", "child"]
    return tuple(
        GroupRow(
            role=role,
            sp_degree=degree,
            num_groups=len({group for group, _ in members[role, degree]}),
            num_samples=len(members[role, degree]),
            num_tokens=sum(plan.lengths[sample] for _, sample in members[role, degree]),
        )
        for role, degree in sorted(members, key=lambda key: (order.index(key[0]), -key[1]))
    )


def _load_rows(prediction: StepPrediction) -> tuple[LoadRow, ...]:
    rows: list[tuple[str, Ints | Floats]] = [("tokens", prediction.tokens_per_rank)]
    for kind in prediction.kinds:
        flops = np.stack([part.kinds[kind].attention_flops for part in prediction.microbatches])
        rows.append((f"{kind}, GFLOP", flops / 1e9))
    for kind in prediction.kinds:
        sent = np.stack([part.kinds[kind].rank_slow_bytes for part in prediction.microbatches])
        rows.append((f"{kind}, MB between nodes", sent / 1e6))
    return tuple(
        LoadRow(name=name, highest=float(values.max()), mean=float(values.mean()), lowest=float(values.min()))
        for name, values in rows
    )


def _kind_rows(prediction: StepPrediction, cost: CostModel) -> tuple[KindRow, ...]:
    return tuple(
        KindRow(
            kind=layer.kind,
            num_layers=layer.num_layers,
            calls_per_layer=int(prediction.kinds[layer.kind].calls.max()) // layer.num_layers,
            fast_bytes=prediction.kinds[layer.kind].fast_bytes,
            slow_bytes=prediction.kinds[layer.kind].slow_bytes,
            predicted_s=prediction.kinds[layer.kind].seconds,
        )
        for layer in cost.layers
    )


def _sample_rows(plan: StepPlan, num_samples: int) -> tuple[SampleRow, ...]:
    longest = np.argsort(-np.array(plan.lengths), kind="stable")[:num_samples].tolist()
    return tuple(sample_row(plan, sample) for sample in longest)


def sample_row(plan: StepPlan, sample: int) -> SampleRow:
    """Where a sample of the plan sits."""
    index = next(i for i, m in enumerate(plan.microbatches) if len(ranks_of(m.shards, sample)))
    microbatch = plan.microbatches[index]
    return SampleRow(
        sample=sample,
        num_tokens=plan.lengths[sample],
        microbatch=index,
        owner_ranks=_span_text(ranks_of(microbatch.shards, sample)),
        attention_ranks={kind: _span_text(ranks_of(tiles, sample)) for kind, tiles in microbatch.tiles.items()},
    )


def _rank_spans(shards: Table[Shard]) -> dict[int, tuple[int, int]]:
    """The first and the last rank that owns each sample."""
    spans: dict[int, tuple[int, int]] = {}
    for sample, rank in zip(shards.column("sample").tolist(), shards.column("rank").tolist(), strict=True):
        first, last = spans.get(sample, (rank, rank))
        spans[sample] = (min(first, rank), max(last, rank))
    return spans


def ranks_of(table: Table[Shard] | Table[Tile], sample: int) -> Ints:
    """The rank of each of the sample's rows, int64 [rows]."""
    return table.column("rank")[table.column("sample") == sample]


def _span_text(ranks: Ints) -> str:
    first, last = int(ranks.min()), int(ranks.max())
    return str(first) if first == last else f"{first}-{last}"


def render(summary: PlanSummary, console: Console) -> None:
    """Print the summary as tables."""
    console.print(
        f"[bold]{summary.strategy}[/bold]: {counted(summary.num_samples, 'sample')}, "
        f"{counted(summary.num_tokens, 'token')} on {counted(summary.num_ranks, 'rank')} ({summary.ranks_per_node} per "
        f"node), {counted(summary.num_microbatches, 'micro-batch')} of at most "
        f"{counted(summary.max_tokens_per_rank, 'token')} per rank"
    )
    console.print(_groups_table(summary))
    console.print(_loads_table(summary))
    console.print(_kinds_table(summary))
    console.print(_gaps_table(summary))
    console.print(
        f"predicted step {summary.predicted_s:.4g} s; balanced ideal without communication "
        f"{summary.predicted_ideal_s:.4g} s ({summary.predicted_s / summary.predicted_ideal_s:.2f}x); "
        f"predicted MFU {summary.predicted_mfu:.1%}"
    )
    if summary.notes:
        console.print("notes: " + ", ".join(f"{name} {count}" for name, count in summary.notes.items()))
    if summary.samples:
        console.print(_samples_table(summary))


def _table(title: str, *columns: str) -> RichTable:
    table = RichTable(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=index == 0)
    return table


def _groups_table(summary: PlanSummary) -> RichTable:
    table = _table("Groups", "role", "SP degree", "groups", "samples", "tokens")
    for row in summary.groups:
        numbers = (row.sp_degree, row.num_groups, row.num_samples, row.num_tokens)
        table.add_row(row.role, *(f"{number:,}" for number in numbers))
    return table


def _loads_table(summary: PlanSummary) -> RichTable:
    title = "Load of a rank in a micro-batch (GFLOP: forward, one layer; MB: all layers)"
    table = _table(title, "load", "max", "mean", "min", "max / mean")
    for row in summary.loads:
        numbers = [_number_text(value) for value in (row.highest, row.mean, row.lowest)]
        table.add_row(row.name, *numbers, f"{row.highest / row.mean:.2f}" if row.mean else "-")
    return table


def _number_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def _kinds_table(summary: PlanSummary) -> RichTable:
    columns = ("layers", "number", "calls per layer", "bytes in nodes", "bytes between", "predicted s")
    table = _table("The step by layer kind (calls of the busiest rank, bytes of all ranks)", *columns)
    for row in summary.kinds:
        moved = (format_bytes(row.fast_bytes), format_bytes(row.slow_bytes))
        numbers = (str(row.num_layers), str(row.calls_per_layer))
        table.add_row(row.kind, *numbers, *moved, f"{row.predicted_s:.4g}")
    table.add_row("LM head", "1", "0", "0 B", "0 B", f"{summary.predicted_head_s:.4g}")
    return table


def _gaps_table(summary: PlanSummary) -> RichTable:
    title = "The step and what no plan gets below (fullest rank, one layer; summed over micro-batches)"
    table = _table(title, "of the step", "plan", "lower bound", "gap")
    for row in summary.gaps:
        gap = "-" if row.gap_pct is None else f"{row.gap_pct:.2f}%"
        table.add_row(row.name, _number_text(row.reached), _number_text(row.bound), gap)
    return table


def _samples_table(summary: PlanSummary) -> RichTable:
    kinds = sorted(summary.samples[0].attention_ranks, key=lambda kind: kind != FULL)
    count = len(summary.samples)
    title = f"The {count} longest samples" if count > 1 else "The longest sample"
    table = _table(title, "sample", "tokens", "micro-batch", "owners", *kinds)
    for row in summary.samples:
        spans = [row.attention_ranks[kind] for kind in kinds]
        table.add_row(str(row.sample), f"{row.num_tokens:,}", str(row.microbatch), row.owner_ranks, *spans)
    return table
