"""layerwise plan: one step's layout and its predicted cost."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from layerwise.cost import CostModel
from layerwise.data.lengths import read_lengths
from layerwise.explain import sample as explaining
from layerwise.files import check_target, write_whole
from layerwise.planners import STRATEGIES, Planner
from layerwise.report.summary import render, summarize
from layerwise.spec import load_cluster, load_model, preset_names
from layerwise.train.config import parse_setting


def plan(
    lengths: Annotated[str, typer.Option(help="File with one sample length per line (.gz too), or - for stdin.")],
    cluster: Annotated[str, typer.Option(help=f"YAML file or preset: {', '.join(preset_names('cluster'))}.")],
    model: Annotated[str, typer.Option(help=f"YAML file or preset: {', '.join(preset_names('model'))}.")],
    strategy: Annotated[str, typer.Option(help=f"One of: {', '.join(STRATEGIES)}.")] = "repack+parents",
    max_tokens_per_rank: Annotated[int, typer.Option(min=1, help="Tokens a rank can hold in one micro-batch.")] = 32768,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="OPTION=VALUE", help="A strategy option, e.g. sp_degree=8."),
    ] = None,
    samples: Annotated[int, typer.Option(min=0, help="Show where the N longest samples sit.")] = 10,
    explain: Annotated[
        list[int] | None,
        typer.Option(metavar="SAMPLE", help="Say why this sample (0 is the first) sits where it sits; repeatable."),
    ] = None,
    json: Annotated[Path | None, typer.Option(help="Also write the plan to this file.")] = None,
) -> None:
    """Plan one step and print who owns what, and what it is predicted to cost."""
    cluster_spec, model_spec = load_cluster(cluster), load_model(model)
    planner = Planner(
        strategy=strategy,
        cluster=cluster_spec,
        model=model_spec,
        max_tokens_per_rank=max_tokens_per_rank,
        options=dict(parse_setting(setting) for setting in set_ or []),
    )
    if json is not None:
        check_target(json, "--json")
    sizes = read_lengths(lengths)
    chosen = list(dict.fromkeys(explain or []))
    for sample in chosen:
        explaining.check_sample(sample, len(sizes))
    step = planner(sizes)
    if json is not None:
        write_whole(json, step.to_json(), "--json")
    console, cost = Console(), CostModel(cluster=cluster_spec, model=model_spec)
    render(summarize(step, cluster_spec, model_spec, num_samples=samples), console)
    for sample in chosen:
        explaining.render(explaining.explain_sample(step, sample, cost), console)
    if json is not None:
        print(f"plan written to {json}")
