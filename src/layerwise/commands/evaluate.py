"""layerwise evaluate: every strategy on every step of a workload, as tables, JSON, a page and pictures."""

from __future__ import annotations

import json as json_format
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from layerwise.console import say
from layerwise.errors import SpecError
from layerwise.evaluate.drawings import require_matplotlib, write_drawings
from layerwise.evaluate.page import build_page
from layerwise.evaluate.pictures import require_plotly
from layerwise.evaluate.sensitivity import (
    DEFAULT_STEPS,
    VariantResult,
    count_steps,
    make_variants,
    render_sensitivity,
    run_variants,
)
from layerwise.evaluate.steps import check_strategies, run_steps, step_jobs
from layerwise.evaluate.table import evaluate as tabulate
from layerwise.evaluate.table import render
from layerwise.evaluate.workload import Workload, load_workload
from layerwise.files import check_targets, write_whole
from layerwise.planners import STRATEGIES
from layerwise.spec import preset_names


def evaluate(
    workload: Annotated[
        str, typer.Option(help=f"YAML file or preset: {', '.join(preset_names('workload'))}.")
    ] = "paper",
    strategies: Annotated[
        str, typer.Option(help=f"Comma-separated; of {', '.join(STRATEGIES)}. dynamic is always there.")
    ] = ",".join(STRATEGIES),
    steps: Annotated[int | None, typer.Option(min=1, help="Steps; the workload's own number by default.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="Processes; one per core by default.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with interactive pictures to this file.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write pictures for papers into this folder.")] = None,
    sensitivity: Annotated[bool, typer.Option("--sensitivity", help="Also change one setting at a time.")] = False,
    length_file: Annotated[
        list[Path] | None, typer.Option(help="With --sensitivity: also the lengths in this file; may be repeated.")
    ] = None,
) -> None:
    """Plan and predict the same steps with every strategy: time, MFU, and how far from the ideal."""
    if length_file and not sensitivity:
        raise SpecError("--length-file has no effect without --sensitivity; add it, or leave the files out")
    chosen = load_workload(workload)
    names = check_strategies([name.strip() for name in strategies.split(",") if name.strip()])
    _check_targets(json, report, png)
    console = Console()
    drawn = chosen.draw_steps(steps)
    with _progress(f"{len(names)} strategies", len(drawn)) as advance:
        results = run_steps(step_jobs(chosen, names, drawn), num_workers=workers, on_step=advance)
    evaluation = tabulate(results, chosen.seed)
    render(evaluation, console)
    variants = _run_sensitivity(chosen, names, length_file or [], workers) if sensitivity else []
    if variants:
        render_sensitivity(variants, console)
    if json is not None:
        data = {"workload": chosen.model_dump(), **evaluation.to_json()}
        if variants:
            data["sensitivity"] = [variant.to_json() for variant in variants]
        write_whole(json, json_format.dumps(data, indent=1), "--json")
        say(f"figures written to {json}", console)
    if report is not None:
        write_whole(report, build_page(chosen, results, evaluation, variants), "--report")
        say(f"page written to {report}", console)
    if png is not None:
        paths = write_drawings(png, results, variants, "--png")
        made = ", ".join(path.name for path in paths)
        say(f"pictures written to {png}: {made}", console)


def _check_targets(json: Path | None, report: Path | None, png: Path | None) -> None:
    """Raise SpecError or UnsupportedError for what cannot be written or drawn, before minutes are spent."""
    check_targets({"--json": json, "--report": report})
    if report is not None:
        require_plotly()
    if png is not None:
        require_matplotlib()
        try:
            png.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError(f"--png {png}: no folder can be made there: {error.strerror}") from None


def _run_sensitivity(
    workload: Workload, names: tuple[str, ...], length_files: list[Path], workers: int | None
) -> list[VariantResult]:
    variants = make_variants(workload, length_files)
    with _progress("sensitivity", count_steps(variants, DEFAULT_STEPS)) as advance:
        return run_variants(variants, names, num_workers=workers, on_step=advance)


@contextmanager
def _progress(label: str, total: int) -> Iterator[Callable[[], None]]:
    """A bar on standard error, so that standard output holds tables only; yields what advances it by one step."""
    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(label, total=total)
        yield lambda: progress.advance(task)
