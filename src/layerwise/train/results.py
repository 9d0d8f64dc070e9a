"""What runs came to: one table on the terminal, one HTML report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from layerwise.console import say
from layerwise.data.corpus import Corpus
from layerwise.labels import counted
from layerwise.plan import StepPlan
from layerwise.report.page import RunRecord, strategy_rows, write_report
from layerwise.report.profile import read_profile
from layerwise.train.config import TrainConfig
from layerwise.train.loop import build_planner, build_sampler
from layerwise.train.profile import PROFILE_FOLDER, SUMMARY_FILE
from layerwise.train.run import REPORT_FILE, read_metrics


def print_and_report(configs: Sequence[TrainConfig], corpus: Corpus, folders: Sequence[Path], out: Path) -> None:
    """Print the strategies side by side and write out/report.html. Runs differ in their strategy only."""
    runs = [
        RunRecord(
            strategy=config.strategy,
            rows=read_metrics(folder),
            num_ranks=config.cluster.num_ranks,
            num_layers={kind: config.model.num_layers_of(kind) for kind in config.model.kinds},
            profile=read_profile(folder / PROFILE_FOLDER / SUMMARY_FILE),
        )
        for config, folder in zip(configs, folders, strict=True)
    ]
    _print_table(runs)
    plans = telling_step(configs[0], configs[-1], corpus) if len(configs) > 1 else None
    names = " and ".join(run.strategy for run in runs)
    write_report(
        out / REPORT_FILE,
        title=f"layerwise: {names}",
        runs=runs,
        plans=plans,
        config_text=configs[-1].to_yaml(),
    )
    say(f"report: {out / REPORT_FILE}", Console())


def telling_step(before: TrainConfig, after: TrainConfig, corpus: Corpus) -> tuple[StepPlan, StepPlan]:
    """Both strategies' plans of the step in which `after` repacks the most tokens; of the longest sample if none.

    Planning is a pure function of the lengths, so the plans are those that the runs used.
    """
    steps = [corpus.lengths[ids].tolist() for ids in build_sampler(after, corpus)]
    planner = build_planner(after)
    chosen = max(steps, key=lambda lengths: (_repacked_tokens(planner(lengths)), max(lengths)))
    return build_planner(before)(chosen), planner(chosen)


def _repacked_tokens(plan: StepPlan) -> int:
    parents = [parent for microbatch in plan.microbatches for parent in microbatch.parents if parent.repacked]
    return sum(plan.lengths[sample] for parent in parents for sample in parent.samples)


def _print_table(runs: Sequence[RunRecord]) -> None:
    """Headings down, strategies across."""
    rows = strategy_rows(runs)
    table = Table(
        title=f"{counted(len(runs[0].rows), 'step')} on {counted(runs[0].num_ranks, 'rank')}", title_justify="left"
    )
    for index, heading in enumerate(rows[0]):
        values = [row[heading] for row in rows]
        if index == 0:
            table.add_column(heading)
            for value in values:
                table.add_column(value, justify="right")
        else:
            table.add_row(heading, *values)
    Console().print(table)
