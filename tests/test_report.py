import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import ClassVar
from xml.etree import ElementTree

import pytest

from layerwise.errors import DataError
from layerwise.report.page import headline, strategy_rows, write_report
from layerwise.report.profile import plot_profile, read_profile
from tests.runs import metrics_row, plan_of, run

pytest.importorskip("matplotlib")

PLANS = (plan_of("dynamic", [(160, list(range(16)))]), plan_of("repack+parents", [(160, list(range(8)))]))


def two_runs():
    base = [metrics_row(1, 5.0, slow_bytes=6_000_000), metrics_row(2, 4.0, slow_bytes=8_000_000)]
    repacked = [metrics_row(1, 5.0), metrics_row(2, 4.0 + 2e-6)]
    return [run("dynamic", base), run("repack+parents", repacked)]


def write(path, **changes):
    options = {"title": "A <small> run", "runs": two_runs(), "plans": PLANS, "config_text": "a: <b> & {c}\n"}
    write_report(path, **options | changes)
    return path.read_text()


class TestTable:
    def test_same_headings_in_every_row(self):
        rows = strategy_rows(two_runs())
        assert [row["strategy"] for row in rows] == ["dynamic", "repack+parents"]
        assert list(rows[0]) == list(rows[1])
        assert all(isinstance(value, str) for row in rows for value in row.values())

    def test_numbers(self):
        first, second = strategy_rows(two_runs())
        expected = {
            "steps": "2",
            "loss, first step": "5.000000",
            "loss, last step": "4.000000",
            "tokens/s on this machine": "4,000",
            "step time on this machine": "2.00 s",
            "step time predicted for the cluster": "500 us",
            "planning time": "12.0 ms",
            "MFU on this machine": "41.4%",
            "waiting for exchanges, mean rank": "250.0 ms",
            "tokens per rank, max/mean": "1.200",
            "slow link per step, full layers": "4 MB",
            "slow link per step, sliding layers": "7 MB",
            "fast link per step, full layers": "3 MB",
            "fast link per step, sliding layers": "9 MB",
            "all-to-all calls per layer, full layers": "4.00",
            "all-to-all calls per layer, sliding layers": "4.00",
            "parents formed": "2 x SP16",
            "children formed": "6 x SP1, 2 x SP8",
            "parents left wide": "0",
        }
        assert {key: first[key] for key in expected} == expected
        assert second["slow link per step, sliding layers"] == "0 B"
        assert second["loss, last step"] == "4.000002"

    def test_calls_are_per_microbatch(self):
        two_each = metrics_row(1, 5.0, microbatches=2)
        two_each["exchange"]["full_attention"]["calls"] = 128
        assert strategy_rows([run("a", [two_each])])[0]["all-to-all calls per layer, full layers"] == "4.00"

    def test_medians_ignore_a_slow_first_step(self):
        rows = [metrics_row(1, 5.0, step_s=90.0)] + [metrics_row(i, 5.0) for i in (2, 3)]
        assert strategy_rows([run("a", rows)])[0]["step time on this machine"] == "2.00 s"

    def test_experts_and_moves_are_exchanges_but_no_layers(self):
        row = metrics_row(1, 5.0)
        for kind in ("experts", "moves"):
            row["exchange"][kind] = {"slow_bytes": 5_000_000, "fast_bytes": 6_000_000, "calls": 8}
        (numbers,) = strategy_rows([run("a", [row])])
        assert (numbers["slow link per step, experts"], numbers["fast link per step, moves"]) == ("5 MB", "6 MB")
        assert {key for key in numbers if key.startswith("all-to-all calls")} == {
            "all-to-all calls per layer, full layers",
            "all-to-all calls per layer, sliding layers",
        }
        assert "0 B over the slow link" in headline([run("a", [row])])

    def test_kind_that_only_one_run_has(self):
        rows = strategy_rows([run("a", [metrics_row(1, 5.0, exchange={})]), run("b", [metrics_row(1, 5.0)])])
        assert rows[0]["slow link per step, full layers"] == "0 B"
        assert rows[0]["all-to-all calls per layer, full layers"] == "0.00"


class TestHeadline:
    def test_two_runs(self):
        assert headline(two_runs()) == (
            "Sparse layers moved 7 MB over the slow link per step with dynamic and 0 B with repack+parents; "
            "the losses of 2 steps differ by at most 2.0e-06."
        )

    def test_equal_losses(self):
        rows = [metrics_row(1, 5.0)]
        assert headline([run("a", rows), run("b", rows)]).endswith("the losses of 1 step are exactly equal.")

    def test_no_common_steps(self):
        runs = [run("a", [metrics_row(1, 5.0)]), run("b", [metrics_row(2, 5.0)])]
        assert headline(runs).endswith("they have no step in common.")

    def test_one_run(self):
        assert "the loss went from 5.0000 to 4.0000 in 2 steps" in headline(two_runs()[:1])

    def test_model_without_sparse_layers(self):
        row = metrics_row(1, 5.0)
        del row["exchange"]["sliding_attention"]
        assert headline([run("a", [row])]).startswith("Attention layers moved 4 MB")


