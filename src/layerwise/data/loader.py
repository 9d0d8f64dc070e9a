"""The planned loader: any dataset of token lists in, planned micro-batches of this rank's tokens out.

Every rank iterates the same samples in the same order and plans by itself; ranks compare digests before they use a
plan.
Planning, routes and token slicing of coming steps run on a thread ahead of the step that needs them.
"""

from __future__ import annotations

import hashlib
import math
import operator
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerwise.data.corpus import IGNORED_LABEL
from layerwise.data.sampler import group_stream
from layerwise.errors import DataError
from layerwise.exchange import Meter
from layerwise.groups import World
from layerwise.plan import Ints, StepPlan
from layerwise.runtime import Routes, agree, build_routes, use_routes

Planner = Callable[[Sequence[int]], StepPlan]


@dataclass(frozen=True, kw_only=True, eq=False)
class Microbatch:
    """This rank's packed tokens of one micro-batch; T may be 0.

    input_ids, position_ids, shift_labels: int64 [T]. shift_labels[t] is the token after t in the same sample, or -100.
    """

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    _routes: Routes

    def __repr__(self) -> str:
        return f"Microbatch({len(self.input_ids)} local tokens)"

    def routes(self) -> AbstractContextManager[Routes]:
        """A context in which attention layers find this micro-batch's routes."""
        return use_routes(self._routes)


@dataclass(frozen=True, kw_only=True, eq=False)
class Step:
    """One optimizer step on this rank.

    sample_ids: dataset index of each sample of the plan (or its running number for an iterable dataset).
    num_valid_tokens: labels in the whole step over all ranks. meter: what the step's exchanges put on the wire.
    plan_s: seconds spent planning on the thread ahead; wait_s: seconds the loop waited for it.
    """

    index: int
    plan: StepPlan
    sample_ids: tuple[int, ...]
    microbatches: tuple[Microbatch, ...]
    num_valid_tokens: int
    num_tokens: int
    meter: Meter
    plan_s: float
    wait_s: float

    def __repr__(self) -> str:
        return (
            f"Step({self.index}: {len(self.sample_ids)} samples, {self.num_tokens} tokens, "
            f"{self.num_valid_tokens} valid, {self.microbatches})"
        )


@dataclass(frozen=True, kw_only=True)
class PlannedLoader:
    """Iterate to get Steps; every rank iterates the same number of times.

    dataset: map-style (`dataset[i]`) or iterable; an item is a sequence of token ids, a mapping or a record with
        `input_ids` and optionally `labels` of the same length (-100 where the token is not to be learned).
    planner: lengths -> StepPlan, such as layerwise.Planner.
    steps: for a map-style dataset, an iterable of lists of dataset indices, one list per step (see StepSampler).
    tokens_per_step: for an iterable dataset, how many tokens make a step.
    vocab_size: tokens outside [0, vocab_size) raise DataError that names the sample.
    prefetch: steps planned ahead.
    """

    dataset: Any
    planner: Planner
    world: World
    steps: Iterable[Sequence[int]] | None = None
    tokens_per_step: int | None = None
    vocab_size: int | None = None
    prefetch: int = 2
    backend: str = "auto"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens_per_step is None):
            raise DataError(
                "give steps= (lists of indices into a map-style dataset) or tokens_per_step= (iterable dataset)"
            )
        if self.steps is not None and not hasattr(self.dataset, "__getitem__"):
            raise DataError("steps= needs a map-style dataset; give tokens_per_step= for an iterable one")
        if self.prefetch < 1:
            raise DataError(f"prefetch={self.prefetch} must be at least 1")

    def __iter__(self) -> Iterator[Step]:
        ahead = _Ahead(self._planned(), self.prefetch)
        try:
            while True:
                started = time.perf_counter()
                step = ahead.next()
                if step is None:
                    return
                yield self._agreed(step, wait_s=time.perf_counter() - started)
        finally:
            ahead.stop()

    def _planned(self) -> Iterator[_PlannedStep]:
        for index, samples in enumerate(self._samples()):
            started = time.perf_counter()
            plan = self.planner([len(sample) for sample in samples])
            meter = Meter(self.world.ranks_per_node)
            routes = [
                build_routes(plan, i, self.world, meter=meter, backend=self.backend, device=self.device)
                for i in range(len(plan.microbatches))
            ]
            plan_s = time.perf_counter() - started
            microbatches = tuple(_local_microbatch(plan, i, samples, routes[i]) for i in range(len(routes)))
            yield _PlannedStep(
                index=index,
                plan=plan,
                sample_ids=tuple(sample.sample_id for sample in samples),
                content=_content(samples),
                microbatches=microbatches,
                meter=meter,
                plan_s=plan_s,
            )

    def _samples(self) -> Iterator[list[_Tokens]]:
        """The samples of each step, the same on every rank."""
        if self.steps is not None:
            for ids in self.steps:
                yield [self._sample(i) for i in ids]
        elif self.tokens_per_step is not None:
            stream = (_Tokens.read(item, i, self.vocab_size) for i, item in enumerate(self.dataset))
            yield from group_stream(stream, self.tokens_per_step)

    def _sample(self, given_index: Any) -> _Tokens:
        num_samples = len(self.dataset) if isinstance(self.dataset, Sized) else math.inf
        try:
            index = operator.index(given_index)
        except TypeError:
            index = -1
        if not 0 <= index < num_samples:
            raise DataError(f"steps= holds sample index {given_index!r}; legal: whole numbers in [0, {num_samples})")
        return _Tokens.read(self.dataset[index], index, self.vocab_size)

    def _agreed(self, step: _PlannedStep, wait_s: float) -> Step:
        local_valid = sum(int((m.shift_labels != IGNORED_LABEL).sum()) for m in step.microbatches)
        num_valid = agree(step.plan, self.world, num_valid_tokens=local_valid, content=step.content)
        return Step(
            index=step.index,
            plan=step.plan,
            sample_ids=step.sample_ids,
            microbatches=step.microbatches,
            num_valid_tokens=num_valid,
            num_tokens=step.plan.num_tokens,
            meter=step.meter,
            plan_s=step.plan_s,
            wait_s=wait_s,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class _PlannedStep:
    index: int
    plan: StepPlan
    sample_ids: tuple[int, ...]
    content: int
    microbatches: tuple[Microbatch, ...]
    meter: Meter
    plan_s: float


@dataclass(frozen=True, eq=False)
class _Tokens:
    """One sample: int64 [L] input ids, and the label of each position: the next token or -100."""

    sample_id: int
    input_ids: Ints
    shift_labels: Ints

    def __len__(self) -> int:
        return len(self.input_ids)

    @classmethod
    def read(cls, item: Any, sample_id: int, vocab_size: int | None) -> _Tokens:
        ids = _whole_numbers(_field(item, "input_ids", item), f"sample {sample_id}: input_ids")
        given = _field(item, "labels", None)
        labels = ids if given is None else _whole_numbers(given, f"sample {sample_id}: labels")
        if ids.ndim != 1 or not len(ids):
            raise DataError(f"sample {sample_id}: expected a non-empty list of token ids, got shape {ids.shape}")
        if labels.shape != ids.shape:
            raise DataError(
                f"sample {sample_id}: {len(ids)} input_ids but labels of shape {labels.shape}; give one label per token"
            )
        for name, values in (("token", ids), ("label", labels[labels != IGNORED_LABEL])):
            if vocab_size is not None and len(values) and not (values.min() >= 0 and values.max() < vocab_size):
                bad = values.max() if values.max() >= vocab_size else values.min()
                raise DataError(f"sample {sample_id}: {name} {bad} is not in [0, vocab_size={vocab_size})")
        return cls(sample_id, ids, np.append(labels[1:], IGNORED_LABEL))


def _whole_numbers(values: Any, where: str) -> Ints:
    """int64 of values that are whole numbers already; floats are not rounded and text is not parsed."""
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where}: not a list of whole numbers: {error}") from None
    if array.size and array.dtype.kind not in "iu":
        raise DataError(f"{where}: expected whole numbers that fit 64 bits, got {array.dtype}")
    return array.astype(np.int64)


