"""One training run in one folder: resolved config, metrics, TensorBoard events, and the ranks that make them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from layerwise.data.corpus import Corpus, load_corpus
from layerwise.errors import InfeasibleError, SpecError
from layerwise.groups import World
from layerwise.planners import STRATEGIES, Planner
from layerwise.train.config import TrainConfig
from layerwise.train.launch import launch
from layerwise.train.loop import build_planner, train
from layerwise.train.metrics import Recorder

METRICS_FILE, CONFIG_FILE, REPORT_FILE = "metrics.jsonl", "config.yaml", "report.html"
EVENTS_FOLDER = "tensorboard"


def is_writer() -> bool:
    """True in the process that owns the output folder: rank 0, or the one that will fork the ranks."""
    return os.environ.get("RANK", "0") == "0"


def prepare_folder(out: Path, *, overwrite: bool) -> None:
    """Make the output folder. Raises SpecError where it cannot be made or already holds a run, unless `overwrite`."""
    metrics = out / METRICS_FILE
    if metrics.exists() and not overwrite:
        raise SpecError(_holds_a_run(out))
    try:
        out.mkdir(parents=True, exist_ok=True)
        metrics.unlink(missing_ok=True)
        shutil.rmtree(out / EVENTS_FOLDER, ignore_errors=True)
    except OSError as error:
        raise SpecError(f"--out {out}: cannot be written: {error}") from None


def _holds_a_run(out: Path) -> str:
    return f"{out} already holds a run ({METRICS_FILE}); choose another --out, or pass --overwrite to replace it"


def load_data(configs: Sequence[TrainConfig]) -> Corpus:
    """The samples of runs that differ in their strategy only; says once what became of the data.

    Raises LayerwiseError for data that a run cannot use, before any rank starts; forked ranks share what is loaded.
    """
    config = configs[0]
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size)
    for each in configs:
        _check_longest(corpus, build_planner(each))
    if is_writer():
        num_longer = int((corpus.lengths > config.tokens_per_step).sum())
        longer = f"; {num_longer:,} longer than tokens_per_step={config.tokens_per_step}, each a step of its own"
        text = f"data: {corpus.report}{longer if num_longer else ''}"
        Console(stderr=True).print(text, highlight=False, soft_wrap=True)
    return corpus


def run_training(config: TrainConfig, corpus: Corpus, out: Path) -> None:
    """Train `config` with its results in `out`; under torchrun every rank calls this.

    Raises LayerwiseError; what the folder holds then is a readable beginning of a run, or no run.
    """

    def rank_main(world: World, device: torch.device) -> None:
        with _WriterRank(config, out) if world.rank == 0 else _QuietRank() as watcher:
            train(config, corpus, world, device, watcher)

    with _claim(config, out) if is_writer() else nullcontext():
        launch(
            rank_main,
            num_ranks=config.cluster.num_ranks,
            ranks_per_node=config.cluster.ranks_per_node,
            device=config.device,
            timeout_s=config.timeout_s,
        )


@contextmanager
def _claim(config: TrainConfig, out: Path) -> Iterator[None]:
    """Of two runs started at once in one folder one ends here; a run without a step gives the folder back."""
    metrics = out / METRICS_FILE
    try:
        metrics.touch(exist_ok=False)
    except FileExistsError:
        raise SpecError(_holds_a_run(out)) from None
    try:
        (out / CONFIG_FILE).write_text(config.to_yaml())
        yield
    finally:
        Console(stderr=True).show_cursor()  # the rank that drew the progress bar may have been killed
        if metrics.exists() and not metrics.stat().st_size:
            metrics.unlink()


def _check_longest(corpus: Corpus, planner: Planner) -> None:
    longest = int(corpus.lengths.argmax())
    try:
        planner([int(corpus.lengths[longest])])
    except InfeasibleError as error:
        raise InfeasibleError(
            f"the longest sample of the data, {corpus[longest].name!r}, planned alone: {error}"
        ) from None


def read_metrics(out: Path) -> list[dict[str, Any]]:
    """The rows that a run wrote."""
    return [json.loads(line) for line in (out / METRICS_FILE).read_text().splitlines()]


class _QuietRank(AbstractContextManager["_QuietRank"]):
    def step(self, row: dict[str, Any]) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _WriterRank(AbstractContextManager["_WriterRank"]):
    """Rank 0: metrics to the folder, progress to the terminal."""

    def __init__(self, config: TrainConfig, out: Path) -> None:
        self._recorder = Recorder(out)
        self._progress = Progress(
            TextColumn(f"{{task.description:<{max(map(len, STRATEGIES))}}}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[info]}"),
            console=Console(stderr=True),
        )
        self._unlabelled_steps = 0
        self._task = self._progress.add_task(config.strategy, total=config.num_steps, info="starting")
        self._progress.start()

    def step(self, row: dict[str, Any]) -> None:
        self._recorder.write(row)
        if not row["num_valid_tokens"]:
            self._warn_unlabelled(row["step"])
        info = f"loss {row['loss']:.4f}  {row['num_tokens'] / row['step_s']:,.0f} tokens/s"
        self._progress.update(self._task, advance=1, info=info)

    def _warn_unlabelled(self, step: int) -> None:
        if not self._unlabelled_steps:
            self._progress.console.print(
                f"warning: step {step} has no label to learn from (num_valid_tokens is 0): its loss is 0; "
                "are all labels -100?",
                highlight=False,
                soft_wrap=True,
            )
        self._unlabelled_steps += 1

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        if self._unlabelled_steps > 1:
            self._progress.console.print(f"warning: {self._unlabelled_steps} steps had no label", highlight=False)
        self._recorder.close()
