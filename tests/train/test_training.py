"""Real runs: 16 gloo processes through the command line, data, loader and model."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

from layerwise.cli import ALONE_AFTER_S, main
from layerwise.cost import predict
from layerwise.data.corpus import load_corpus
from layerwise.errors import CheckpointError, DataError, RankFailedError, SpecError
from layerwise.train.config import load_config
from layerwise.train.launch import launch
from layerwise.train.loop import build_planner, build_sampler
from layerwise.train.run import is_writer, load_data, prepare_folder, run_training
from tests.train.cli import DEMO, SMALL, metrics, run, start

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(500)]
NUM_STEPS = {"float64": 20, "float32": 8}
ONE_RANK = [
    *("--set", "cluster.num_nodes=1"),
    *("--set", "cluster.ranks_per_node=1"),
    *("--set", "max_tokens_per_rank=2400"),
]
EIGHT_RANKS = [*("--set", "cluster.ranks_per_node=4"), *("--set", "max_tokens_per_rank=448")]


def train(out: Path, strategy: str, *settings: str, steps: int) -> list[dict]:
    arguments = ["--strategy", strategy, "--steps", steps, "--out", out]
    done = run("train", "--config", DEMO, *SMALL, *arguments, *settings)
    assert done.returncode == 0, done.stderr
    return metrics(out)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[dict]]:
    """Metrics by strategy and dtype."""
    rows = {}
    for dtype in ("float32", "float64"):
        out = tmp_path_factory.mktemp(dtype)
        arguments = ["--steps", NUM_STEPS[dtype], "--out", out, "--set", f"dtype={dtype}"]
        done = run("compare", "--config", DEMO, *SMALL, *arguments, timeout_s=280)
        assert done.returncode == 0, done.stderr
        assert "0 B" in done.stdout
        assert done.stderr.count("data: ") == 1
        for strategy in ("dynamic", "repack+parents"):
            rows[strategy, dtype] = metrics(out / strategy)
    return rows


@pytest.mark.parametrize(("dtype", "first", "later"), [("float32", 1e-6, 1e-4), ("float64", 1e-12, 1e-9)])
def test_repacking_learns_what_dynamic_learns(runs: dict, dtype: str, first: float, later: float) -> None:
    dynamic, repacked = runs["dynamic", dtype], runs["repack+parents", dtype]
    assert len(dynamic) == len(repacked) == NUM_STEPS[dtype]
    assert abs(dynamic[0]["loss"] - repacked[0]["loss"]) <= first * dynamic[0]["loss"]
    for a, b in zip(dynamic, repacked, strict=True):
        assert a["num_tokens"] == b["num_tokens"]
        assert abs(a["loss"] - b["loss"]) <= later * a["loss"], a["step"]
    if dtype == "float64":
        assert dynamic[-1]["loss"] < 0.8 * dynamic[0]["loss"], "the model learns"


def test_many_ranks_learn_what_one_process_learns(runs: dict, tmp_path: Path) -> None:
    """Weights after each step are those of one process: gradients are summed once, over all ranks and micro-batches."""
    done = run("train", "--config", DEMO, *SMALL, *ONE_RANK, "--set", "dtype=float64", "--steps", 8, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for a, b in zip(metrics(tmp_path), runs["repack+parents", "float64"], strict=False):
        for key in ("loss", "balance_loss", "grad_norm"):
            assert abs(a[key] - b[key]) <= 1e-9 * a[key], (key, a["step"])
        assert a["exchange"]["full_attention"] == {"calls": 0, "fast_bytes": 0, "slow_bytes": 0}


def test_sparse_layers_leave_the_slow_link_alone(runs: dict) -> None:
    repacked, dynamic = runs["repack+parents", "float32"], runs["dynamic", "float32"]
    assert all(row["exchange"]["sliding_attention"]["slow_bytes"] == 0 for row in repacked)
    assert sum(row["exchange"]["sliding_attention"]["slow_bytes"] for row in dynamic) > 0
    assert all(row["fallbacks"] == 0 for row in repacked)


def test_calls_of_full_layers_do_not_grow(runs: dict) -> None:
    """No pass is added: full layers make the same calls, sparse layers the same, or none where one rank will do."""
    for a, b in zip(runs["dynamic", "float32"], runs["repack+parents", "float32"], strict=True):
        if a["microbatches"] == b["microbatches"]:
            for kind in a["exchange"]:
                assert b["exchange"][kind]["calls"] <= a["exchange"][kind]["calls"]


@pytest.mark.parametrize("strategy", ["dynamic", "repack+parents"])
@pytest.mark.parametrize(("dtype", "element_bytes"), [("float32", 4), ("float64", 8)])
def test_bytes_and_calls_are_those_predicted(runs: dict, strategy: str, dtype: str, element_bytes: int) -> None:
    sets = [setting for setting in SMALL if setting != "--set"]
    config = load_config(DEMO, sets, strategy=strategy, num_steps=NUM_STEPS[dtype])
    corpus = load_corpus(config.data)
    planner, sampler = build_planner(config), build_sampler(config, corpus)
    for ids, row in zip(sampler, runs[strategy, dtype], strict=True):
        plan = planner(corpus.lengths[ids].tolist())
        expected = predict(plan, config.cluster, config.model, element_bytes=element_bytes)
        for kind, counted in row["exchange"].items():
            wanted = expected.kinds[kind]
            assert counted == {
                "calls": int(wanted.calls.sum()),
                "fast_bytes": wanted.fast_bytes,
                "slow_bytes": wanted.slow_bytes,
            }


def test_activation_checkpointing_changes_no_loss(runs: dict, tmp_path: Path) -> None:
    rows = train(
        tmp_path,
        "repack+parents",
        "--set",
        "dtype=float64",
        "--set",
        "activation_checkpointing=true",
        steps=3,
    )
    for a, b in zip(rows, runs["repack+parents", "float64"], strict=False):
        assert abs(a["loss"] - b["loss"]) <= 1e-12 * a["loss"]
        assert a["exchange"]["full_attention"]["calls"] == 1.5 * b["exchange"]["full_attention"]["calls"]


@pytest.mark.slow
def test_bfloat16_is_close(runs: dict, tmp_path: Path) -> None:
    rows = train(tmp_path, "repack+parents", "--set", "dtype=bfloat16", steps=2)
    for a, b in zip(rows, runs["repack+parents", "float32"], strict=False):
        assert abs(a["loss"] - b["loss"]) <= 2e-2 * b["loss"]
        assert a["exchange"]["full_attention"]["fast_bytes"] * 2 == b["exchange"]["full_attention"]["fast_bytes"]


def test_run_folder_holds_what_is_promised(tmp_path: Path) -> None:
    train(tmp_path / "run", "static", "--nproc", "8", *EIGHT_RANKS, "--set", "strategy_options.sp_degree=8", steps=1)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        ".lock",
        "config.yaml",
        "metrics.jsonl",
        "report.html",
        "tensorboard",
    }
    again = run("train", "--config", DEMO, "--out", tmp_path / "run")
    assert again.returncode == 1
    assert "already holds a run" in again.stderr


def test_an_output_folder_belongs_to_one_run(tmp_path: Path) -> None:
    config = load_config(DEMO, [setting for setting in SMALL if setting != "--set"])
    corpus = load_data([config])
    prepare_folder(config, tmp_path / "out")
    (tmp_path / "out" / "metrics.jsonl").touch()  # another run that started in the meantime
    with pytest.raises(SpecError, match="already holds a run"):
        run_training(config, corpus, tmp_path / "out")
    assert (tmp_path / "out" / "metrics.jsonl").exists(), "the other run's claim"
    (tmp_path / "file").touch()
    with pytest.raises(SpecError, match=r"cannot be written: .*Not a directory; make room"):
        prepare_folder(config, tmp_path / "file" / "out")
    saving = load_config(DEMO, ["checkpoint.every_steps=1", f"checkpoint.folder={tmp_path}/file/x"])
    with pytest.raises(SpecError, match=r"checkpoints in .*file/x: cannot be written"):
        prepare_folder(saving, tmp_path / "new")


def test_who_owns_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("RANK", "1")  # of something else than torchrun
    assert is_writer()
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not is_writer()
    monkeypatch.setenv("RANK", "0")
    assert is_writer()


def test_two_runs_do_not_share_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the second would go on with the first one's checkpoints or remove them."""
    monkeypatch.setattr("layerwise.train.run.LOCK_PATIENCE_S", 0.1)
    config = load_config(DEMO, [setting for setting in SMALL if setting != "--set"])
    corpus = load_data([config])
    prepare_folder(config, tmp_path)

    def another_run(*args: object, **options: object) -> None:
        (tmp_path / "metrics.jsonl").write_text("{}\n")
        with pytest.raises(SpecError, match="another run is at work in this folder"):
            run_training(config, corpus, tmp_path, resume=True)
        with pytest.raises(SpecError, match="another run is at work in this folder"):
            prepare_folder(config, tmp_path, overwrite=True)
        assert (tmp_path / "metrics.jsonl").read_text() == "{}\n"

    monkeypatch.setattr("layerwise.train.run.launch", another_run)
    run_training(config, corpus, tmp_path)
    prepare_folder(config, tmp_path, overwrite=True)
    assert not (tmp_path / "metrics.jsonl").exists(), "after its end"


