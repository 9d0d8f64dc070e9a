"""One training run in one folder: resolved config, metrics, TensorBoard events, and the ranks that make them."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from layerwise.console import say
from layerwise.data.corpus import Corpus, load_corpus
from layerwise.data.limits import placeable_tokens
from layerwise.errors import InfeasibleError, SpecError
from layerwise.groups import ProcessWorld
from layerwise.labels import counted
from layerwise.planners import STRATEGIES, Planner
from layerwise.train.checkpoint import remove_checkpoints, step_folders
from layerwise.train.config import TrainConfig
from layerwise.train.launch import launch, under_torchrun
from layerwise.train.loop import build_planner, build_sampler, train
from layerwise.train.metrics import Recorder, progress_line
from layerwise.train.profile import PROFILE_FOLDER

METRICS_FILE, CONFIG_FILE, REPORT_FILE, LOCK_FILE = "metrics.jsonl", "config.yaml", "report.html", ".lock"
EVENTS_FOLDER, CHECKPOINT_FOLDER = "tensorboard", "checkpoints"
# The ranks of a launcher that was killed end a moment after it.
LOCK_PATIENCE_S = 10.0


def is_writer() -> bool:
    """True in the process that owns the output folder: rank 0, or the one that will fork the ranks."""
    return not under_torchrun() or os.environ["RANK"] == "0"


def checkpoint_folder(config: TrainConfig, out: Path) -> Path:
    """Where a run with results in `out` has its checkpoints."""
    return Path(config.checkpoint.folder) if config.checkpoint.folder else out / CHECKPOINT_FOLDER


def prepare_folder(config: TrainConfig, out: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Make the folders of a run that begins, or with `resume` goes on where they hold one.

    Raises SpecError where they cannot be made, or hold a run that is neither to be replaced nor to go on.
    """
    metrics, checkpoints = out / METRICS_FILE, checkpoint_folder(config, out)
    saved = step_folders(checkpoints)
    if not overwrite and not resume and (metrics.exists() or saved):
        raise SpecError(_holds_a_run(out if metrics.exists() else checkpoints))
    if resume and saved and not metrics.exists():
        raise SpecError(f"--resume: {checkpoints} holds checkpoints, but {metrics} is not there; is --out the same?")
    taken = next(iter(saved), 0)
    if resume and taken > config.num_steps:
        raise SpecError(
            f"--resume: num_steps={config.num_steps}, but {taken} steps are taken; give num_steps={taken} or more"
        )
    with _writing(f"--out {out}"):
        _make(out)
        if overwrite:
            with _alone_in(out):
                metrics.unlink(missing_ok=True)
                shutil.rmtree(out / EVENTS_FOLDER, ignore_errors=True)
                shutil.rmtree(out / PROFILE_FOLDER, ignore_errors=True)
                remove_checkpoints(checkpoints)
    if config.checkpoint.every_steps:
        with _writing(f"checkpoints in {checkpoints}"):
            _make(checkpoints)


@contextmanager
def _writing(what: str) -> Iterator[None]:
    """Raises SpecError where files or folders cannot be written."""
    try:
        yield
    except OSError as error:
        path = f" {error.filename}:" if error.filename else ""
        raise SpecError(
            f"{what}: cannot be written:{path} {error.strerror or error}; make room or permit writing there, or name "
            "another folder"
        ) from None


