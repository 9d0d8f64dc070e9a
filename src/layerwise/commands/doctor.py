"""layerwise doctor: look over an installation and a cluster before a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from layerwise.commands import speaks_for_node
from layerwise.errors import SpecError
from layerwise.files import check_target, write_whole
from layerwise.train.config import load_config

if TYPE_CHECKING:
    from layerwise.doctor.check import Diagnosis

_COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def doctor(
    config: Annotated[Path | None, typer.Option(help="YAML file of the run to come; see docs/train.md.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting of it.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder that the run will write to.")] = Path("runs/train"),
    ranks_per_node: Annotated[
        int | None, typer.Option(min=1, help="Local ranks to start; by default one node's of the config, or 4.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda; by default the config's.")] = None,
    timeout_s: Annotated[float, typer.Option(min=1, max=1e6, help="How long ranks wait for one another.")] = 60.0,
    json: Annotated[Path | None, typer.Option(help="Also write the findings to this file.")] = None,
) -> None:
    """Check versions, ranks, devices, network, clocks, links, folders and data; exit status 1 if something is wrong."""
    if set_ and config is None:
        raise SpecError("--set has no effect without --config; add it, or leave --set out")
    if device not in (None, "auto", "cpu", "cuda"):
        raise SpecError(f"--device {device!r}: legal values are auto, cpu and cuda")
    if json is not None:
        check_target(json, "--json")
    run_config = load_config(config, set_ or []) if config is not None else None
    from layerwise.doctor.run import DoctorOptions, examine
    from layerwise.train.run import is_writer

    diagnosis = examine(
        DoctorOptions(
            config=run_config,
            out=out,
            ranks_per_node=ranks_per_node or (run_config.cluster.ranks_per_node if run_config else 4),
            device=device or (run_config.device if run_config else "auto"),
            timeout_s=timeout_s,
        )
    )
    if is_writer() or (not diagnosis.ranks_met and speaks_for_node()):
        _print(diagnosis)
        if json is not None:
            write_whole(json, diagnosis.model_dump_json(indent=1), "--json")
    if diagnosis.is_wrong:
        raise typer.Exit(1)


def _print(diagnosis: Diagnosis) -> None:
    has_advice = any(check.advice for check in diagnosis.checks)
    table = Table("check", "", "found", *(["what to do"] if has_advice else []))
    for check in diagnosis.checks:
        cells = [Text(check.status, _COLOURS[check.status]), Text(check.found), Text(check.advice)]
        table.add_row(check.name, *cells[: 3 if has_advice else 2])
    Console().print(table)
