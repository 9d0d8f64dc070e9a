"""Real processes that are killed, and the runs that go on after them; benchmarks/soak does it for hundreds of steps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from layerwise.train.checkpoint import step_folders
from layerwise.train.config import TrainConfig
from tests.train.cli import environment, metrics, start
from tests.train.small import small_config, train_small, write_samples

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def write_config(config: TrainConfig, folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(config.to_yaml())
    return path


def wait_for(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    """Look a thousand times a second; fails where the process ends first."""
    deadline = time.monotonic() + 100
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.001)


def losses(out: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in metrics(out)]


def assert_close(ours: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert [step for step, _ in ours] == [step for step, _ in expected]
    for (step, loss), (_, other) in zip(ours, expected, strict=True):
        assert abs(loss - other) <= 1e-9 * other, step


def test_a_launcher_killed_during_a_save_loses_nothing(tmp_path: Path) -> None:
    samples, out = write_samples(tmp_path), tmp_path / "run"
    config = small_config(samples, 1, 2, "checkpoint.every_steps=2", "num_steps=6")
    process = start("train", "--config", write_config(config, tmp_path), "--out", out, "--resume")
    folder = out / "checkpoints"
    wait_for(lambda: list(folder.glob("step-0000000[46].partial")), process)
    process.kill()
    process.communicate()
    saved = list(step_folders(folder))
    assert saved[-1] == 2, "what was whole before stays"
    one_rank = small_config(samples, 1, 1, "checkpoint.every_steps=2", "num_steps=6")
    train_small(one_rank, out, resume=True)
    train_small(one_rank, tmp_path / "whole")
    assert_close(losses(out), losses(tmp_path / "whole"))
    assert not list(folder.glob("*.partial"))


@pytest.mark.slow
def test_torchrun_goes_on_by_itself(tmp_path: Path) -> None:
    samples, out = write_samples(tmp_path), tmp_path / "run"
    config = small_config(samples, 1, 2, "checkpoint.every_steps=2", "sharding=fsdp", "num_steps=8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "2", "-m", "layerwise", "train", "--config", str(write_config(config, tmp_path))]
    process = subprocess.Popen(
        [*command, "--out", str(out), "--resume"], stderr=subprocess.PIPE, text=True, env=environment()
    )
    wait_for(lambda: step_folders(out / "checkpoints"), process)
    os.kill(max(workers(process.pid)), signal.SIGKILL)
    _, said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert re.search(r"going on from \S+/step-0000000[2468]: \d steps taken, by 2 ranks", said), said
    train_small(small_config(samples, 1, 1), tmp_path / "whole")
    assert_close(losses(out), losses(tmp_path / "whole"))


def workers(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
