"""What a run tells about itself: rates, waits, forecasts, and where they go."""

from __future__ import annotations

import errno
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tensorboard.summary.writer.record_writer import RecordWriter

from layerwise.cost import model_flops, predict
from layerwise.data.corpus import load_corpus
from layerwise.errors import SpecError, UnsupportedError
from layerwise.exchange import GroupComm, Pending
from layerwise.planners import Planner
from layerwise.spec import load_cluster, load_model
from layerwise.train.forecast import Forecaster
from layerwise.train.loop import build_planner, build_sampler
from layerwise.train.metrics import Recorder, progress_line, watched
from layerwise.train.tracking import RUN_ID_FILE, load_wandb
from tests.runs import metrics_row
from tests.train.small import small_config, train_small, write_samples

LENGTHS = [3000, 2000, *[100] * 40]


# Attention is slow beside the links, so that wide groups pay.
CLUSTER = load_cluster("demo").model_copy(update={"attention_efficiency": 0.05, "message_latency_s": 1e-4})
MODEL = load_model("demo")


def planner_of(strategy: str, **options: Any) -> Planner:
    return Planner(strategy=strategy, cluster=CLUSTER, model=MODEL, max_tokens_per_rank=1024, options=options)


def test_a_forecast_is_that_of_the_plan_and_of_dynamic() -> None:
    planner, dynamic = planner_of("repack+parents"), planner_of("dynamic")
    forecaster = Forecaster(planner)
    plans = [forecaster(lengths) for lengths in (LENGTHS, LENGTHS[1:])]
    assert plans == [planner(LENGTHS), planner(LENGTHS[1:])]
    for plan in plans:
        forecast = forecaster.of(plan)
        seconds = [predict(p, CLUSTER, MODEL).seconds for p in (plan, dynamic(plan.lengths))]
        assert [forecast.step_s, forecast.dynamic_s] == seconds
        assert forecast.saving == 1 - seconds[0] / seconds[1]
        assert forecast.saving > 0
        assert forecast.took_s > 0


def test_forecasts_are_asked_for_in_order() -> None:
    forecaster = Forecaster(planner_of("static", sp_degree=8))
    forecaster(LENGTHS)
    second = forecaster(LENGTHS[1:])
    with pytest.raises(AssertionError, match="in the order"):
        forecaster.of(second)


def test_dynamic_saves_nothing_over_itself_and_keeps_its_options() -> None:
    forecaster = Forecaster(planner_of("dynamic", max_sp_degree=8))
    assert forecaster.of(forecaster(LENGTHS)).saving == 0
    narrow = Forecaster(planner_of("repack", max_sp_degree=4, repack_within_node=False))
    forecast = narrow.of(narrow(LENGTHS))
    plans = [planner_of("dynamic", **options)(LENGTHS) for options in ({"max_sp_degree": 4}, {})]
    seconds = [predict(plan, CLUSTER, MODEL).seconds for plan in plans]
    assert forecast.dynamic_s == seconds[0] != seconds[1]


def test_a_step_that_dynamic_cannot_place_has_no_saving() -> None:
    forecaster = Forecaster(planner_of("joint", max_sp_degree=None))
    forecaster._baseline = planner_of("dynamic", max_sp_degree=2)
    forecast = forecaster.of(forecaster(LENGTHS))
    assert forecast.dynamic_s is None
    assert forecast.saving is None


def test_what_people_watch() -> None:
    row = metrics_row(3, 5.0, slow_bytes=2_000_000)
    assert watched(row) == {"tokens_per_s": 4000, "imbalance": 1.2, "slow_bytes": 6_000_000, "exchange_wait_s": 0.25}
    line = (
        "loss 5.0000  2.00 s per step  4,000 tokens/s  MFU 41.4%  imbalance 1.20  6 MB between nodes  "
        "250.0 ms waiting for exchanges"
    )
    assert progress_line(row) == f"{line}  5.9% faster than dynamic (predicted)"
    assert progress_line(row | {"predicted_saving": -0.5}) == f"{line}  50.0% slower than dynamic (predicted)"
    assert progress_line(row | {"predicted_saving": None}) == line


