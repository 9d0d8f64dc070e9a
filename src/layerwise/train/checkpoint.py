"""Checkpoints that a crash at any moment cannot spoil; docs/checkpoints.md describes the files.

A folder of a run's checkpoints holds one folder per checkpoint. It is written under another name, and takes its own,
`step-00000020`, when every rank's tensors and then the manifest are on the disk. Tensors are safetensors files and the
rest is JSON, so that nothing is unpickled; every file is compared with the manifest before anything reads it.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future as TorchFuture

from layerwise.errors import CheckpointError, SpecError, UnsupportedError
from layerwise.exchange import waiting
from layerwise.groups import ProcessWorld
from layerwise.traffic import Block
from layerwise.train.manifest import FileDigest, digest_file, read_manifest, sync, verify_file, write_manifest

STATE_FILE = "state.json"
_COMPLETE, _PARTIAL, _DAMAGED = re.compile(r"step-(\d{8,})"), ".partial", ".damaged"
_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a checkpoint holds beside tensors, as JSON.

    step: optimizer steps taken, which is also the position in the data and in the schedule of the learning rate.
    num_ranks: that saved it. data: a fingerprint of the samples, and what decides their order. config: every setting,
    the planner's among them.
    """

    step: int
    num_ranks: int
    data: dict[str, Any]
    config: dict[str, Any]


def check_installed() -> None:
    """Raise UnsupportedError where checkpoints could be neither written nor read."""
    try:
        import safetensors  # noqa: F401
    except ImportError:
        raise UnsupportedError("checkpoints need the package `safetensors`: pip install 'layerwise[train]'") from None


def step_folders(folder: Path) -> dict[int, Path]:
    """Complete checkpoints by step, newest first; their files are not looked at."""
    found = {path: _COMPLETE.fullmatch(path.name) for path in folder.iterdir()} if folder.is_dir() else {}
    by_step = {int(match[1]): path for path, match in found.items() if match}
    return dict(sorted(by_step.items(), reverse=True))


def remove_checkpoints(folder: Path) -> None:
    """Remove every checkpoint, whole or not; other files stay."""
    for path in folder.glob("step-*"):
        shutil.rmtree(path)


