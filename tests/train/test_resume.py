"""Going on from a checkpoint: the same losses as a run that was never stopped, on any ranks, strategy and sharding."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from layerwise.errors import SpecError
from layerwise.train.checkpoint import step_folders
from tests.train.small import small_config, train_small, write_samples

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(200)]
CHECKPOINTS = ["checkpoint.every_steps=3", "checkpoint.keep=3"]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A run of 8 steps on two ranks, fsdp, with checkpoints after 3, 6 and 8 steps."""
    out = tmp_path_factory.mktemp("whole") / "run"
    rows = train_small(small_config(samples, 1, 2, *CHECKPOINTS, "sharding=fsdp"), out)
    assert list(step_folders(out / "checkpoints")) == [8, 6, 3]
    return out, rows


def stopped_after(out: Path, steps: int, copy: Path) -> Path:
    """A copy of a run as if it had been stopped with no newer checkpoint than this."""
    shutil.copytree(out, copy)
    for step, folder in step_folders(copy / "checkpoints").items():
        if step > steps:
            shutil.rmtree(folder)
    return copy


def assert_same(rows: list[dict[str, Any]], expected: list[dict[str, Any]], tolerance: float) -> None:
    assert [row["step"] for row in rows] == list(range(len(expected)))
    for row, other in zip(rows, expected, strict=True):
        assert row["num_tokens"] == other["num_tokens"]
        for key in ("loss", "balance_loss", "grad_norm"):
            assert abs(row[key] - other[key]) <= tolerance * abs(other[key]), (key, row["step"], row[key], other[key])


SHAPES = {
    "the same": (1, 2, ["sharding=fsdp"], 0.0),
    "one process": (1, 1, ["strategy=static", "strategy_options={sp_degree: 1}"], 1e-9),
    "more nodes, experts apart": (2, 2, ["sharding=hsdp", "expert_parallel=2", "strategy=dynamic"], 1e-9),
    "replicated": (1, 4, ["strategy=joint"], 1e-9),
}
FAST = ("the same", "one process")


@pytest.mark.parametrize("shape", [pytest.param(s, marks=[] if s in FAST else pytest.mark.slow) for s in SHAPES])
def test_any_ranks_go_on_with_the_same_losses(samples: Path, whole: Any, tmp_path: Path, shape: str) -> None:
    nodes, ranks, settings, tolerance = SHAPES[shape]
    out, expected = whole
    copy = stopped_after(out, 3, tmp_path / "run")
    config = small_config(samples, nodes, ranks, *CHECKPOINTS, *settings)
    assert_same(train_small(config, copy, resume=True), expected, tolerance)
    assert list(step_folders(copy / "checkpoints")) == [8, 6, 3]


def test_more_and_fewer_steps_than_before(
    samples: Path, whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, expected = whole
    copy = stopped_after(out, 8, tmp_path / "run")
    config_text = (copy / "config.yaml").read_text()
    with pytest.raises(SpecError, match=r"num_steps=7, but 8 steps are taken; give num_steps=8 or more"):
        train_small(small_config(samples, 1, 1, *CHECKPOINTS, "num_steps=7"), copy, resume=True)
    assert (copy / "config.yaml").read_text() == config_text
    assert train_small(small_config(samples, 1, 1, *CHECKPOINTS, "num_steps=8"), copy, resume=True) == expected
    assert "nothing to do: num_steps=8, and 8 steps are taken; raise num_steps" in capsys.readouterr().err
    rows = train_small(small_config(samples, 1, 1, *CHECKPOINTS, "num_steps=10"), copy, resume=True)
    assert "nothing to do" not in capsys.readouterr().err
    assert rows[:8] == expected
    assert [row["step"] for row in rows] == list(range(10))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("tokens_per_step=500", r"tokens_per_step is 500, but .*step-00000008 was saved with 600"),
        ("model.hidden_size=64", r"--resume: model\.hidden_size is 64, but .*was saved with 32; this decides"),
        ("data.seed=1", r"data\.seed is 1"),
        ("data.planning_window_steps=2", r"data\.planning_window_steps is 2"),
        ("data.max_samples=50", r"samples is '[0-9a-f]+', but .*a hash over all tokens, which data\.source"),
    ],
)
def test_other_samples_or_weights_are_refused(
    samples: Path, whole: Any, tmp_path: Path, setting: str, message: str
) -> None:
    copy = stopped_after(whole[0], 8, tmp_path / "run")
    before = (copy / "metrics.jsonl").read_text()
    with pytest.raises(SpecError, match=message):
        train_small(small_config(samples, 1, 1, setting), copy, resume=True)
    assert (copy / "metrics.jsonl").read_text() == before


def test_without_resume_a_run_is_not_touched(samples: Path, whole: Any, tmp_path: Path) -> None:
    copy = stopped_after(whole[0], 3, tmp_path / "run")
    with pytest.raises(SpecError, match=r"already holds a run; .*--resume"):
        train_small(small_config(samples, 1, 1), copy)
    (copy / "metrics.jsonl").unlink()
    with pytest.raises(SpecError, match=r"checkpoints already holds a run"):
        train_small(small_config(samples, 1, 1), copy)
    with pytest.raises(SpecError, match=r"is --out the same"):
        train_small(small_config(samples, 1, 1), copy, resume=True)


def test_resume_begins_where_there_is_nothing(
    samples: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = train_small(small_config(samples, 1, 1, "num_steps=1"), tmp_path / "run", resume=True)
    assert [row["step"] for row in rows] == [0]
    assert "no complete checkpoint to go on from: starting at step 0" in capsys.readouterr().err


@pytest.mark.slow
def test_float32_goes_on_within_rounding_on_another_shape(samples: Path, tmp_path: Path) -> None:
    config = small_config(samples, 1, 2, *CHECKPOINTS, "sharding=fsdp", "dtype=float32")
    expected = train_small(config, tmp_path / "whole")
    for name, (nodes, ranks, settings, _) in SHAPES.items():
        copy = stopped_after(tmp_path / "whole", 3, tmp_path / name)
        other = small_config(samples, nodes, ranks, *CHECKPOINTS, *settings, "dtype=float32")
        assert_same(train_small(other, copy, resume=True), expected, 1e-4)
    copy = stopped_after(tmp_path / "whole", 3, tmp_path / "alike")
    assert_same(train_small(config, copy, resume=True), expected, 0.0)
