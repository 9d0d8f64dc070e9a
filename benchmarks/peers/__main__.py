"""`python -m benchmarks.peers`: planners of other systems beside ours; docs/peers.md explains the table."""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from benchmarks.options import count, length_file, target, whole
from benchmarks.peers import megatron, verl
from benchmarks.peers.compare import BASE, Row, compare, ours
from benchmarks.peers.steps import SYNTHETIC, draw_samples, draw_steps, load_lengths
from benchmarks.peers.tables import markdown, rich_table, write_between_markers
from benchmarks.peers.task import Peer, Task
from layerwise import load_cluster, load_model
from layerwise.cost import CostModel

try:
    from benchmarks.peers import exact, flexsp
except ModuleNotFoundError as error:
    sys.exit(f"{error}: install the extra 'peers'")

BUDGET_TOKENS = 32768
FILL = 0.72  # of the ranks' budget that a step fills, so that every planner can do with one micro-batch
SMALL_CLUSTER, SMALL_SAMPLES = {"num_nodes": 2, "ranks_per_node": 4}, 9

STATIC = Peer("static SP, KK", verl.plan_static_kk)
FLEXSP = Peer("FlexSP MILP", flexsp.plan_flexsp)
EXACT = Peer("exact (CP-SAT)", exact.plan_exact)


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument(
        "--lengths",
        nargs="+",
        type=length_file,
        default=[],
        metavar="FILE",
        help="length files, beside the synthetic source",
    )
    parser.add_argument("--out", type=target, help="JSON of all rows")
    parser.add_argument("--docs", type=target, help="document whose tables to replace, docs/peers.md")
    parser.add_argument("--steps", type=count, default=20, help="steps of each source")
    parser.add_argument("--seed", type=whole(0), default=0)
    return parser.parse_args()


def megatron_peers() -> list[Peer]:
    """Megatron-Core's scheduler, where its wheel is installed."""
    try:
        megatron.scheduler_class()
    except ImportError:
        return []
    return [Peer("Megatron", megatron.plan_at_budget), Peer("Megatron, tuned", megatron.plan_tuned)]


def large_tasks(source: str, cost: CostModel, num_steps: int, seed: int) -> Iterator[Task]:
    """Steps that fill 64 ranks."""
    tokens = int(FILL * cost.cluster.num_ranks * BUDGET_TOKENS)
    for lengths in draw_steps(load_lengths(source, seed), num_steps, tokens, _seed(source, seed)):
        yield Task(lengths=lengths, cost=cost, max_tokens_per_rank=BUDGET_TOKENS)


def small_tasks(source: str, cost: CostModel, num_steps: int, seed: int) -> Iterator[Task]:
    """A few samples on 8 ranks, with a budget that they fill as much as the large steps do."""
    for lengths in draw_samples(load_lengths(source, seed), num_steps, SMALL_SAMPLES, _seed(source, seed)):
        budget = -int(-lengths.sum() // (FILL * cost.cluster.num_ranks))
        yield Task(lengths=lengths, cost=cost, max_tokens_per_rank=budget)


def _seed(source: str, seed: int) -> int:
    return zlib.crc32(f"{Path(source).name} {seed}".encode())


def main() -> None:
    """Both tables, printed and written."""
    args, console = arguments(), Console()
    cluster, model = load_cluster("paper"), load_model("paper-1f3s")
    large = CostModel(cluster=cluster, model=model)
    small = CostModel(cluster=cluster.model_copy(update=SMALL_CLUSTER), model=model)
    peers, sources = [*megatron_peers(), STATIC, FLEXSP], [*map(str, args.lengths), SYNTHETIC]
    if len(peers) == 2:
        console.print("without Megatron-Core: install the extra 'peers' for it")
    large_rows: list[Row] = []
    small_rows: list[Row] = []
    with Progress(console=console) as progress:
        bar = progress.add_task("steps", total=2 * len(sources) * args.steps)
        for source in sources:
            for tasks, cost, rows, planners in (
                (large_tasks, large, large_rows, [ours(BASE), ours("repack+parents"), *peers]),
                (small_tasks, small, small_rows, [ours(BASE), EXACT, *peers]),
            ):
                name = Path(source).name.split(".")[0]
                steps = tasks(source, cost, args.steps, args.seed)
                rows += compare(name, steps, planners, lambda: progress.advance(bar))
    titles = (
        f"{cluster.num_ranks} ranks, {args.steps} steps of each source",
        f"{small.cluster.num_ranks} ranks and {SMALL_SAMPLES} samples, {args.steps} steps of each source",
    )
    tables = list(zip((large_rows, small_rows), titles, strict=True))
    for rows, title in tables:
        console.print(rich_table(rows, title))
    if args.docs:
        write_between_markers(args.docs, "\n".join(markdown(rows, title) for rows, title in tables))
    if args.out:
        settings = {"steps": args.steps, "seed": args.seed, "budget_tokens": BUDGET_TOKENS, "fill": FILL}
        rows_json = {"large": [asdict(row) for row in large_rows], "small": [asdict(row) for row in small_rows]}
        args.out.write_text(json.dumps({**settings, **rows_json}, indent=1))


if __name__ == "__main__":
    main()