def _content(samples: list[_Tokens]) -> int:
    """A 56-bit hash of which samples these are and of their tokens: ranks of a group must see the same."""
    state = hashlib.blake2b(digest_size=7)
    for sample in samples:
        state.update(
            sample.sample_id.to_bytes(8, "little") + sample.input_ids.tobytes() + sample.shift_labels.tobytes()
        )
    return int.from_bytes(state.digest(), "big")


def _field(item: Any, name: str, default: Any) -> Any:
    if isinstance(item, dict):
        if "input_ids" not in item:
            raise DataError(f"a sample that is a mapping needs 'input_ids'; this one has {sorted(item)}")
        return item.get(name, default)
    return getattr(item, name, default)


def _local_microbatch(plan: StepPlan, index: int, samples: list[_Tokens], routes: Routes) -> Microbatch:
    """Cut this rank's shards out of the samples; labels were shifted before the cut."""
    shards = [s for s in plan.microbatches[index].shards if s.rank == routes.world.rank]

    def packed(name: str) -> Tensor:
        parts = [getattr(samples[s.sample], name)[s.lo : s.hi] for s in shards]
        whole = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        return torch.from_numpy(whole).to(routes.position_ids.device)

    return Microbatch(
        input_ids=packed("input_ids"),
        position_ids=routes.position_ids,
        shift_labels=packed("shift_labels"),
        _routes=routes,
    )


class _Ahead:
    """Runs an iterator on a thread, at most `depth` items ahead; its error is raised where the item was asked for."""

    def __init__(self, items: Iterator[_PlannedStep], depth: int) -> None:
        self._queue: queue.Queue[tuple[_PlannedStep | None, BaseException | None]] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._fill, args=(items,), name="layerwise-planning", daemon=True)
        self._thread.start()

    def _fill(self, items: Iterator[_PlannedStep]) -> None:
        try:
            for item in items:
                if not self._put((item, None)):
                    return
            self._put((None, None))
        except BaseException as error:
            self._put((None, error))

    def _put(self, entry: tuple[_PlannedStep | None, BaseException | None]) -> bool:
        while not self._stopped.is_set():
            try:
                self._queue.put(entry, timeout=0.1)
                return True
            except queue.Full:
                continue
        return False

    def next(self) -> _PlannedStep | None:
        item, error = self._queue.get()
        if error is not None:
            raise error
        return item

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()
