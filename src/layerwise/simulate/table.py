"""A simulation for a terminal: one short table, one line of memory, and what does not fit."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from layerwise.cost import Floats
from layerwise.labels import counted, format_bytes, format_seconds, kind_label
from layerwise.simulate.step import Simulation
from layerwise.simulate.timeline import PHASES

_NAMES = {"lm_head": "LM head", "moves": "moves", "step_end": "step end"}


def kind_name(kind: str) -> str:
    """A layer kind, or what else a step has, for people."""
    return _NAMES.get(kind) or kind_label(kind)


def columns(simulation: Simulation) -> list[str]:
    """Headings of the table, of one or two lines; the third names the unit of all times."""
    unit, _ = _unit(simulation)
    seconds = [f"time\n{unit}", "compute\nmax", "\nmean", "ex-\nchange", "ex-\nposed", "wait"]
    return ["layers\nof kind", "no.", *seconds, "fast\nbytes", "slow\nbytes"]


def _unit(simulation: Simulation) -> tuple[str, float]:
    return ("s", 1.0) if simulation.prediction.seconds >= 1 else ("ms", 1e3)


def phase_groups(phase_s: Floats) -> dict[str, Floats]:
    """Seconds of each rank, float64 [ranks], by what a person asks for; `phase_s` is [len(PHASES), ranks]."""
    by_name = dict(zip(PHASES, phase_s, strict=True))
    return {
        "compute": by_name["attention"] + by_name["linear"] + by_name["head"],
        "exchange": by_name["exchange_in"] + by_name["exchange_out"] + by_name["move"],
        "exposed": by_name["exposed"],
        "wait": by_name["wait"],
    }


def headline(simulation: Simulation) -> str:
    """Seconds, MFU and gap to the ideal, in one line."""
    prediction = simulation.prediction
    return (
        f"{simulation.plan.strategy}: {format_seconds(prediction.seconds)} per step, MFU {prediction.mfu:.1%}, "
        f"{simulation.gap_to_ideal_pct:.1f}% above the ideal, "
        f"{counted(len(simulation.plan.microbatches), 'micro-batch')}"
    )


def kind_cells(simulation: Simulation, kind: str) -> list[str]:
    """One row of the table: seconds are means over ranks but for `compute max`, bytes are of all ranks."""
    phase_s = simulation.timeline.phase_s(kind)
    groups, sent = phase_groups(phase_s), simulation.sent(kind)
    _, factor = _unit(simulation)
    seconds = [phase_s.sum(axis=0).mean(), groups["compute"].max(), *(values.mean() for values in groups.values())]
    return [
        kind_name(kind).removesuffix(" layers"),
        str(simulation.cost.model.num_layers_of(kind) or "-"),
        *(f"{factor * float(value):.3g}" if value else "-" for value in seconds),
        *(format_bytes(value) if value else "-" for value in ((sent.fast_bytes, sent.slow_bytes) if sent else (0, 0))),
    ]


def overlap_line(simulation: Simulation) -> str | None:
    """How much of exchanges attention hides, by layer kind; None where attention sites run in one part."""
    num_parts = simulation.cost.cluster.overlap_parts
    if num_parts == 1:
        return None
    hidden = {kind: simulation.timeline.rank_hidden_s(kind).mean() for kind in simulation.prediction.kinds}
    parts = ", ".join(f"{format_seconds(float(mean_s))} in {kind_name(kind)}" for kind, mean_s in hidden.items())
    return f"overlap in {num_parts} parts: of a rank's exchanges attention hides {parts}, in the mean"


def memory_line(simulation: Simulation) -> str:
    """The highest peak of any rank, and what it is made of."""
    memory = simulation.memory
    rank = memory.fullest_rank
    parts = ", ".join(f"{name} {format_bytes(size)}" for name, size in memory.at_peak(rank).items() if size)
    return (
        f"memory: at most {format_bytes(memory.peak_bytes[rank])}, on rank {rank} ({parts}); "
        f"at most {counted(int(memory.peak_tokens.max()), 'token')} on a rank"
    )


def render(simulation: Simulation, console: Console) -> None:
    """Print the table of one simulation."""
    console.print(headline(simulation), style="bold", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for index, column in enumerate(columns(simulation)):
        table.add_column(column, justify="right" if index else "left", no_wrap=True)
    for kind in simulation.timeline.kinds:
        table.add_row(*kind_cells(simulation, kind))
    console.print(table)
    if line := overlap_line(simulation):
        console.print(line, highlight=False)
    console.print(memory_line(simulation), highlight=False)
    if simulation.memory_warning:
        console.print(f"warning: {simulation.memory_warning}", style="bold red", highlight=False)
