"""layerwise simulate: what every rank does in one step under some strategies, as tables, JSON, a trace and pictures."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from layerwise.console import say
from layerwise.data.lengths import read_lengths
from layerwise.errors import SpecError
from layerwise.evaluate.pictures import require_plotly
from layerwise.files import check_targets, write_whole
from layerwise.planners import STRATEGIES, Planner
from layerwise.simulate.drawing import check_suffix, write_drawing
from layerwise.simulate.page import build_page
from layerwise.simulate.step import Simulation
from layerwise.simulate.step import simulate as simulate_plan
from layerwise.simulate.table import render
from layerwise.simulate.trace import write_trace
from layerwise.spec import ClusterSpec, load_cluster, load_model, preset_names
from layerwise.train.config import parse_setting


def simulate(
    lengths: Annotated[str, typer.Option(help="File with one sample length per line (.gz too), or - for stdin.")],
    cluster: Annotated[str, typer.Option(help=f"YAML file or preset: {', '.join(preset_names('cluster'))}.")],
    model: Annotated[str, typer.Option(help=f"YAML file or preset: {', '.join(preset_names('model'))}.")],
    strategy: Annotated[
        str, typer.Option(help=f"Comma-separated; of {', '.join(STRATEGIES)}.")
    ] = "dynamic,repack+parents",
    max_tokens_per_rank: Annotated[int, typer.Option(min=1, help="Tokens a rank can hold in one micro-batch.")] = 32768,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="STRATEGY.OPTION=VALUE", help="A strategy's option, e.g. static.sp_degree=16."),
    ] = None,
    sync: Annotated[str | None, typer.Option(help="Where ranks wait: layer or step; as in the cluster file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write all numbers to this file.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a trace for Perfetto or chrome://tracing.")] = None,
    trace_ranks: Annotated[str | None, typer.Option(help="Ranks in the trace, e.g. 0-7,16; all by default.")] = None,
    trace_layers: Annotated[str | None, typer.Option(help="Layers in the trace, e.g. 0-3; all by default.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page with an interactive picture.")] = None,
    png: Annotated[Path | None, typer.Option(help="Write the picture for papers.")] = None,
) -> None:
    """Predict one step: seconds by kind of layer, waiting, bytes, memory, and when each rank does what."""
    cluster_spec, model_spec = _with_sync(load_cluster(cluster), sync), load_model(model)
    if trace is None and (trace_ranks or trace_layers):
        raise SpecError("--trace-ranks and --trace-layers have no effect without --trace; add it, or leave them out")
    ranks = _parse_indices(trace_ranks, cluster_spec.num_ranks, "--trace-ranks")
    layers = _parse_indices(trace_layers, model_spec.num_layers, "--trace-layers")
    targets = {"--json": json, "--trace": trace, "--report": report, "--png": png}
    check_targets(targets)
    if png is not None:
        check_suffix(png, "--png")
    if report is not None:
        require_plotly()
    names = _split_names(strategy)
    options = _options_by_strategy(set_ or [], names)
    planners = {
        name: Planner(
            strategy=name,
            cluster=cluster_spec,
            model=model_spec,
            max_tokens_per_rank=max_tokens_per_rank,
            options=options[name],
        )
        for name in names
    }
    console, sizes = Console(), read_lengths(lengths)
    simulations: dict[str, Simulation] = {}
    for name, planner in planners.items():
        simulations[name] = simulate_plan(planner(sizes), cluster_spec, model_spec)
        render(simulations[name], console)
    if json is not None:
        write_whole(json, _to_json(simulations, cluster_spec), "--json")
    if trace is not None:
        write_trace(trace, simulations, ranks=ranks, layers=layers)
    if report is not None:
        write_whole(report, build_page(list(simulations.values())), "--report")
    if png is not None:
        write_drawing(png, list(simulations.values()), "--png")
    for path in filter(None, targets.values()):
        say(f"written: {path}", console)


def _with_sync(cluster: ClusterSpec, sync: str | None) -> ClusterSpec:
    if sync not in (None, "layer", "step"):
        raise SpecError(f"--sync {sync!r} is unknown; legal values: layer, step")
    return cluster if sync is None else cluster.model_copy(update={"sync": sync})


def _split_names(strategies: str) -> list[str]:
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if not names or len(set(names)) != len(names):
        raise SpecError(f"--strategy {strategies!r}: give one or more different ones of {', '.join(STRATEGIES)}")
    return names


def _options_by_strategy(settings: list[str], names: list[str]) -> dict[str, dict[str, Any]]:
    """The options of each strategy from `strategy.option=value`."""
    options: dict[str, dict[str, Any]] = {name: {} for name in names}
    for setting in settings:
        key, value = parse_setting(setting)
        name, _, option = key.rpartition(".")
        if name not in options:
            raise SpecError(
                f"--set {setting!r}: begin with the strategy, as in {names[0]}.{option}=...; "
                f"simulated: {', '.join(names)}"
            )
        options[name][option] = value
    return options


def _parse_indices(text: str | None, count: int, option: str) -> list[int] | None:
    """The numbers that "0-7,16" stands for, each below `count`, ascending; None stands for all."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isdecimal() and (last.isdecimal() or not dash)):
            raise SpecError(f"{option} {text!r}: {part!r} is neither a number nor a range such as 0-7")
        numbers = range(int(first), int(last or first) + 1)
        if not numbers or numbers[-1] >= count:
            raise SpecError(f"{option} {text!r}: {part!r} is not in 0-{count - 1}")
        chosen.update(numbers)
    return sorted(chosen)


def _to_json(simulations: dict[str, Simulation], cluster: ClusterSpec) -> str:
    data = {
        "format": "layerwise-simulation-1",
        "num_ranks": cluster.num_ranks,
        "ranks_per_node": cluster.ranks_per_node,
        "sync": cluster.sync,
        "strategies": {name: simulation.to_dict() for name, simulation in simulations.items()},
    }
    return json_format.dumps(data, indent=1)