class Checkpoints:
    """The checkpoints of a run, seen from one rank. Every rank makes the same calls.

    keep: how many complete ones stay. timeout_s: how long ranks wait for the slowest that reads or writes one.
    warn: is told what went wrong and is not an error; called on rank 0.
    """

    def __init__(
        self, folder: Path, world: ProcessWorld, *, keep: int, timeout_s: float, warn: Callable[[str], None]
    ) -> None:
        self.world = world
        self._folder, self._keep, self._warn = folder, keep, warn
        self._timeout = timedelta(seconds=timeout_s)
        self._saving: tuple[int, Future[Any]] | None = None
        self._failure: str | None = None
        if world.rank == 0:
            for leftover in folder.glob(f"step-*{_PARTIAL}"):
                shutil.rmtree(leftover, ignore_errors=True)

    @cached_property
    def _group(self) -> Any:
        """Made when the first checkpoint is saved or looked for, which all ranks do at once."""
        return self.world.side_group(self._timeout)

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, state: RunState, *, wait: bool) -> None:
        """Start to save, once an earlier save has ended. What changes after the call is not saved.

        A save that fails is a warning, and the next one is tried; `close` raises if it was the last.
        """
        self.wait()
        tensors = _tensors(model, optimizer) | _random_states(self.world.rank)
        name = f"step-{state.step:08d}"
        writer = _Writer(self._folder / (name + _PARTIAL), lambda files: self._complete(name, files, state))
        # Typed as a union with the response of stagers that we do not use.
        future: Any = dcp.async_save(tensors, storage_writer=writer, process_group=self._group)
        self._saving = state.step, future
        if wait:
            self.wait()

    def wait(self) -> None:
        """Wait for the save in flight."""
        if self._saving is None:
            return
        (step, future), self._saving, self._failure = self._saving, None, None
        self.world.progress.at = f"the checkpoint after step {step}"
        try:
            future.result()
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            self._failure = self._explain(step, error)
            if self.world.rank == 0:
                shutil.rmtree(self._folder / f"step-{step:08d}{_PARTIAL}", ignore_errors=True)
                self._warn(f"warning: {self._failure}")

    def close(self) -> None:
        """Wait for the last save. Raises CheckpointError where it failed."""
        self.wait()
        if self._failure:
            raise CheckpointError(self._failure)

    def newest(self) -> tuple[Path, RunState] | None:
        """The newest checkpoint whose files are what its manifest says; each rank compares some of them.

        A damaged one is said, renamed and passed over. Raises CheckpointError where a rank does not see the folder.
        """
        self.world.progress.at = "the comparison of checkpoints with their manifests"
        while True:
            step = self.world.gather_ints([next(iter(step_folders(self._folder)), -1)])[0][0]
            if step < 0:
                return None
            path = self._folder / f"step-{step:08d}"
            faults: list[str | None] = [None] * self.world.num_ranks
            with waiting(self.world.progress, self.world.rank, Block(0, self.world.num_ranks)):
                dist.all_gather_object(faults, self._fault(path), group=self._group)
            fault = next((fault for fault in faults if fault), None)
            if fault is None:
                return path, _read_state(path)
            if self.world.rank == 0:
                self._warn(f"warning: damaged checkpoint, using the one before it: {fault}")
                _move(path, path.with_name(path.name + _DAMAGED))
            self.world.gather_ints([0])  # nobody looks again before it is renamed

    def load(self, path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, state: RunState) -> None:
        """Load what `newest` returned, whatever the sharding and the number of ranks now.

        With as many ranks as saved it, each gets its random state back.
        """
        self.world.progress.at = f"loading {path.name}"
        rank = self.world.rank
        tensors = _tensors(model, optimizer)
        random_states = _random_states(rank) if state.num_ranks == self.world.num_ranks else {}
        reader = dcp.HuggingFaceStorageReader(str(path))
        try:
            dcp.load(tensors | random_states, storage_reader=reader, process_group=self._group)
        except CheckpointException as error:  # a BaseException
            raise CheckpointError(f"{path} could not be loaded: {_reason(error)}") from error
        weights: dict[str, Any] = {
            name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")
        }
        _, hyperparameters = _state_dicts(model, optimizer)
        moments = {name.removeprefix("optimizer."): t for name, t in tensors.items() if name.startswith("optimizer.")}
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=hyperparameters | moments, options=_OPTIONS
        )
        _set_random_states(random_states)

    def _fault(self, path: Path) -> str | None:
        """What is wrong with this rank's share of a checkpoint's files, or None."""
        if not path.is_dir():
            return f"rank {self.world.rank} does not see {path}; is the folder shared by all hosts?"
        try:
            files = read_manifest(path)
            unknown = {p.name for p in path.glob("*.safetensors")} - {file.name for file in files}
            if unknown:
                raise CheckpointError(f"{path}: {sorted(unknown)[0]} is not in its manifest")
            for file in files[self.world.rank :: self.world.num_ranks]:
                verify_file(path, file)
        except CheckpointError as error:
            return str(error)
        return None

    def _complete(self, name: str, files: list[FileDigest], state: RunState) -> None:
        """On rank 0, when all tensors are on the disk: the last files, the name, and older checkpoints go."""
        partial, path = self._folder / (name + _PARTIAL), self._folder / name
        _check_all_here(partial, files)
        (partial / STATE_FILE).write_text(json.dumps(asdict(state), indent=1), encoding="utf-8")
        sync(partial / STATE_FILE)
        write_manifest(partial, [*files, digest_file(partial / STATE_FILE)])
        _move(partial, path)
        sync(self._folder)
        for old in list(step_folders(self._folder).values())[self._keep :]:
            gone = old.with_name(old.name + _PARTIAL)
            _move(old, gone)  # never half a checkpoint under a whole one's name
            shutil.rmtree(gone, ignore_errors=True)

    def _explain(self, step: int, error: BaseException) -> str:
        last = next(iter(step_folders(self._folder).values()), None)
        kept = f"the last complete one is {last}" if last else "there is no complete one yet"
        return f"the checkpoint after step {step} could not be saved in {self._folder}: {_reason(error)}; {kept}"