@pytest.mark.parametrize("num_rows", [0, 1])
def test_a_run_that_fails_before_its_first_step_gives_the_folder_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_rows: int
) -> None:
    def failing_launch(*args: object, **options: object) -> None:
        (tmp_path / "metrics.jsonl").write_text("{}\n" * num_rows)
        raise RankFailedError("rank 3: was killed")

    monkeypatch.setattr("layerwise.train.run.launch", failing_launch)
    config = load_config(DEMO, [setting for setting in SMALL if setting != "--set"])
    with pytest.raises(RankFailedError):
        run_training(config, load_data([config]), tmp_path)
    assert (tmp_path / "metrics.jsonl").exists() == bool(num_rows)
    if not num_rows:
        prepare_folder(config, tmp_path)


def small_run(tmp_path: Path, rows: list[dict], *settings: str) -> list[str]:
    """Overrides for one rank and these samples."""
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(f"cluster.{key}=1" for key in ("num_nodes", "ranks_per_node")),
        *("model.num_layers=1", "model.layer_types=[full_attention]", "model.sliding_window=null"),
        *(f"data.source={tmp_path / 'rows.jsonl'}", "data.overlong=error", "data.max_tokens_per_sample=null"),
        *settings,
    ]


def test_samples_longer_than_a_step_are_counted_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"input_ids": [1] * length} for length in (3, 9, 12)]
    settings = small_run(tmp_path, rows, "tokens_per_step=8")
    configs = [load_config(DEMO, settings, strategy=name) for name in ("static", "dynamic")]
    load_data(configs)
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "data: 3 samples, 24 tokens from 1 file; 2 longer than tokens_per_step=8, each a step of its own"


