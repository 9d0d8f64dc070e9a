"""What users touch is frozen here: importable names, commands and their options, and what importing costs."""

import importlib
import os
import pkgutil
import re
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typer

import layerwise
from layerwise.cli import app, main

ROOT = Path(__file__).parents[1]
# Modules that only code imports which has found their library.
NEEDS_AT_IMPORT = {"layerwise.kernels.rows_triton": "triton"}


def test_the_door_is_exact() -> None:
    assert layerwise.__all__ == [
        "ClusterSpec",
        "LocalWorld",
        "ModelSpec",
        "PlannedLoader",
        "Planner",
        "ProcessWorld",
        "StepPlan",
        "StepSampler",
        "attention",
        "balance_loss",
        "checkpoint",
        "current_routes",
        "load_cluster",
        "load_model",
        "plan_step",
        "reduce_gradients",
        "relocate",
        "solo_world",
        "sum_gradients",
        "token_loss",
    ]
    for module in pkgutil.walk_packages(layerwise.__path__, "layerwise."):
        needs = NEEDS_AT_IMPORT.get(module.name)
        if module.name != "layerwise.__main__" and (needs is None or find_spec(needs)):
            importlib.import_module(module.name)
    for name in layerwise.__all__:
        # A submodule of the same name would hide it once it is imported.
        assert callable(getattr(layerwise, name)), name
        assert getattr(layerwise, name).__doc__, name
    with pytest.raises(AttributeError, match="nonesuch"):
        layerwise.nonesuch  # noqa: B018


def test_commands_and_options() -> None:
    command = typer.main.get_command(app)
    options = {name: sorted(o for p in sub.params for o in p.opts) for name, sub in command.commands.items()}  # type: ignore[attr-defined]
    assert set(options) == {"plan", "simulate", "evaluate", "calibrate", "doctor", "train", "compare"}
    training = [
        "--config",
        "--nproc",
        "--out",
        "--overwrite",
        "--profile",
        "--resume",
        "--set",
        "--steps",
        "--strategy",
    ]
    assert options["train"] == training
    assert options["compare"] == ["--config", "--out", "--overwrite", "--set", "--steps", "--strategies"]
    planning = {"--cluster", "--json", "--lengths", "--max-tokens-per-rank", "--model", "--strategy"}
    assert planning <= set(options["plan"])
    assert planning <= set(options["simulate"])
    assert {"--workload", "--strategies", "--steps", "--json", "--report", "--png"} <= set(options["evaluate"])


def test_planning_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "lengths.txt").write_text("900\n40\n7\n")
    code = (
        "import sys, layerwise, layerwise.cli\n"
        f"lengths = {str(tmp_path / 'lengths.txt')!r}\n"
        "sys.argv = ['layerwise', 'plan', '--lengths', lengths, '--cluster', 'demo', '--model', 'demo']\n"
        "try:\n    layerwise.cli.main()\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "loaded = {'torch', 'matplotlib', 'pyarrow', 'tokenizers', 'tensorboard'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "predicted" in done.stdout


def plan_demo(monkeypatch: pytest.MonkeyPatch, lengths: str, *arguments: object) -> int:
    """Exit status of `layerwise plan` in this process."""
    command = ["plan", "--lengths", lengths, "--cluster", "demo", "--model", "demo", *arguments]
    monkeypatch.setattr("sys.argv", ["layerwise", *map(str, command)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def test_plan_file_is_whole_and_as_the_umask_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lengths.txt").write_text("900\n40\n7\n")
    before = os.umask(0o022)
    try:
        assert plan_demo(monkeypatch, str(tmp_path / "lengths.txt"), "--json", tmp_path / "plan.json") == 0
    finally:
        os.umask(before)
    assert layerwise.StepPlan.from_json((tmp_path / "plan.json").read_text()).lengths == (900, 40, 7)
    assert (tmp_path / "plan.json").stat().st_mode & 0o777 == 0o644
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lengths.txt", "plan.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "none/plan.json"], "--json none/plan.json: no such folder 'none'"),
        (["--json", "folder"], "--json folder: is there already and is no file"),
        (["--json", "x" * 300], f"--json {'x' * 300}: cannot be written: File name too long"),
        (["--set", "=3"], "--set '=3': expected key=value"),
        (["--set", "sp_degree=["], "--set 'sp_degree=[': the value is not valid YAML"),
        (["--strategy", "static", "--set", "sp_degree=true"], "sp_degree: got True, which is legal for yes/no"),
        (["--set", "cluster=paper"], "strategy repack+parents: unknown option 'cluster'; legal here: fallback"),
        (
            ["--max-tokens-per-rank", str(2**62)],
            f"max_tokens_per_rank={2**62} must be at least 1 and at most 2147483647",
        ),
    ],
)
def test_plan_with_a_bad_option_prints_the_message_only(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    (tmp_path / "lengths.txt").write_text("900\n")
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path)
    assert plan_demo(monkeypatch, "lengths.txt", *arguments) == 1
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("layerwise: ")
    assert message in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "lengths.txt"]


def test_ctrl_c_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(path: str) -> list[int]:
        raise KeyboardInterrupt

    monkeypatch.setattr("layerwise.commands.plan.read_lengths", interrupted)
    assert plan_demo(monkeypatch, "lengths.txt") == 130
    assert capsys.readouterr().err == "layerwise: interrupted\n"


def test_the_first_look_prints_what_the_readme_shows(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "01_plan.py"), run_name="__main__")
    readme = [line.strip() for line in (ROOT / "README.md").read_text().splitlines()]
    printed = capsys.readouterr().out.splitlines()
    assert printed
    assert set(printed) <= set(readme)


def test_the_loop_of_the_example_runs_on_one_rank(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "02_own_loop.py"), run_name="__main__")
    first, *_, last = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert last < first / 2


@pytest.mark.parametrize("path", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_paths_named_in_docs_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", text)
    named += re.findall(r"\]\(((?!https?:|#)[\w./-]+)\)", text)
    for name in named:
        assert (ROOT / name).exists() or (ROOT / path).parent.joinpath(name).exists(), f"{path} names {name}"


def test_only_one_file_calls_all_to_all_and_one_makes_groups() -> None:
    for call, home in (("all_to_all_single(", "collective.py"), ("new_group(", "groups.py")):
        users = [p.name for p in (ROOT / "src").rglob("*.py") if call in p.read_text()]
        assert users == [home]