class _Writer(dcp.HuggingFaceStorageWriter):
    """One safetensors file per rank; `complete` is called on rank 0 with the digests of all of them."""

    def __init__(self, path: Path, complete: Callable[[list[FileDigest]], None]) -> None:
        super().__init__(str(path), save_distributed=True)
        self._complete = complete

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> TorchFuture[list[WriteResult]]:
        results = super().write_data(plan, planner).wait()
        names = {result.storage_data.relative_path for result in results}
        digests = {name: digest_file(Path(self.path) / name) for name in names}
        future: TorchFuture[list[WriteResult]] = TorchFuture()
        future.set_result([replace(r, storage_data=digests[r.storage_data.relative_path]) for r in results])
        return future

    def finish(self, metadata: Any, results: list[list[WriteResult]]) -> None:
        files = {result.storage_data for of_rank in results for result in of_rank}
        self._complete(sorted(files, key=lambda file: file.name))


def _reason(error: BaseException) -> str:
    """The first rank's failure, in one line."""
    if not isinstance(error, CheckpointException):
        return f"{type(error).__name__}: {error}"
    rank, (cause, _) = min(error.failures.items(), key=lambda failure: failure[0])
    return f"rank {rank}: {type(cause).__name__}: {cause}"


def _state_dicts(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Both by name; torch types them wider than they are."""
    return get_state_dict(model, optimizer, options=_OPTIONS)


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every tensor of the model and the optimizer by name, sharded as they are; not copies."""
    weights, moments = _state_dicts(model, optimizer)
    named = {f"model.{name}": value for name, value in weights.items()}
    named |= {f"optimizer.{name}": value for name, value in moments.items() if isinstance(value, Tensor)}
    return named


def _random_states(rank: int) -> dict[str, Tensor]:
    """torch's random states of this rank, uint8."""
    states = {f"random.{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states[f"random.{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_random_states(states: dict[str, Tensor]) -> None:
    for name, state in states.items():
        (torch.cuda if name.endswith(".cuda") else torch).set_rng_state(state)


def _read_state(path: Path) -> RunState:
    try:
        return RunState(**json.loads((path / STATE_FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{path / STATE_FILE}: written by another version of layerwise? {error}") from None


def _check_all_here(folder: Path, files: list[FileDigest]) -> None:
    missing = [file.name for file in files if not (folder / file.name).is_file()]
    if missing:
        raise CheckpointError(
            f"rank 0 does not see {len(missing)} of the {len(files)} files that other ranks wrote to {folder}, "
            f"{missing[0]} among them: checkpoint.folder must be on storage that all hosts share"
        )


def _move(path: Path, target: Path) -> None:
    if target.exists():
        shutil.rmtree(target)
    path.rename(target)


def check_resumable(saved: RunState, now: RunState, path: Path) -> None:
    """Raise SpecError where a run that would now save `now` cannot go on from a checkpoint that holds `saved`."""
    kept = {key: saved.config.get(key) for key in ("model", "dtype", "rope_theta")} | saved.data
    ours = now.config | now.data
    for key, was, value in _differences({key: (was, ours.get(key)) for key, was in kept.items()}):
        raise SpecError(
            f"--resume: {key} is {value!r}, but {path} was saved with {was!r}; this decides what the weights are or "
            f"which samples come next{_SAMPLES if key == 'samples' else ''}: give the same, or train into another --out"
        )


_SAMPLES = " (it is a hash over all tokens, which data.source, tokenizer, limits and what is skipped decide)"


def _differences(values: dict[str, tuple[Any, Any]]) -> Iterator[tuple[str, Any, Any]]:
    """Names with the two values that differ; of mappings those within."""
    for key, (was, value) in values.items():
        if isinstance(was, dict) and isinstance(value, dict):
            inner = {f"{key}.{name}": (was.get(name), value.get(name)) for name in was | value}
            yield from _differences(inner)
        elif was != value:
            yield key, was, value
