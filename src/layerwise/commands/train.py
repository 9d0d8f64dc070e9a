"""layerwise train and compare: one strategy, or the same steps with several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from layerwise.errors import SpecError
from layerwise.planners import STRATEGIES
from layerwise.train.config import load_config


def train(
    config: Annotated[Path | None, typer.Option(help="YAML file of settings; see docs/train.md.")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Override one setting, e.g. optimizer.learning_rate=1e-3."),
    ] = None,
    strategy: Annotated[str | None, typer.Option(help=f"One of: {', '.join(STRATEGIES)}.")] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Local ranks to start; must be what the cluster spec says.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for config, metrics, TensorBoard events and report.")] = Path(
        "runs/train"
    ),
    overwrite: Annotated[bool, typer.Option(help="Replace the run that the folder holds.")] = False,
    resume: Annotated[
        bool, typer.Option(help="Go on from the newest whole checkpoint of the folder, or begin where there is none.")
    ] = False,
    profile: Annotated[
        bool, typer.Option("--profile", help="Trace three steps on every rank, and report where their time went.")
    ] = False,
) -> None:
    """Train with one strategy: starts the ranks itself, or joins those that torchrun started."""
    if overwrite and resume:
        raise SpecError("--overwrite replaces a run and --resume goes on with it; give one of them")
    _run([strategy], config, set_ or [], nproc, steps, out, overwrite=overwrite, resume=resume, profile=profile)


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
    _run([*names], config, set_ or [], None, steps, out, overwrite=overwrite)


def _run(
    strategies: Sequence[str | None],
    config: Path | None,
    overrides: list[str],
    nproc: int | None,
    steps: int | None,
    out: Path,
    *,
    overwrite: bool,
    resume: bool = False,
    profile: bool = False,
) -> None:
    """Train each strategy and write one report; a single one lives in `out` itself."""
    from layerwise.kernels import check_backend
    from layerwise.train.checkpoint import check_installed
    from layerwise.train.launch import under_torchrun
    from layerwise.train.loop import build_planner
    from layerwise.train.results import print_and_report
    from layerwise.train.run import is_writer, load_data, prepare_folder, run_training
    from layerwise.train.tracking import load_wandb

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
    if len(configs) > 1 and configs[0].checkpoint.folder:
        raise SpecError("checkpoint.folder cannot hold the checkpoints of several strategies; leave it out of compare")
    if resume or configs[0].checkpoint.every_steps:
        check_installed()
    for item in configs:
        build_planner(item)  # a wrong strategy ends here, before another one is trained
        check_backend(item.attention_backend)
        if item.wandb:
            load_wandb()
    folders = [out] if len(configs) == 1 else [out / item.strategy for item in configs]
    if is_writer():
        for item, folder in zip(configs, folders, strict=True):
            prepare_folder(item, folder, overwrite=overwrite, resume=resume)
    corpus = load_data(configs)
    for item, folder in zip(configs, folders, strict=True):
        run_training(item, corpus, folder, resume=resume, profile=profile)
    if is_writer():
        print_and_report(configs, corpus, folders, out)
