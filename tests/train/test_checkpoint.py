"""Checkpoints that are damaged, half-written or have no room: found out before anything is read, and said."""

from __future__ import annotations

import errno
import json
import pickle
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystem

from layerwise.errors import CheckpointError
from layerwise.groups import ProcessWorld
from layerwise.train.checkpoint import Checkpoints, RunState, step_folders
from layerwise.train.launch import launch
from layerwise.train.manifest import digest_file, read_manifest, verify_file, write_manifest
from tests.train.cli import metrics
from tests.train.small import small_config, train_small, write_samples

pytestmark = pytest.mark.timeout(120)


def flip_a_bit(path: Path, where: float) -> None:
    content = bytearray(path.read_bytes())
    content[int(where * (len(content) - 1))] ^= 4
    path.write_bytes(content)


def manifested(folder: Path) -> Path:
    (folder / "a.safetensors").write_bytes(bytes(1000))
    write_manifest(folder, [digest_file(folder / "a.safetensors")])
    return folder / "a.safetensors"


@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_a_flipped_bit_is_found(tmp_path: Path, where: float) -> None:
    path = manifested(tmp_path)
    (entry,) = read_manifest(tmp_path)
    verify_file(tmp_path, entry)
    flip_a_bit(path, where)
    with pytest.raises(CheckpointError, match=r"a\.safetensors: SHA-256 .* changed since it was saved"):
        verify_file(tmp_path, entry)


def test_a_truncated_and_a_missing_file_are_found(tmp_path: Path) -> None:
    path = manifested(tmp_path)
    (entry,) = read_manifest(tmp_path)
    path.write_bytes(bytes(999))
    with pytest.raises(CheckpointError, match=r"999 bytes, its manifest says 1,000: truncated"):
        verify_file(tmp_path, entry)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"a\.safetensors: cannot be read: No such file"):
        verify_file(tmp_path, entry)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"files": []}', '{"format": 1, "files": []}', '{"format": 2, "files": []}', '{"format": 1}']
    + [
        json.dumps({"format": 1, "files": [{"name": name, "num_bytes": 1, "sha256": ""}]})
        for name in ("../a", "/a", "", "..", "b/a", 3)
    ],
)
def test_what_is_no_manifest(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json: not a"):
        read_manifest(tmp_path)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_samples(tmp_path_factory.mktemp("data"))


SETTINGS = ["checkpoint.every_steps=2", "checkpoint.keep=2", "num_steps=6"]


@pytest.fixture(scope="module")
def whole(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one rank with checkpoints after 4 and 6 steps; the one after 2 is gone."""
    out = tmp_path_factory.mktemp("whole") / "run"
    train_small(small_config(samples, 1, 1, *SETTINGS), out)
    return out


def test_only_the_last_ones_stay_and_nothing_in_them_is_pickled(whole: Path) -> None:
    assert list(step_folders(whole / "checkpoints")) == [6, 4]
    for folder in (whole / "checkpoints").iterdir():
        suffixes = {path.suffix for path in folder.iterdir()}
        assert suffixes == {".json", ".safetensors"}
        assert json.loads((folder / "state.json").read_text())["config"]["strategy"] == "repack+parents"


def truncate(folder: Path) -> None:
    path = next(folder.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-10])


def flip(folder: Path) -> None:
    flip_a_bit(next(folder.glob("*.safetensors")), 0.7)


def flip_state(folder: Path) -> None:
    flip_a_bit(folder / "state.json", 0.5)


def lose_manifest(folder: Path) -> None:
    (folder / "manifest.json").unlink()


def add_a_file(folder: Path) -> None:
    shutil.copy(next(folder.glob("*.safetensors")), folder / "more.safetensors")


@pytest.mark.parametrize("damage", [truncate, flip, flip_state, lose_manifest, add_a_file])
def test_the_one_before_a_damaged_checkpoint_is_used(
    samples: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    damage(out / "checkpoints" / "step-00000006")
    rows = train_small(small_config(samples, 1, 1, *SETTINGS), out, resume=True)
    said = capsys.readouterr().err
    assert "warning: damaged checkpoint, using the one before it" in said
    assert "step-00000004: 4 steps taken" in said
    assert [(row["step"], row["loss"]) for row in rows] == [(row["step"], row["loss"]) for row in metrics(whole)]
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-00000004", "step-00000006", "step-00000006.damaged"]


def test_nothing_is_unpickled(samples: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    (out / "checkpoints" / "step-00000006" / ".metadata").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    for module in (pickle, torch):
        monkeypatch.setattr(module, "load", lambda *a, **k: pytest.fail("a file was unpickled"))
    rows = train_small(small_config(samples, 1, 1, *SETTINGS, "num_steps=7"), out, resume=True)
    assert len(rows) == 7


def test_weights_moments_and_random_numbers_come_back(tmp_path: Path) -> None:
    def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 2)
        return model, torch.optim.AdamW(model.parameters())

    def main(world: ProcessWorld, device: torch.device) -> None:
        checkpoints = Checkpoints(tmp_path, world, keep=1, timeout_s=60, warn=pytest.fail)
        assert checkpoints.newest() is None
        model, optimizer = build(0)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        saved = [p.detach().clone() for p in model.parameters()]
        checkpoints.save(model, optimizer, RunState(step=1, num_ranks=1, data={}, config={}), wait=False)
        with torch.no_grad():
            model.weight.zero_()  # after the call: not saved
        drawn = torch.rand(5)
        checkpoints.close()
        other, other_optimizer = build(1)
        found = checkpoints.newest()
        assert found is not None
        checkpoints.load(found[0], other, other_optimizer, found[1])
        assert all(torch.equal(p, q) for p, q in zip(other.parameters(), saved, strict=True))
        assert torch.equal(torch.rand(5), drawn)
        for p, q in zip(other.parameters(), model.parameters(), strict=True):
            ours, theirs = other_optimizer.state[p], optimizer.state[q]
            assert ours["exp_avg"].any()
            assert all(torch.equal(ours[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))

    launch(main, num_ranks=1, ranks_per_node=1, device="cpu", timeout_s=30)


@contextmanager
def full_disk(monkeypatch: pytest.MonkeyPatch, after_bytes: int) -> Iterator[None]:
    """Files of a checkpoint have no room beyond so many bytes."""
    create = FileSystem.create_stream

    @contextmanager
    def limited(self: FileSystem, path: Path, mode: str) -> Iterator[Any]:
        with create(self, path, mode) as stream:
            if "w" in mode:
                stream.write(bytes(after_bytes))
                raise OSError(errno.ENOSPC, "No space left on device")
            yield stream

    with monkeypatch.context() as patch:
        patch.setattr(FileSystem, "create_stream", limited)
        yield


def test_a_full_disk_is_said_and_the_last_complete_checkpoint_stays(
    samples: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    shutil.copytree(whole, out)
    longer = small_config(samples, 1, 1, *SETTINGS, "num_steps=9")
    with (
        full_disk(monkeypatch, after_bytes=100),
        pytest.raises(CheckpointError, match=r"after step 9 could not be saved .* No space left on device"),
    ):
        train_small(longer, out, resume=True)
    said = capsys.readouterr().err
    assert said.count("No space left on device; the last complete one is") == 2, "after steps 8 and 9"
    assert len(metrics(out)) == 9, "training went on"
    assert sorted(path.name for path in (out / "checkpoints").iterdir())[-1] == "step-00000006", "no half of one stays"
    rows = train_small(longer, out, resume=True)
    assert [row["step"] for row in rows] == list(range(9))
    assert next(iter(step_folders(out / "checkpoints"))) == 9
