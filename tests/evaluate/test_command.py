"""`layerwise evaluate` from end to end: JSON, page, pictures, and what it refuses before work is spent."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from layerwise.commands.evaluate import evaluate
from layerwise.errors import SpecError
from layerwise.evaluate import sensitivity
from layerwise.evaluate.series import gain_series, gap_bars, token_panels
from tests.evaluate.builders import small_workload, step_result, strategy_step

FIGURES = {
    "step_s",
    "saving_pct",
    "saving_ci_pct",
    "mfu",
    "mfu_points",
    "gap_to_ideal_pct",
    "worst_step_saving_pct",
    "fallback_share",
}


def run(*arguments: str) -> str:
    app = typer.Typer()
    app.command()(evaluate)
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def workload(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(small_workload().model_dump(mode="json")))
    return str(path)


def test_json_holds_every_figure(workload: str, tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    run("--workload", workload, "--strategies", "repack", "--steps", "2", "--workers", "1", "--json", str(path))
    data: dict[str, Any] = json.loads(path.read_text())
    assert list(data["strategies"]) == ["dynamic", "repack", "ideal"]
    assert data["num_steps"] == 2
    assert data["wide_steps"] >= 1
    for rows in data["strategies"].values():
        assert set(rows["wide"]) == set(rows["all"]) == FIGURES
    assert data["strategies"]["repack"]["all"]["worst_step_saving_pct"] >= -1e-9


def test_page_and_pictures(workload: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("plotly")
    few = [v for v in sensitivity.make_variants(small_workload()) if v.value == "1F1S"]
    monkeypatch.setattr("layerwise.commands.evaluate.make_variants", lambda *_: few)
    monkeypatch.setattr("layerwise.commands.evaluate.DEFAULT_STEPS", 1)
    monkeypatch.setattr("layerwise.evaluate.drawings.DPI", 40)
    page, folder = tmp_path / "page.html", tmp_path / "new" / "pictures"
    arguments = ("--steps", "1", "--workers", "1", "--report", str(page), "--png", str(folder), "--sensitivity")
    run("--workload", workload, "--strategies", "repack", *arguments)
    text = page.read_text()
    assert len(re.findall(r'id="picture-\d"', text)) == 4
    assert not re.search(r'<(script|link|img)[^>]+(src|href)="?http', text)
    names = {"gains.png", "tokens.png", "gaps.png", "sensitivity.png"}
    assert {path.name for path in folder.iterdir()} == names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--strategies", "repak"], "'repak' is unknown"),
        (["--json", "no/such/folder/x.json"], "--json no/such/folder/x.json: no such folder"),
        (["--json", "x.out", "--report", "./x.out"], "--json and --report name the same file, x.out"),
        (["--length-file", "x.txt"], "no effect without --sensitivity"),
        (["--workload", "nowhere"], "presets are paper"),
    ],
)
def test_faults_end_before_work(arguments: list[str], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        run(*arguments)


STEPS = [
    step_result(dynamic=strategy_step(10.0), repack=strategy_step(9.0)),
    step_result(dynamic=strategy_step(10.0), repack=strategy_step(8.0)),
]


def test_pictures_show_the_numbers() -> None:
    gains = gain_series(STEPS)
    assert {name: series.tolist() for name, series in gains.items()} == {
        "repack": pytest.approx([10.0, 20.0]),
        "ideal": pytest.approx([40.0, 40.0]),
    }
    # Two micro-batches on two ranks: the fullest hold 20 + 30 tokens, the mean is 15 + 20.
    assert [panel.title for panel in token_panels(STEPS)] == [
        f"{name}: step 1, fullest rank over mean 1.429" for name in ("dynamic", "repack")
    ]
    bars = {(bar.kind, bar.strategy): bar.parts_s["imbalance"] for bar in gap_bars(STEPS)}
    assert bars == {("full layers", "dynamic"): 4.0, ("full layers", "repack"): pytest.approx(2.5)}
