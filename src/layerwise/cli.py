"""The command line: parse, call, print. Torch is imported only by the commands that train."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich.console import Console

from layerwise.data.lengths import read_lengths
from layerwise.errors import LayerwiseError, SpecError
from layerwise.planners import STRATEGIES, plan_step
from layerwise.spec import load_cluster, load_model, preset_names
from layerwise.summary import render, summarize

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train hybrid-attention models with a parallel layout of its own for each kind of layer.",
)
STRATEGY_HELP = f"One of: {', '.join(STRATEGIES)}."


def main() -> None:
    """Entry point: a LayerwiseError becomes one message on stderr and exit status 1."""
    try:
        app()
    except LayerwiseError as error:
        rank = os.environ.get("RANK")  # under torchrun every rank may have something to say
        print(f"layerwise: {'' if rank is None else f'rank {rank}: '}{error}", file=sys.stderr)
        sys.exit(1)


@app.command()
def plan(
    lengths: Annotated[str, typer.Option(help="File with one sample length per line (.gz too), or - for stdin.")],
    cluster: Annotated[str, typer.Option(help=f"YAML file or preset: {', '.join(preset_names('cluster'))}.")],
    model: Annotated[str, typer.Option(help=f"YAML file or preset: {', '.join(preset_names('model'))}.")],
    strategy: Annotated[str, typer.Option(help=STRATEGY_HELP)] = "repack+parents",
    max_tokens_per_rank: Annotated[int, typer.Option(min=1, help="Tokens a rank can hold in one micro-batch.")] = 32768,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="A strategy option, e.g. sp_degree=8."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Show where the N longest samples sit.")] = 10,
    json: Annotated[Path | None, typer.Option(help="Also write the plan to this file.")] = None,
) -> None:
    """Plan one step and print who owns what, and what it is predicted to cost."""
    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    sizes = read_lengths(lengths)
    step = plan_step(
        sizes,
        cluster=cluster_spec,
        model=model_spec,
        strategy=strategy,
        max_tokens_per_rank=max_tokens_per_rank,
        **_strategy_options(set_ or []),
    )
    render(summarize(step, cluster_spec, model_spec, num_samples=samples), Console())
    if json is not None:
        _write_whole(json, step.to_json())
        print(f"plan written to {json}")


@app.command()
def train(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; see docs/train.md.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. optimizer.learning_rate=1e-3."),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help=STRATEGY_HELP)] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Local ranks to start; must be what the cluster spec says.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for config, metrics, TensorBoard events and report.")] = Path(
        "runs/train"
    ),
    overwrite: Annotated[bool, typer.Option(help="Replace the run that the folder holds.")] = False,
) -> None:
    """Train with one strategy: starts the ranks itself, or joins those that torchrun started."""
    _run([strategy], config, set_ or [], nproc, steps, out, overwrite)


@app.command()
def compare(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; see docs/train.md.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one setting.")] = None,
    strategies: Annotated[
        str, typer.Option(help="Comma-separated strategies, trained one after the other on the same steps.")
    ] = "dynamic,repack+parents",
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    out: Annotated[
        Path, typer.Option(help="Folder; each strategy gets a folder in it, and report.html compares them.")
    ] = Path("runs/compare"),
    overwrite: Annotated[bool, typer.Option(help="Replace the runs that the folder holds.")] = False,
) -> None:
    """Train the same steps with several strategies and compare losses, balance and bytes."""
    names = [name.strip() for name in strategies.split(",") if name.strip()]
    if len(set(names)) != len(names) or len(names) < 2:
        raise SpecError(f"--strategies {strategies!r}: give two or more different ones of {', '.join(STRATEGIES)}")
    _run([*names], config, set_ or [], None, steps, out, overwrite)


def _run(
    strategies: Sequence[str | None],
    config: Path | None,
    overrides: list[str],
    nproc: int | None,
    steps: int | None,
    out: Path,
    overwrite: bool,
) -> None:
    """Train each strategy and write one report; a single one lives in `out` itself."""
    from layerwise.train.config import load_config
    from layerwise.train.launch import under_torchrun
    from layerwise.train.loop import build_planner
    from layerwise.train.results import print_and_report
    from layerwise.train.run import is_writer, prepare_folder, run_training

    configs = [load_config(config, overrides, strategy=name, num_steps=steps) for name in strategies]
    num_ranks = configs[0].cluster.num_ranks
    if nproc is not None and nproc != num_ranks:
        raise SpecError(
            f"--nproc {nproc}, but the cluster has num_nodes={configs[0].cluster.num_nodes} x ranks_per_node="
            f"{configs[0].cluster.ranks_per_node} = {num_ranks} ranks; give --nproc {num_ranks}, or --set "
            f"cluster.num_nodes=... and --set cluster.ranks_per_node=..."
        )
    if nproc is not None and under_torchrun():
        raise SpecError("--nproc has no effect under torchrun, which decides how many ranks there are; leave it out")
    if len(configs) > 1 and under_torchrun():
        raise SpecError("compare starts its own ranks; under torchrun, run `layerwise train` once per strategy")
    for item in configs:
        build_planner(item)  # a wrong strategy ends here, before another one is trained
    folders = [out] if len(configs) == 1 else [out / item.strategy for item in configs]
    if is_writer():
        for folder in folders:
            prepare_folder(folder, overwrite=overwrite)
    for item, folder in zip(configs, folders, strict=True):
        run_training(item, folder)
    if is_writer():
        print_and_report(configs, folders, out)


def _strategy_options(settings: list[str]) -> dict[str, Any]:
    options = {}
    for setting in settings:
        key, separator, value = setting.partition("=")
        if not separator:
            raise SpecError(f"--set {setting!r}: expected option=value, as in --set sp_degree=8")
        options[key] = yaml.safe_load(value)
    return options


def _write_whole(path: Path, text: str) -> None:
    """Write through a temporary file, so that a failure leaves no half-written result."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}", delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError as error:
        raise SpecError(f"{path}: cannot be written: {error}") from None
