"""Where the time of a few steps went, on every rank: a torch profiler trace each, and one summary for the report."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from layerwise.groups import World
from layerwise.model.moe import EXPERTS
from layerwise.runtime import MOVES

PROFILE_FOLDER, SUMMARY_FILE = "profile", "steps.json"
# The first step is slow in its own ways, and the profiler's own start falls into the second.
NUM_BEFORE, NUM_STEPS = 2, 3
OPTIMIZER, OTHER = "optimizer", "other"
_STEP, _RANGES, _BACKWARD = "ProfilerStep", "layerwise.", "autograd::engine::evaluate_function"


def silence_kineto() -> None:
    """Keep torch's profiler from telling stderr on every rank that it starts and stops, unless a level is set."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # one above those messages, its highest


class StepProfiler:
    """Profiles NUM_STEPS steps after the first NUM_BEFORE, of a model with layers of these kinds.

    Every rank has one, and calls `step` after each step and `finish` at the end.
    """

    def __init__(self, folder: Path, world: World, device: torch.device, kinds: Iterable[str]) -> None:
        self._folder, self._world, self._sections = folder, world, sections_of(kinds)
        self._on_gpu = device.type == "cuda"
        self._microseconds = [0] * len(self._sections)
        self._num_taken, self._num_steps, self._is_told = 0, 0, False
        folder.mkdir(parents=True, exist_ok=True)
        silence_kineto()
        self._profile = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])],
            schedule=schedule(wait=NUM_BEFORE - 1, warmup=1, active=NUM_STEPS, repeat=1),
            on_trace_ready=self._keep,
            acc_events=True,
        )
        self._profile.start()

    def step(self) -> None:
        """A step is done. After the last profiled one this takes a while, on all ranks alike."""
        self._num_taken += 1
        self._profile.step()
        if self._num_steps and not self._is_told:
            self._tell()

    def finish(self) -> bool:
        """End a run of few steps; False where it was too short for a profile."""
        self._profile.stop()
        if not self._is_told:
            self._tell()
        return self._num_steps > 0

    def _tell(self) -> None:
        """Write the summary of all ranks."""
        self._is_told = True
        rows = self._world.gather_ints(self._microseconds)
        if self._num_steps and self._world.rank == 0:
            seconds = [[us / 1e6 / self._num_steps for us in row] for row in rows]
            summary = {"num_steps": self._num_steps, "sections": self._sections, "seconds_by_rank": seconds}
            (self._folder / SUMMARY_FILE).write_text(json.dumps(summary))

    def _keep(self, done: Any) -> None:
        self._num_steps = min(max(self._num_taken - NUM_BEFORE, 0), NUM_STEPS)
        if self._num_steps:
            done.export_chrome_trace(str(self._folder / f"rank-{self._world.rank:05}.json.gz"))
            seconds = seconds_by_section(done.events(), num_steps=self._num_steps, gpu=self._on_gpu)
            self._microseconds = [round(seconds.get(name, 0.0) * 1e6) for name in self._sections]


def seconds_by_section(events: Iterable[Any], *, num_steps: int, gpu: bool) -> dict[str, float]:
    """Seconds of the first `num_steps` steps by section; each moment counts once, for the innermost range around it.

    events: torch.autograd.profiler_util.FunctionEvent. The backward of an operation belongs to the range that its
    forward was in, unless it has one of its own. gpu: seconds of kernels on the GPU instead of the thread's; those of
    different streams may overlap, and OTHER is then only the kernels outside of all ranges.
    """
    ordered = sorted(events, key=lambda event: event.time_range.start)
    section_of: dict[int, str | None] = {}
    forward: dict[tuple[int, int], str | None] = {}
    seconds: defaultdict[str, float] = defaultdict(float)
    steps_s: list[float] = []
    for event in ordered:
        parent = event.cpu_parent
        section = _own_section(event.name) or (section_of.get(id(parent)) if parent is not None else None)
        if event.name.startswith(_BACKWARD):
            section = forward.get((event.fwd_thread, event.sequence_nr)) or section
        elif event.sequence_nr >= 0 and not event.fwd_thread:
            # The last operation that starts with a number is the one whose backward has it.
            forward[event.thread, event.sequence_nr] = section
        section_of[id(event)] = section
        if event.name.startswith(_STEP):
            steps_s.append(event.time_range.elapsed_us() / 1e6)
        else:
            took_us = event.self_device_time_total if gpu else event.self_cpu_time_total
            seconds[section or OTHER] += took_us / 1e6
    if not gpu:
        # Also what no event covers. After the last step that ends, another one begins.
        seconds[OTHER] = sum(steps_s[:num_steps]) - sum(took for name, took in seconds.items() if name != OTHER)
    return dict(seconds)


def _own_section(name: str) -> str | None:
    if name.startswith(_RANGES):
        return name.removeprefix(_RANGES).removesuffix(".backward")
    return OPTIMIZER if name.startswith("Optimizer.step") else None


def sections_of(kinds: Iterable[str]) -> list[str]:
    """What a summary tells apart: ranges by their names without "layerwise.", the optimizer and the rest."""
    sites = [f"{part}.{kind}" for kind in kinds for part in ("exchange_in", "attention", "exchange_out")]
    return [*sites, f"exchange.{MOVES}", f"exchange.{EXPERTS}", "moe", OPTIMIZER, OTHER]