def test_names_with_brackets_are_no_markup(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of sources that are said, and of warnings, which hold paths and what gloo says."""
    folder = tmp_path / "x[" / "red]y"
    folder.mkdir(parents=True)
    (folder / "rows.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n')
    mixture = [f"data.mixture={{'[/b]': {{source: '{folder}', weight: 1}}}}", "data.source=stdlib"]
    settings = [*small_run(tmp_path, [], "tokens_per_step=3", "num_steps=1"), *mixture]
    settings += ["checkpoint.every_steps=1", "checkpoint.folder=/dev/null/[/red]"]
    config = load_config(DEMO, settings)
    with pytest.raises(CheckpointError, match=re.escape("/dev/null/[/red]")):
        run_training(config, load_data([config]), tmp_path)
    err = capsys.readouterr().err
    assert "[/b]: " in err
    assert "warning: the checkpoint after step 1 could not be saved in /dev/null/[/red]" in err


def test_steps_without_labels_are_warned_about_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"input_ids": [1, 2, 3], "labels": [-100] * 3}]
    config = load_config(DEMO, small_run(tmp_path, rows, "tokens_per_step=3", "num_steps=3"))
    run_training(config, load_data([config]), tmp_path)
    assert [(row["num_valid_tokens"], row["loss"]) for row in metrics(tmp_path)] == [(0, 0.0)] * 3
    err = capsys.readouterr().err
    assert err.count("warning: step 0 has no label to learn from") == err.count("no label to learn from") == 1
    assert "warning: 3 steps had no label" in err


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_dead_rank_ends_the_run_within_seconds(tmp_path: Path) -> None:
    process = start("train", "--config", DEMO, *SMALL, "--steps", 500, "--out", tmp_path)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "metrics.jsonl").exists() and metrics(tmp_path)):
        assert time.monotonic() < deadline, "no step was made"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.2)
    ranks = children_of(process.pid)
    killed = time.monotonic()
    os.kill(ranks[3], signal.SIGKILL)
    _, err = process.communicate(timeout=20)
    assert time.monotonic() - killed < 10
    assert process.returncode == 1
    assert "rank 3: was killed by SIGKILL" in err
    assert err.count("Error") == 0, err
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def test_ctrl_c_stops_all_ranks_and_says_so(tmp_path: Path) -> None:
    two_ranks = ["--set", "cluster.ranks_per_node=1", "--set", "max_tokens_per_rank=2400"]
    process = start("train", "--config", DEMO, *SMALL, *two_ranks, "--steps", 500, "--out", tmp_path)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "metrics.jsonl").exists() and metrics(tmp_path)):
        assert time.monotonic() < deadline, "no step was made"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.1)
    ranks = children_of(process.pid)
    for pid in (*ranks, process.pid):  # as a terminal does
        os.kill(pid, signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "layerwise: interrupted"
    assert "Error" not in err
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


WHOLE_SAMPLES = ["--set", "data.overlong=error", "--set", "data.max_tokens_per_sample=null"]
BAD_SETTINGS = [
    (["--nproc", "4"], "--nproc 4, but the cluster has num_nodes=2 x ranks_per_node=8 = 16 ranks"),
    (["--strategy", "repak"], "strategy='repak' is unknown; legal values: static, dynamic"),
    (["--strategy", "static", "--set", "strategy_options.sp_degres=8"], "unknown option 'sp_degres'; legal here"),
    (["--set", "data.source=nowhere"], "nowhere"),
    (["--set", "attention_backend=fast"], "unknown attention backend 'fast'"),
    (["--set", "attention_backend=flash"], "attention backend 'flash' needs flash-attn"),
    (["--set", "model.vocab_size=100"], "vocab_size"),
    (["--set", "max_tokens_per_rank=10", *WHOLE_SAMPLES], "max_tokens_per_rank"),
]


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS, ids=[message.split()[0] for _, message in BAD_SETTINGS])
def test_bad_settings_end_in_one_message_before_ranks_start(
    tmp_path: Path,
    settings: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["train", "--config", str(DEMO), *SMALL, "--steps", "1", "--out", str(tmp_path), *settings]
    monkeypatch.setattr("sys.argv", ["layerwise", *arguments])
    monkeypatch.setattr("layerwise.train.run.launch", lambda *a, **k: pytest.fail("ranks were started"))
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("layerwise: ")
    assert message in line
    assert not (tmp_path / "metrics.jsonl").exists()


@pytest.mark.parametrize(("local_rank", "in_training"), [(0, False), (1, False), (0, True), (1, True)])
def test_torchrun_ranks_that_are_not_alone_say_once_per_node_what_is_wrong_before_training(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    local_rank: int,
    in_training: bool,
) -> None:
    def failing_launch(*args: object, **options: object) -> None:
        raise RankFailedError("rank 9: DataError: bad") if in_training else DataError("bad")

    monkeypatch.setattr("layerwise.train.run.launch", failing_launch)
    waited: list[float] = []  # for torchrun to end this rank, if the first of the node has failed, too
    monkeypatch.setattr("layerwise.cli.time.sleep", waited.append)
    for name, value in {"RANK": 8 + local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 16}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("sys.argv", ["layerwise", "train", "--config", str(DEMO), *SMALL, "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    spoken = "layerwise: bad\n" if local_rank == 0 else "layerwise: rank 9: bad\n"
    assert capsys.readouterr().err == ("layerwise: rank 9: DataError: bad\n" if in_training else spoken)
    assert waited == ([ALONE_AFTER_S] if local_rank and not in_training else [])


def test_under_torchrun_a_fault_in_training_names_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing_main(*args: object) -> None:
        raise DataError("bad")

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(RankFailedError, match="rank 0: DataError: bad"):
        launch(failing_main, num_ranks=1, ranks_per_node=1, device="cpu", timeout_s=10)


@pytest.mark.parametrize(
    ("command", "settings", "message"),
    [
        ("compare", ["--set", "checkpoint.folder=x", "--set", "checkpoint.every_steps=1"], "of several strategies"),
        ("train", ["--set", "checkpoint.keep=3"], "checkpoint: has no effect without every_steps"),
        ("train", ["--resume", "--overwrite"], "give one of them"),
        ("train", ["--set", "expert_parallel=2"], "needs sharding=fsdp or sharding=hsdp"),
        ("train", ["--resume"], "checkpoints need the package `safetensors`"),
    ],
)
def test_settings_of_state_are_checked_before_ranks_start(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    settings: list[str],
    message: str,
) -> None:
    monkeypatch.setattr("layerwise.train.run.launch", lambda *a, **k: pytest.fail("ranks were started"))
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setattr(
        "sys.argv", ["layerwise", command, "--config", str(DEMO), *SMALL, "--out", str(tmp_path), *settings]
    )
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert message in capsys.readouterr().err


def test_compare_checks_everything_before_it_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    monkeypatch.setattr("layerwise.train.run.launch", lambda *a, **k: pytest.fail("ranks were started"))
    command = ["layerwise", "compare", "--config", str(DEMO), *SMALL, "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", [*command, "--strategies", "dynamic,foo"])
    with pytest.raises(SystemExit):
        main()
    assert "strategy='foo' is unknown" in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", command)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    with pytest.raises(SystemExit):
        main()
    assert "once per strategy" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_that_diverges_is_no_success(tmp_path: Path) -> None:
    diverging = ["--set", "optimizer.learning_rate=1e30", "--steps", "3"]
    done = run("train", "--config", DEMO, *SMALL, *ONE_RANK, *diverging, "--out", tmp_path)
    assert done.returncode == 1
    assert "the gradient norm is nan" in done.stderr
    assert "lower optimizer.learning_rate=1e+30" in done.stderr
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
