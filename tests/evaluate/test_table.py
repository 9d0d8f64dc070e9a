"""The figures of a table, from seconds chosen by hand."""

import io

import pytest
from rich.console import Console

from layerwise.evaluate.table import COLUMNS, cells, evaluate, render, strategy_rows
from tests.evaluate.builders import step_result, strategy_step

# dynamic 10 + 30 s, repack 8 + 30 s; model FLOPs are worth 0.5 x 10 + 0.4 x 30 = 17 s at the peak.
STEPS = [
    step_result(dynamic=strategy_step(10.0), repack=strategy_step(8.0, parents=2, fallbacks=1)),
    step_result(
        wide=False,
        dynamic=strategy_step(30.0, ideal_s=26.0, mfu=0.4),
        repack=strategy_step(30.0, ideal_s=26.0, parents=2, fallbacks=2),
    ),
]


def test_figures_over_all_steps() -> None:
    rows = strategy_rows(STEPS)
    assert list(rows) == ["dynamic", "repack", "ideal"]
    repack = rows["repack"]
    assert repack.step_s == 19.0
    assert repack.saving_pct == pytest.approx(5.0)
    assert repack.mfu == pytest.approx(17 / 38)
    assert repack.mfu_points == pytest.approx(100 * (17 / 38 - 17 / 40))
    assert repack.gap_to_ideal_pct == pytest.approx(100 * (38 / 32 - 1))
    assert repack.worst_step_saving_pct == 0.0
    assert repack.fallback_share == 0.75
    assert rows["ideal"].saving_pct == pytest.approx(20.0)
    assert rows["ideal"].gap_to_ideal_pct == 0.0
    assert rows["dynamic"].saving_pct == rows["dynamic"].mfu_points == rows["dynamic"].fallback_share == 0.0


def test_a_slower_step_shows() -> None:
    worse = step_result(dynamic=strategy_step(10.0), repack=strategy_step(11.0))
    assert strategy_rows([*STEPS, worse])["repack"].worst_step_saving_pct == pytest.approx(-10.0)


def test_interval_holds_the_saving_and_narrows_with_equal_steps() -> None:
    low, high = strategy_rows(STEPS * 10)["repack"].saving_ci_pct
    assert 0.0 < low < 5.0 < high < 20.0
    assert strategy_rows(STEPS * 10, seed=0) == strategy_rows(STEPS * 10, seed=0)
    assert strategy_rows(STEPS[:1] * 5)["repack"].saving_ci_pct == pytest.approx((20.0, 20.0))


def test_one_step_has_no_interval() -> None:
    figures = strategy_rows(STEPS[:1])["repack"]
    assert figures.saving_ci_pct is None
    assert dict(zip(COLUMNS, cells(figures), strict=True))["95% interval"] == "-"


def test_wide_steps_are_told_apart() -> None:
    data = evaluate(STEPS).to_json()
    assert (data["num_steps"], data["wide_steps"]) == (2, 1)
    assert data["strategies"]["repack"]["wide"]["saving_pct"] == pytest.approx(20.0)
    assert data["strategies"]["repack"]["all"]["saving_pct"] == pytest.approx(5.0)


def test_without_wide_steps_there_is_one_table() -> None:
    console = Console(file=io.StringIO(), width=80)
    evaluation = evaluate(STEPS[1:])
    render(evaluation, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert evaluation.to_json()["strategies"]["repack"]["wide"] is None
    assert "no step has a parent wider than a node" in text
    assert text.count("ideal") == 2  # a row and a heading


def test_tables_fit_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80)
    step = step_result(
        **{"dynamic": strategy_step(112.3, ideal_s=90.1), "repack+parents": strategy_step(101.2, parents=1)}
    )
    render(evaluate([step, step]), console)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    row = next(line for line in lines if line.startswith("repack+parents"))
    assert len(row.split()) == 1 + len(COLUMNS) + 1  # the interval is two words
    assert max(map(len, lines)) <= 80
