"""What people read about a plan, against the plan and its prediction."""

from io import StringIO

import pytest
from rich.console import Console

from layerwise.cost import predict
from layerwise.report.summary import render, summarize
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, wide_plan

LENGTHS = [2100, 13000, 1800, 1700, 900, 800, 750, 700, 600, 400, 350, 300, 120, 60, 20]


def test_rows_agree_with_the_plan() -> None:
    plan = wide_plan("repack", LENGTHS)
    summary = summarize(plan, WIDE_CLUSTER, WIDE_MODEL, num_samples=2)
    prediction = predict(plan, WIDE_CLUSTER, WIDE_MODEL)
    by_role = {
        role: sum(row.num_tokens for row in summary.groups if row.role == role)
        for role in ("group", "parent, repacked", "child")
    }
    assert by_role["child"] == by_role["parent, repacked"] > 0
    assert by_role["group"] + by_role["parent, repacked"] == sum(LENGTHS)
    assert summary.loads[0].mean * 16 == sum(LENGTHS)
    assert summary.loads[0].highest <= 2560
    assert [(row.kind, row.num_layers) for row in summary.kinds] == [
        ("full_attention", 1),
        ("sliding_attention", 3),
    ]
    assert [row.calls_per_layer for row in summary.kinds] == [4, 4]
    assert summary.kinds[1].slow_bytes == 0 < summary.kinds[0].slow_bytes
    total_s = sum(row.predicted_s for row in summary.kinds) + summary.predicted_head_s
    assert total_s == pytest.approx(prediction.seconds)


def test_the_longest_samples_come_first() -> None:
    summary = summarize(wide_plan("repack", LENGTHS), WIDE_CLUSTER, WIDE_MODEL, num_samples=2)
    assert [(row.sample, row.num_tokens) for row in summary.samples] == [(1, 13000), (0, 2100)]
    longest = summary.samples[0]
    assert longest.attention_ranks["full_attention"] == "0-15"
    assert longest.owner_ranks == longest.attention_ranks["sliding_attention"]
    assert longest.owner_ranks in ("0-7", "8-15")


def test_every_summary_has_bounds() -> None:
    summary = summarize(wide_plan("repack", LENGTHS), WIDE_CLUSTER, WIDE_MODEL)
    gaps = {row.name: row for row in summary.gaps}
    assert list(gaps) == [
        "tokens",
        "full_attention, GFLOP",
        "sliding_attention, GFLOP",
        "all ranks, MB between nodes",
        "predicted step, s",
    ]
    assert gaps["tokens"].bound == -(-sum(LENGTHS) // 16)
    assert gaps["predicted step, s"].reached == summary.predicted_s
    assert gaps["all ranks, MB between nodes"].reached == sum(row.slow_bytes for row in summary.kinds) / 1e6


def test_rendered_seconds_are_called_predictions() -> None:
    out = StringIO()
    summary = summarize(wide_plan("repack+parents", LENGTHS), WIDE_CLUSTER, WIDE_MODEL, num_samples=3)
    render(summary, Console(file=out, width=100))
    text = out.getvalue()
    for words in (
        "repack+parents",
        "predicted step",
        "predicted MFU",
        "predicted s",
        "LM head",
        "lower bound",
        "fallbacks 0",
        "0-15",
    ):
        assert words in text
