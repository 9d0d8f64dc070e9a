"""layerwise calibrate: measure this machine and write a cluster file that plans can use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from layerwise.console import say
from layerwise.errors import SpecError
from layerwise.files import check_target
from layerwise.labels import format_bytes, format_seconds
from layerwise.spec import ClusterSpec, EfficiencyTable, load_cluster, load_model, preset_names


def calibrate(
    out: Annotated[Path, typer.Option(help="The cluster file to write, e.g. my-cluster.yaml.")],
    model: Annotated[
        str, typer.Option(help=f"Whose shapes to measure; YAML file or preset: {', '.join(preset_names('model'))}.")
    ] = "demo",
    num_nodes: Annotated[int, typer.Option(min=1, help="Nodes of the cluster.")] = 1,
    ranks_per_node: Annotated[int, typer.Option(min=1, help="Ranks of each node.")] = 4,
    ratio: Annotated[
        float | None, typer.Option(help="Fast over slow rate, where all nodes are on this machine. Default 7.")
    ] = None,
    peak_flops_per_s: Annotated[
        float | None, typer.Option(help="Of one rank, from its data sheet. Default: its fastest kernel.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda; cuda needs torchrun.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: seconds, and rougher numbers.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
) -> None:
    """Measure kernels and links and write them as a cluster file: starts local ranks, or joins those of torchrun."""
    _check_options(out, overwrite, device, ratio, peak_flops_per_s)
    shapes = load_model(model)
    from layerwise.calibrate.run import CalibrateOptions
    from layerwise.calibrate.run import calibrate as run_calibration
    from layerwise.train.run import is_writer

    options = CalibrateOptions(
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        model=shapes,
        ratio=ratio,
        peak_flops_per_s=peak_flops_per_s,
        device=device,
        quick=quick,
    )
    run_calibration(options, out)
    if is_writer():
        console = Console()
        console.print(_table(load_cluster(out)))
        say(f"cluster file written to {out}; use it with --cluster {out}", console)


def _check_options(
    out: Path, overwrite: bool, device: str, ratio: float | None, peak_flops_per_s: float | None
) -> None:
    """Raise SpecError for what cannot be, before anything is measured."""
    check_target(out, "--out")
    if out.exists() and not overwrite:
        raise SpecError(f"--out {out}: is there already; name another file, or pass --overwrite to replace it")
    if device not in ("auto", "cpu", "cuda"):
        raise SpecError(f"--device {device!r}: legal values are auto, cpu and cuda")
    for option, value in (("--ratio", ratio), ("--peak-flops-per-s", peak_flops_per_s)):
        if value is not None and not 0 < value < float("inf"):
            raise SpecError(f"{option} {value:g} must be a number above 0")


def _table(cluster: ClusterSpec) -> Table:
    table = Table("measured, per rank", "value")
    table.add_row("link inside a node", f"{format_bytes(cluster.fast_bytes_per_s)}/s")
    table.add_row("link between nodes", f"{format_bytes(cluster.slow_bytes_per_s)}/s")
    table.add_row("latency of a message", format_seconds(cluster.message_latency_s))
    table.add_row("linear layers", _rate(cluster, cluster.linear_efficiency))
    for name, value in (("full attention", cluster.attention_efficiency), ("windowed", cluster.window_efficiency)):
        if isinstance(value, EfficiencyTable):
            for length, row in zip(value.lengths, value.efficiency, strict=True):
                table.add_row(f"{name}, {length} tokens", _rate(cluster, row[-1]))
    return table


def _rate(cluster: ClusterSpec, share: float) -> str:
    return f"{share * cluster.peak_flops_per_s / 1e9:,.3g} GFLOP/s"