class _Page(HTMLParser):
    VOID = ("meta", "br", "img", "link")

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write(tmp_path_factory.mktemp("report") / "report.html")


class TestPage:
    def test_balanced_tags_and_unique_ids(self, text):
        page = _Page(text)
        assert not page.open
        assert len(page.ids) == len(set(page.ids))

    def test_needs_nothing_else(self, text):
        page = _Page(text)
        assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe"}
        for _, attributes in page.tags:
            for key in ("src", "href", "xlink:href"):
                assert attributes.get(key, "#").startswith("#")

    def test_pictures_parse_and_resolve_their_references(self, text):
        pictures = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
        assert len(pictures) == 4
        for picture in pictures:
            ids = {element.get("id") for element in ElementTree.fromstring(picture).iter()}
            assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', picture)) <= ids

    def test_says_what_it_must(self, text):
        assert "<h1>A &lt;small&gt; run</h1>" in text
        assert headline(two_runs()) in text
        assert "a: &lt;b&gt; &amp; {c}" in text
        for row in strategy_rows(two_runs()):
            assert all(f">{value}<" in text for value in row.values())
        assert "step time predicted for the cluster" in text

    def test_same_input_same_file(self, text, tmp_path):
        assert write(tmp_path / "again.html") == text

    def test_without_plans_and_interrupted(self, tmp_path, monkeypatch):
        before = write(tmp_path / "report.html", plans=None)
        assert before.count("<svg") == 3

        def fail(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "report.html")  # with one picture more
        assert (tmp_path / "report.html").read_text() == before
        assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


class TestProfile:
    SUMMARY: ClassVar = {
        "num_steps": 3,
        "sections": ["exchange_in.full_attention", "attention.sliding_attention", "exchange.moves", "moe", "other"],
        "seconds_by_rank": [[0.1, 0.2, 0.0, 0.3, 0.4], [0.2, 0.2, 0.0, 0.1, 0.5]],
    }

    def test_ranks_and_sections_that_took_time(self, tmp_path):
        (tmp_path / "steps.json").write_text(json.dumps(self.SUMMARY))
        profiled = replace(two_runs()[1], profile=read_profile(tmp_path / "steps.json"))
        text = write(tmp_path / "report.html", runs=[two_runs()[0], profiled])
        page = _Page(text)
        assert not page.open
        assert len(page.ids) == len(set(page.ids))
        assert text.count("<svg") == 5
        assert "Where the time of a step went, repack+parents" in text
        assert "Mean of 3 profiled steps" in text
        table = re.findall(r"<tr>(.*?)</tr>", text[text.index("Where the time") :])
        cells = [re.findall(r">([^<]*)</t[hd]>", row) for row in table]
        assert cells == [
            ["", "exchange in, full layers", "kernel, sliding layers", "MoE", "other", "step"],
            ["rank 0", "100.0 ms", "200.0 ms", "300.0 ms", "400.0 ms", "1.00 s"],
            ["rank 1", "200.0 ms", "200.0 ms", "100.0 ms", "500.0 ms", "1.00 s"],
        ]

    def test_bars_are_as_high_as_steps_are_long(self, tmp_path):
        (tmp_path / "steps.json").write_text(json.dumps(self.SUMMARY))
        (axes,) = plot_profile(read_profile(tmp_path / "steps.json")).axes
        tops = sorted(
            (round(bar.get_x() + bar.get_width() / 2), bar.get_y() + bar.get_height()) for bar in axes.patches
        )
        assert [tops[3], tops[-1]] == [(0, pytest.approx(1.0)), (1, pytest.approx(1.0))]
        assert len({bar.get_facecolor() for bar in axes.patches}) == 4

    def test_a_run_without_a_profile(self, tmp_path):
        assert read_profile(tmp_path / "steps.json") is None


class TestBadInput:
    def test_run_without_steps(self):
        with pytest.raises(DataError, match="'dynamic': the run has no steps"):
            run("dynamic", [])

    def test_row_without_a_field(self):
        row = metrics_row(1, 5.0)
        del row["plan_s"]
        with pytest.raises(DataError, match=r"lacks \['plan_s'\]"):
            run("dynamic", [row])

    def test_same_strategy_twice(self, tmp_path):
        with pytest.raises(DataError, match="must differ"):
            write(tmp_path / "report.html", runs=[two_runs()[0]] * 2)
        assert not list(tmp_path.iterdir())
