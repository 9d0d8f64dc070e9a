"""Constants for a workload, chosen by what `dynamic` alone does on it: no repacking strategy is run here.

    python -m benchmarks.evaluate.workload_search --cap 65536,131072 --fill 0.9,0.95 --agent 0,0.02 \
        --set model.num_experts=64,128 --set cluster.sharded_params=false,true --steps 40

For every combination: how many of 200 steps would have parents wider than a node, how wide, and the MFU of
`dynamic` on those steps. The paper has 22 such steps, at an MFU near 59%.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import yaml
from rich.console import Console

from benchmarks.options import count, named_workload
from layerwise.cost import CostModel
from layerwise.errors import SpecError
from layerwise.evaluate.steps import BASELINE, has_wide_parent
from layerwise.evaluate.table import narrow_table
from layerwise.evaluate.workload import Workload
from layerwise.planners import Planner


class Point(NamedTuple):
    """One combination of constants, and what `dynamic` does there."""

    settings: dict[str, Any]
    wide_per_200: float
    degrees: Counter[int]
    mfu_pct: float | None
    all_mfu_pct: float


def change_mixture(workload: Workload, agent: float) -> Workload:
    """The workload with this token share of agent traces, the others scaled to the rest. Raises SpecError."""
    if not isinstance(agent, int | float) or not 0 <= agent < 1:
        raise SpecError(f"agent={agent}: a share of the tokens is at least 0 and less than 1")
    others = {name: share for name, share in workload.mixture.items() if name != "agent"}
    scale = (1 - agent) / sum(others.values())
    mixture = {name: share * scale for name, share in others.items()} | ({"agent": agent} if agent else {})
    return workload.change(mixture=mixture)


def change_setting(workload: Workload, key: str, value: Any) -> Workload:
    """The workload with `fill`, `agent`, `cluster.x` or `model.x` replaced. Raises SpecError."""
    prefix, _, name = key.partition(".")
    if key == "agent":
        return change_mixture(workload, value)
    if not name:
        return workload.change(**{key: value})
    spec = workload.cluster_spec if prefix == "cluster" else workload.model_spec
    return workload.change(**{prefix: spec.model_dump() | {name: value}})


def try_point(workload: Workload, settings: dict[str, Any], num_steps: int) -> Point:
    """Plan `num_steps` steps with `dynamic`; the workload has these settings already."""
    cost = CostModel(cluster=workload.cluster_spec, model=workload.model_spec)
    planner = Planner(
        strategy=BASELINE,
        cluster=cost.cluster,
        model=cost.model,
        max_tokens_per_rank=workload.max_tokens_per_rank,
    )
    plans = [planner(lengths) for lengths in workload.draw_steps(num_steps)]
    wide = [plan for plan in plans if has_wide_parent(plan)]
    return Point(
        settings=settings,
        wide_per_200=200 * len(wide) / num_steps,
        degrees=Counter(max(p.sp_degree for m in plan.microbatches for p in m.parents) for plan in wide),
        mfu_pct=_mfu_pct(cost, wide) if wide else None,
        all_mfu_pct=_mfu_pct(cost, plans),
    )


def _mfu_pct(cost: CostModel, plans: list[Any]) -> float:
    """Of the steps taken together: their model FLOPs over what the ranks could do in their seconds."""
    predictions = [cost.predict(plan) for plan in plans]
    seconds = sum(prediction.seconds for prediction in predictions)
    return 100 * sum(prediction.mfu * prediction.seconds for prediction in predictions) / seconds


def grid(options: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Workload]]:
    """Every combination of the values given, and the workload that has them. Raises SpecError."""
    axes = {"cap_tokens": options.cap, "fill": options.fill, "agent": options.agent}
    axes |= dict(options.set)
    values = {key: [yaml.safe_load(text) for text in given.split(",")] for key, given in axes.items() if given}
    for chosen in product(*values.values()):
        settings, workload = dict(zip(values, chosen, strict=True)), options.workload
        for key, value in settings.items():
            workload = change_setting(workload, key, value)
        CostModel(cluster=workload.cluster_spec, model=workload.model_spec)  # raises for what cannot be
        workload.draw_steps(0)  # likewise
        yield settings, workload


def setting(text: str) -> tuple[str, str]:
    """KEY=A,B"""
    key, equals, values = text.partition("=")
    if not (key and equals and values):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=A,B")
    return key, values


def main() -> None:
    """Print a row per combination."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workload", type=named_workload, default="paper")
    parser.add_argument("--cap", help="values of cap_tokens, comma-separated")
    parser.add_argument("--fill", help="values of fill")
    parser.add_argument("--agent", help="token shares of agent traces")
    parser.add_argument(
        "--set", type=setting, action="append", default=[], help="cluster.KEY=A,B or model.KEY=A,B or KEY=A,B"
    )
    parser.add_argument("--steps", type=count, default=40)
    options = parser.parse_args()
    try:
        points = list(grid(options))
    except SpecError as error:
        parser.error(str(error))
    console = Console()
    rows = []
    for settings, changed in points:
        point = try_point(changed, settings, options.steps)
        mfu = "-" if point.mfu_pct is None else f"{point.mfu_pct:.1f}"
        degrees = ", ".join(f"{count} x SP{degree}" for degree, count in sorted(point.degrees.items())) or "-"
        text = ", ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items()) or "as it is"
        rows.append([text, f"{point.wide_per_200:.0f}", mfu, f"{point.all_mfu_pct:.1f}", degrees])
        console.print(*rows[-1], sep="   ", highlight=False)
    console.print(narrow_table("dynamic alone", ["constants", "wide of 200", "their MFU %", "MFU %", "widest"], rows))


if __name__ == "__main__":
    main()
