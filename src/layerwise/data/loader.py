"""The planned loader: any dataset of token lists in, planned micro-batches of this rank's tokens out.

Every rank sees the same samples in the same order and plans by itself; ranks compare digests before they use a plan.
Of a dataset that knows its lengths and digests a rank reads the samples that it holds a part of, of any other all.
Planning, routes and token slicing of coming steps run on a thread ahead of the step that needs them.
"""

from __future__ import annotations

import math
import operator
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerwise.data.ids import IGNORED_LABEL
from layerwise.data.sampler import StepSampler, group_stream
from layerwise.data.step_samples import (
    KnowsItsSamples,
    SampleTokens,
    StepSamples,
    known_samples,
    read_samples,
    read_tokens,
)
from layerwise.data.window import exchange_within_windows
from layerwise.errors import DataError
from layerwise.exchange import Meter
from layerwise.groups import World, this_device
from layerwise.kernels import Kernel
from layerwise.plan import StepPlan
from layerwise.runtime import Routes, agree, agree_on_end, build_routes, use_routes

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

    def with_routes(self, routes: Routes) -> Microbatch:
        """The same tokens with other routes, of which only what is done at the tiles may differ."""
        return replace(self, _routes=routes)


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
    """Iterate to get Steps; every rank iterates the same number of times. PlanMismatchError names one that has fewer.

    Ranks meet for each step and once more at the end, so either all leave a loop by `break` or all run it out.

    dataset: map-style (`dataset[i]`) or iterable; an item is a sequence of token ids, a mapping or a record with
        `input_ids` and optionally `labels` of the same length (-100 where the token is not to be learned). Padding or
        several documents in a sample, by its `attention_mask` or `position_ids`, raise DataError.
    planner: lengths -> StepPlan, such as layerwise.Planner.
    steps: for a map-style dataset, an iterable of lists of dataset indices, one list per step (see StepSampler).
    tokens_per_step: for an iterable dataset, how many tokens make a step.
    vocab_size: tokens outside [0, vocab_size) raise DataError that names the sample.
    prefetch: steps planned ahead. backend: as of `layerwise.runtime.build_routes`. device: of all tensors, by default
        the world's.
    planning_window_steps: for an iterable dataset, in how many consecutive steps samples change places (see
        layerwise.data.window); 1: none does. For a map-style one StepSampler does it.
    first_step: where to begin, for a run that goes on. Nothing of the steps before it is planned; of a map-style
        dataset nothing is read either, an iterable one is read up to there. `Step.index` starts here.
    """

    dataset: Any
    planner: Planner
    world: World
    steps: Iterable[Sequence[int]] | None = None
    tokens_per_step: int | None = None
    vocab_size: int | None = None
    prefetch: int = 2
    first_step: int = 0
    planning_window_steps: int = 1
    backend: str | Kernel = "auto"
    device: torch.device | None = None

    def __post_init__(self) -> None:
        if (self.steps is None) == (self.tokens_per_step is None):
            raise DataError(
                "give steps= (lists of indices into a map-style dataset) or tokens_per_step= (iterable dataset)"
            )
        if self.steps is not None and not hasattr(self.dataset, "__getitem__"):
            raise DataError("steps= needs a map-style dataset; give tokens_per_step= for an iterable one")
        if self.prefetch < 1:
            raise DataError(f"prefetch={self.prefetch} must be at least 1")
        if self.first_step < 0:
            raise DataError(f"first_step={self.first_step} must be at least 0")
        if self.steps is not None and self.planning_window_steps != 1:
            raise DataError("planning_window_steps has no effect with steps=; give StepSampler window_steps")

    def __iter__(self) -> Iterator[Step]:
        # A thread of its own would take "cuda" for GPU 0.
        ahead = _Ahead(self._planned(this_device(self.device or self.world.device)), self.prefetch)
        try:
            while True:
                started = time.perf_counter()
                step = ahead.next()
                if step is None:
                    agree_on_end(self.world)
                    return
                yield self._agreed(step, wait_s=time.perf_counter() - started)
        finally:
            ahead.stop()

    def _planned(self, device: torch.device) -> Iterator[_PlannedStep]:
        steps = self._streamed_steps() if self.steps is None else self._chosen_steps(self.steps)
        settings: dict[str, Any] = {"backend": self.backend, "device": device}
        for index, samples in enumerate(steps, start=self.first_step):
            started = time.perf_counter()
            plan = self.planner(samples.lengths)
            meter = Meter(self.world.ranks_per_node)
            routes = [build_routes(plan, i, self.world, meter=meter, **settings) for i in range(len(plan.microbatches))]
            plan_s = time.perf_counter() - started
            microbatches = tuple(_local_microbatch(plan, i, samples, routes[i]) for i in range(len(routes)))
            yield _PlannedStep(
                index=index,
                plan=plan,
                sample_ids=samples.ids,
                content=samples.content,
                microbatches=microbatches,
                meter=meter,
                plan_s=plan_s,
            )

    def _chosen_steps(self, steps: Iterable[Sequence[int]]) -> Iterator[StepSamples]:
        """Steps of a map-style dataset."""
        steps = steps.after(self.first_step) if isinstance(steps, StepSampler) else islice(steps, self.first_step, None)
        for chosen in steps:
            ids = tuple(self._checked_id(i) for i in chosen)
            if isinstance(self.dataset, KnowsItsSamples):
                yield known_samples(self.dataset, ids, self.vocab_size)
            else:
                yield read_samples(ids, [read_tokens(self.dataset[i], i, self.vocab_size) for i in ids])

    def _streamed_steps(self) -> Iterator[StepSamples]:
        """Steps of an iterable dataset."""
        assert self.tokens_per_step is not None
        stream = ((i, read_tokens(item, i, self.vocab_size)) for i, item in enumerate(self.dataset))
        steps = group_stream(stream, self.tokens_per_step, length=_numbered_length)
        for step in exchange_within_windows(
            steps,
            self.planning_window_steps,
            self.tokens_per_step,
            length=_numbered_length,
            first_step=self.first_step,
        ):
            ids, tokens = zip(*step, strict=True)
            yield read_samples(ids, tokens)

    def _checked_id(self, given: Any) -> int:
        num_samples = len(self.dataset) if isinstance(self.dataset, Sized) else math.inf
        try:
            index = operator.index(given)
        except TypeError:
            index = -1
        if not 0 <= index < num_samples:
            raise DataError(f"steps= holds sample index {given!r}; legal: whole numbers in [0, {num_samples})")
        return index

    def _agreed(self, step: _PlannedStep, wait_s: float) -> Step:
        self.world.progress.step = step.index
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


def _numbered_length(numbered: tuple[int, SampleTokens]) -> int:
    return len(numbered[1])


def _local_microbatch(plan: StepPlan, index: int, samples: StepSamples, routes: Routes) -> Microbatch:
    """Cut this rank's shards out of the samples; labels were shifted before the cut."""
    shards = [s for s in plan.microbatches[index].shards if s.rank == routes.world.rank]
    tokens = [samples.tokens(s.sample) for s in shards]

    def packed(name: str) -> Tensor:
        parts = [getattr(sample, name)[s.lo : s.hi] for sample, s in zip(tokens, shards, strict=True)]
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
