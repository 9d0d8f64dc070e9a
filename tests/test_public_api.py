"""What users touch is frozen here: importable names, commands and their options, and what importing costs."""

import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import layerwise
from layerwise.cli import app

ROOT = Path(__file__).parents[1]


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
        "load_cluster",
        "load_model",
        "plan_step",
        "reduce_gradients",
        "solo_world",
        "token_loss",
    ]
    for module in pkgutil.walk_packages(layerwise.__path__, "layerwise."):
        if module.name != "layerwise.__main__":
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
    assert options == {
        "plan": [
            "--cluster",
            "--json",
            "--lengths",
            "--max-tokens-per-rank",
            "--model",
            "--samples",
            "--set",
            "--strategy",
        ],
        "train": ["--config", "--nproc", "--out", "--overwrite", "--set", "--steps", "--strategy"],
        "compare": ["--config", "--out", "--overwrite", "--set", "--steps", "--strategies"],
    }


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


@pytest.mark.parametrize("path", ["README.md", *(str(p.relative_to(ROOT)) for p in (ROOT / "docs").glob("*.md"))])
def test_paths_named_in_docs_exist(path: str) -> None:
    text = (ROOT / path).read_text()
    named = re.findall(r"`((?:src|tests|docs|examples|benchmarks)/[\w./-]+)`", text)
    named += re.findall(r"\]\(((?!https?:|#)[\w./-]+)\)", text)
    for name in named:
        assert (ROOT / name).exists() or (ROOT / path).parent.joinpath(name).exists(), f"{path} names {name}"


def test_only_one_file_calls_all_to_all_and_one_makes_groups() -> None:
    for call, home in (("all_to_all_single(", "exchange.py"), ("new_group(", "groups.py")):
        users = [p.name for p in (ROOT / "src").rglob("*.py") if call in p.read_text()]
        assert users == [home]