@pytest.mark.ranks
def test_waits_and_rates_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    delay_s, start = 0.004, GroupComm.start_all_to_all

    class Late:
        def __init__(self, pending: Pending) -> None:
            self.pending = pending

        def wait(self) -> None:
            time.sleep(delay_s)
            self.pending.wait()

    monkeypatch.setattr(GroupComm, "start_all_to_all", lambda *args: Late(start(*args)))
    config = small_config(
        write_samples(tmp_path), 1, 2, "strategy=static", "strategy_options={sp_degree: 2}", "num_steps=3"
    )
    rows = train_small(config, tmp_path / "run")
    corpus, planner = load_corpus(config.data), build_planner(config)
    for ids, row in zip(build_sampler(config, corpus), rows, strict=True):
        for kind, waited_s in row["exchange_wait_s"].items():
            assert waited_s >= delay_s * row["exchange"][kind]["calls"] / 2, "mean over two ranks"
        assert sum(row["exchange_wait_s"].values()) < row["step_s"]
        lengths = corpus.lengths[ids]
        flops = row["mfu"] * 2 * config.cluster.peak_flops_per_s * row["step_s"]
        assert flops == pytest.approx(model_flops(config.model, np.asarray(lengths)))
        assert row["predicted_s"] == predict(planner(lengths), config.cluster, config.model).seconds


class Wandb(SimpleNamespace):
    """What a run needs of the package, remembering what it was told."""

    def __init__(self) -> None:
        super().__init__(begun=[], logged=[], ended=0)

    def init(self, **settings: Any) -> Wandb:
        self.begun.append(settings)
        return self

    def log(self, scalars: dict[str, float], step: int) -> None:
        self.logged.append((step, scalars))

    def finish(self) -> None:
        self.ended += 1


@contextmanager
def recorder(tmp_path: Path, first_step: int) -> Iterator[Recorder]:
    config = small_config(tmp_path, 1, 1, "wandb={project: packing, name: first, mode: offline}")
    made = Recorder(config, tmp_path, first_step)
    yield made
    made.close()


def test_weights_and_biases_gets_the_scalars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    with recorder(tmp_path, 0) as first:
        first.write(metrics_row(0, 5.0))
    with recorder(tmp_path, 1) as second:
        second.write(metrics_row(1, 4.0))
    with recorder(tmp_path, 0):
        pass
    settings = wandb.begun[0]
    assert (settings["project"], settings["name"], settings["mode"]) == ("packing", "first", "offline")
    assert (settings["dir"], settings["resume"]) == (str(tmp_path), "allow")
    assert settings["config"]["wandb"]["project"] == "packing"
    ids = [begun["id"] for begun in wandb.begun]
    assert ids[0] == ids[1] != ids[2], "a run that goes on has the id that it began with"
    assert ids[2] == (tmp_path / RUN_ID_FILE).read_text()
    assert wandb.ended == 3
    assert [step for step, _ in wandb.logged] == [0, 1]
    scalars = wandb.logged[0][1]
    assert scalars["loss"] == 5.0
    assert scalars["tokens_per_s"] == 4000
    assert scalars["exchange/full_attention/wait_s"] == 0.2
    assert scalars["exchange/sliding_attention/fast_bytes"] == 9_000_000
    assert not [name for name, value in scalars.items() if not isinstance(value, int | float)]
    assert json.loads((tmp_path / "metrics.jsonl").read_text() or "null") is None, "the last one began anew"


def test_without_the_package_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'layerwise\[wandb\]'"):
        load_wandb()


@pytest.mark.parametrize("written", ["metrics.jsonl", "tensorboard"])
def test_metrics_that_cannot_be_written_end_the_run_with_one_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], written: str
) -> None:
    """A disk that fills up in the second step; TensorBoard finds it out on a thread of its own."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def fill(self: Recorder, row: dict[str, Any]) -> None:
        if row["step"] == 1 and written == "tensorboard":
            self._events.flush()
            monkeypatch.setattr(RecordWriter, "write", full)
        elif row["step"] == 1:
            self._file.close()
            self._file = Path("/dev/full").open("w")  # noqa: SIM115
        write(self, row)

    write = Recorder.write
    monkeypatch.setattr(Recorder, "write", fill)
    config = small_config(write_samples(tmp_path), 1, 1, "num_steps=8")
    with pytest.raises(
        SpecError, match=r"--out .*: the metrics of step \d: cannot be written: No space left on device; make room"
    ):
        train_small(config, tmp_path / "run")
    assert "Traceback" not in capsys.readouterr().err
    assert threading.excepthook is threading.__excepthook__