def _make(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Hold the folder's lock, which the system drops with the last process of a run.

    Raises SpecError where another run keeps it. Where the file system has no locks there is none.
    """
    with (out / LOCK_FILE).open("a") as file:
        deadline = time.monotonic() + LOCK_PATIENCE_S
        while not _try_to_lock(file):
            if time.monotonic() > deadline:
                raise SpecError(f"{out}: another run is at work in this folder; end it, or choose another --out")
            time.sleep(0.1)
        yield


def _try_to_lock(file: TextIO) -> bool:
    with suppress(OSError):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _holds_a_run(folder: Path) -> str:
    return (
        f"{folder} already holds a run; choose another --out, pass --resume to go on with it, or --overwrite to "
        "replace it"
    )


def load_data(configs: Sequence[TrainConfig]) -> Corpus:
    """The samples of runs that differ in their strategy only; says once what became of the data.

    Raises LayerwiseError for data that a run cannot use, before any rank starts; forked ranks share what is loaded.
    """
    config = configs[0]
    corpus = load_corpus(config.data, vocab_size=config.model.vocab_size, budget_tokens=_budget_tokens(configs))
    for each in configs:
        _check_longest(corpus, build_planner(each))
    if is_writer():
        num_longer = int((corpus.lengths > config.tokens_per_step).sum())
        longer = f"; {num_longer:,} longer than tokens_per_step={config.tokens_per_step}, each a step of its own"
        lines = [f"data: {corpus.report}{longer if num_longer else ''}", *_mixture_lines(config, corpus)]
        say("\n".join(lines), Console(stderr=True))
    return corpus


def _mixture_lines(config: TrainConfig, corpus: Corpus) -> Iterator[str]:
    if config.data.mixture:
        for name, visits in zip(config.data.mixture, build_sampler(config, corpus).visits(), strict=True):
            seen = f"{counted(visits.samples, 'sample')}, {counted(visits.tokens, 'token')}"
            yield f"  {name}: {seen}, {visits.epochs:.2f} epochs"


def _budget_tokens(configs: Sequence[TrainConfig]) -> int | None:
    """The longest sample that every run can place, where longer ones are to be skipped or cut."""
    if configs[0].data.overlong == "error":
        return None
    return min(
        placeable_tokens(build_planner(each), at_most=each.cluster.num_ranks * each.max_tokens_per_rank)
        for each in configs
    )


def run_training(
    config: TrainConfig, corpus: Corpus, out: Path, *, resume: bool = False, profile: bool = False
) -> None:
    """Train `config` with its results in `out`, from its newest checkpoint on where `resume` is set.

    profile: also look at where the time of a few steps goes.

    Under torchrun every rank calls this. Raises LayerwiseError; what the folder holds then is a readable beginning of
    a run, or no run.
    """

    folder = checkpoint_folder(config, out)

    def rank_main(world: ProcessWorld, device: torch.device) -> None:
        with _WriterRank(config, out) if world.rank == 0 else _QuietRank() as watcher:
            traces = out / PROFILE_FOLDER if profile else None
            train(config, corpus, world, device, watcher, folder=folder, resume=resume, profile=traces)

    with _claim(config, out, resume) if is_writer() else nullcontext():
        launch(
            rank_main,
            num_ranks=config.cluster.num_ranks,
            ranks_per_node=config.cluster.ranks_per_node,
            device=config.device,
            timeout_s=config.timeout_s,
        )


@contextmanager
def _claim(config: TrainConfig, out: Path, resume: bool) -> Iterator[None]:
    """Of two runs started at once in one folder one ends here; after one without a step it may be used again."""
    metrics = out / METRICS_FILE
    with _alone_in(out):
        try:
            metrics.touch(exist_ok=resume)
        except FileExistsError:
            raise SpecError(_holds_a_run(out)) from None
        try:
            with _writing(f"--out {out}"):
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
    def start(self, first_step: int) -> None: ...

    def say(self, text: str) -> None: ...

    def step(self, row: dict[str, Any]) -> None: ...

    def __exit__(self, *error: object) -> None: ...


class _TwoLines(Progress):
    """The bar, and below it what the task's `info` says."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        yield from (Text(task.fields["info"]) for task in self.tasks)


class _WriterRank(AbstractContextManager["_WriterRank"]):
    """Rank 0: metrics to the folder, progress to the terminal."""

    def __init__(self, config: TrainConfig, out: Path) -> None:
        self._config, self._out = config, out
        self._recorder: Recorder | None = None
        self._progress = _TwoLines(
            TextColumn(f"{{task.description:<{max(map(len, STRATEGIES))}}}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
        )
        self._unlabelled_steps = 0
        self._task = self._progress.add_task(config.strategy, total=config.num_steps, info="starting")
        self._progress.start()

    def start(self, first_step: int) -> None:
        with _writing(f"--out {self._out}"):
            self._recorder = Recorder(self._config, self._out, first_step)
        self._progress.update(self._task, completed=first_step)

    def say(self, text: str) -> None:
        say(text, self._progress.console)

    def step(self, row: dict[str, Any]) -> None:
        assert self._recorder is not None, "start comes first"
        with _writing(f"--out {self._out}: the metrics of step {row['step']}"):
            self._recorder.write(row)
        if not row["num_valid_tokens"]:
            self._warn_unlabelled(row["step"])
        self._progress.update(self._task, advance=1, info=progress_line(row))

    def _warn_unlabelled(self, step: int) -> None:
        if not self._unlabelled_steps:
            self.say(
                f"warning: step {step} has no label to learn from (num_valid_tokens is 0): its loss is 0; "
                "are all labels -100?"
            )
        self._unlabelled_steps += 1

    def __exit__(self, *error: object) -> None:
        self._progress.stop()
        if self._unlabelled_steps > 1:
            self.say(f"warning: {self._unlabelled_steps} steps had no label")
        if self._recorder is not None:
            with _writing(f"--out {self._out}") if error[0] is None else suppress(OSError):
                self._recorder.close()
