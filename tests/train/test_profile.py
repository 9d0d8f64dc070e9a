"""Where the time of a step goes: the sum over made-up events, and a profiled run on two ranks."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import Tensor

from layerwise.runtime import routes
from layerwise.train.profile import seconds_by_section
from layerwise.train.run import load_data, prepare_folder, run_training
from tests.train.cli import metrics
from tests.train.small import small_config, train_small, write_samples


@dataclass(eq=False)
class Event:
    """As much of a FunctionEvent as is looked at; times in microseconds."""

    name: str
    start: int
    self_cpu_time_total: int
    cpu_parent: Event | None = None
    sequence_nr: int = -1
    fwd_thread: int = 0
    thread: int = 1
    self_device_time_total: int = 0
    total: int = field(default=0)

    @property
    def time_range(self) -> Any:
        return SimpleNamespace(start=self.start, elapsed_us=lambda: self.total)


def events_of_a_step() -> list[Event]:
    step = Event("ProfilerStep#3", 0, 10, total=100)
    kernel = Event("layerwise.attention.full_attention", 1, 5, step)
    softmax = Event("aten::softmax", 2, 7, kernel, sequence_nr=4, self_device_time_total=70)
    inner = Event("aten::_softmax", 3, 1, softmax, sequence_nr=4)
    moe = Event("layerwise.moe", 10, 2, step)
    experts = Event("layerwise.exchange.experts", 11, 3, moe)
    mm = Event("aten::mm", 14, 4, moe, sequence_nr=5)
    norm = Event("aten::norm", 20, 6, step, sequence_nr=6, self_device_time_total=60)
    engine = "autograd::engine::evaluate_function: "
    of_norm = Event(f"{engine}NormBackward", 30, 1, step, sequence_nr=6, fwd_thread=1)
    of_mm = Event(f"{engine}MmBackward", 40, 8, step, sequence_nr=5, fwd_thread=1)
    in_mm = Event("aten::mm", 41, 8, of_mm)
    of_land = Event(f"{engine}_LandBackward", 50, 1, step, sequence_nr=3, fwd_thread=1)
    back = Event("layerwise.exchange_in.full_attention.backward", 51, 9, of_land)
    of_softmax = Event(f"{engine}SoftmaxBackward", 60, 11, step, sequence_nr=4, fwd_thread=1)
    other_thread = Event("aten::to", 25, 50, None, sequence_nr=4, thread=2)
    optimizer = Event("Optimizer.step#AdamW.step", 80, 12, step)
    begun = Event("ProfilerStep#4", 100, 0, total=30)
    forward = [step, kernel, softmax, inner, moe, experts, mm, norm]
    return [*forward, of_norm, of_mm, in_mm, of_land, back, of_softmax, other_thread, optimizer, begun]


def test_each_moment_counts_once_and_backward_belongs_to_its_forward() -> None:
    seconds = seconds_by_section(events_of_a_step(), num_steps=1, gpu=False)
    expected = {
        "attention.full_attention": 5 + 7 + 1 + 11,
        "moe": 2 + 4 + 8 + 8,
        "exchange.experts": 3,
        "exchange_in.full_attention": 9,
        "optimizer": 12,
    }
    expected["other"] = 100 - sum(expected.values())
    assert {name: round(s * 1e6) for name, s in seconds.items()} == expected


def test_on_a_gpu_kernels_count() -> None:
    seconds = seconds_by_section(events_of_a_step(), num_steps=1, gpu=True)
    assert {name: round(s * 1e6) for name, s in seconds.items() if s} == {"attention.full_attention": 70, "other": 60}


DELAY_S = 0.02


def train_with_slow_attention(out: Path) -> None:
    """Profile two ranks whose every attention takes at least DELAY_S."""
    attend = routes.attend

    def slow(*args: Any) -> Tensor:
        time.sleep(DELAY_S)
        return attend(*args)

    routes.attend = slow
    config = small_config(
        write_samples(out.parent), 1, 2, "num_steps=6", "strategy=static", "strategy_options={sp_degree: 2}"
    )
    prepare_folder(config, out)
    run_training(config, load_data([config]), out, profile=True)


@pytest.mark.ranks
def test_a_profiled_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    # As from a command line: ranks forked from a process in which others ran may inherit broken threads.
    process = get_context("spawn").Process(target=train_with_slow_attention, args=(out,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert "profiler_start" not in capfd.readouterr().err
    rows = metrics(out)

    summary = json.loads((out / "profile" / "steps.json").read_text())
    assert summary["num_steps"] == 3
    microbatches = sum(row["microbatches"] for row in rows[2:5]) / 3
    for seconds in summary["seconds_by_rank"]:
        found = dict(zip(summary["sections"], seconds, strict=True))
        assert sum(seconds) == pytest.approx(sum(row["step_s"] for row in rows[2:5]) / 3, rel=0.2)
        for kind in ("full_attention", "sliding_attention"):
            assert found[f"attention.{kind}"] >= DELAY_S * microbatches
            assert found[f"exchange_in.{kind}"] > 0
            assert found[f"exchange_out.{kind}"] > 0
        assert found["moe"] > 0
        assert found["optimizer"] > 0
        assert found["exchange.experts"] == 0
    assert len(summary["seconds_by_rank"]) == 2
    assert rows[5]["step_s"] < 3 * rows[4]["step_s"], "writing the trace belongs to no step"

    for rank in range(2):
        trace = json.loads(gzip.decompress((out / "profile" / f"rank-{rank:05}.json.gz").read_bytes()))
        names = {event["name"] for event in trace["traceEvents"]}
        assert {"layerwise.moe", "layerwise.attention.full_attention"} <= names
        assert {"layerwise.exchange_in.full_attention", "layerwise.exchange_in.full_attention.backward"} <= names


def test_a_run_that_is_too_short_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = small_config(write_samples(tmp_path), 1, 1, "num_steps=2")
    out = tmp_path / "run"
    prepare_folder(config, out)
    run_training(config, load_data([config]), out, profile=True)
    assert "--profile: nothing to show, since it begins after 2 steps" in capsys.readouterr().err
    assert not (out / "profile" / "steps.json").exists()


def test_a_profile_changes_no_loss_and_holds_whole_steps_only(tmp_path: Path) -> None:
    config = small_config(write_samples(tmp_path), 1, 1, "num_steps=4")
    out = tmp_path / "profiled"
    prepare_folder(config, out)
    run_training(config, load_data([config]), out, profile=True)
    assert json.loads((out / "profile" / "steps.json").read_text())["num_steps"] == 2
    assert [row["loss"] for row in metrics(out)] == [row["loss"] for row in train_small(config, tmp_path / "plain")]
