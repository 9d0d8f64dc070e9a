import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from layerwise.errors import UnsupportedError
from layerwise.labels import format_bytes, format_seconds
from layerwise.report.plots import plot_balance, plot_link_bytes, plot_losses, plot_repacking
from layerwise.report.rows import by_degree, mean_of
from tests.runs import metrics_row, plan_of

pytest.importorskip("matplotlib")

WIDE = plan_of("dynamic", [(1600, list(range(16))), (30, [3]), (50, [12]), (20, [3])])
LOCAL = plan_of("repack+parents", [(1600, list(range(8))), (30, [9]), (50, [12]), (20, [9])])


def draw(figure):
    """Rendering is where matplotlib warns, and warnings are errors here."""
    figure.canvas.draw()
    return figure


def bar_tops(ax, num_ranks=16):
    """The height of every rank's stack."""
    tops = np.zeros(num_ranks)
    for bar in ax.patches:
        rank = round(bar.get_x() + bar.get_width() / 2)
        tops[rank] = max(tops[rank], bar.get_y() + bar.get_height())
    return tops


def filled(ax):
    return [bar for bar in ax.patches if bar.get_fill()]


def texts(figure):
    from matplotlib.text import Text

    return [text.get_text() for text in figure.findobj(Text) if text.get_text()]


class TestRepacking:
    def test_stacks_are_tokens_per_rank(self):
        panels = draw(plot_repacking(WIDE, LOCAL)).axes
        for ax, plan in zip(panels, (WIDE, LOCAL), strict=True):
            assert np.allclose(bar_tops(ax), plan.microbatches[0].tokens_per_rank(16))
            assert sum(bar.get_height() for bar in filled(ax)) == 1700

    def test_samples_across_nodes_have_another_colour(self):
        before, after = draw(plot_repacking(WIDE, LOCAL)).axes
        assert sum(bar.get_height() for bar in filled(before) if is_warm(bar)) == 1600
        assert not any(is_warm(bar) for bar in filled(after))
        assert "1 of 4 samples across nodes" in before.get_title(loc="right")
        assert "0 of 4 samples across nodes" in after.get_title(loc="right")

    def test_narrow_sample_on_two_nodes_is_across_nodes(self):
        straddling = plan_of("odd", [(10, [7, 8])])
        before, _ = draw(plot_repacking(straddling, LOCAL)).axes
        assert all(is_warm(bar) for bar in filled(before))

    def test_longest_sample_is_outlined(self):
        _, after = draw(plot_repacking(WIDE, LOCAL)).axes
        outlined = [bar for bar in after.patches if not bar.get_fill()]
        assert sum(bar.get_height() for bar in outlined) == 1600
        assert {round(bar.get_x() + 0.43) for bar in outlined} == set(range(8))

    def test_takes_the_microbatch_of_the_longest_sample(self):
        split = plan_of("dynamic", [(30, [3]), (1600, list(range(16)))], [0], [1])
        before, _ = draw(plot_repacking(split, LOCAL)).axes
        assert bar_tops(before).tolist() == [100] * 16

    def test_legend_says_what_is_drawn(self):
        shown = texts(draw(plot_repacking(WIDE, LOCAL)))
        assert {"1 rank", "8 ranks", "16 ranks across nodes", "the longest sample"} <= set(shown)
        assert "2 ranks" not in shown
        assert {"node 0", "node 1", "dynamic", "repack+parents"} <= set(shown)


def is_warm(bar):
    red, _, blue, _ = bar.get_facecolor()
    return red > blue


class TestLinkBytes:
    def test_bars_are_means_and_zero_is_labelled(self):
        runs = {
            "dynamic": [metrics_row(1, 5.0, slow_bytes=2_000_000), metrics_row(2, 4.0, slow_bytes=8_000_000)],
            "repack": [metrics_row(1, 5.0), metrics_row(2, 4.0)],
        }
        fast, slow = draw(plot_link_bytes(runs)).axes
        assert [bar.get_height() for bar in slow.patches] == [4e6, 5e6, 4e6, 0]
        assert [bar.get_height() for bar in fast.patches] == [3e6, 9e6, 3e6, 9e6]
        assert [text.get_text() for text in slow.texts] == ["4 MB", "5 MB", "4 MB", "0 B"]
        assert [text.get_text() for text in slow.get_xticklabels()] == ["full layers", "sliding layers"]

    def test_nothing_moved_at_all(self):
        zero = {"full_attention": {"calls": 0, "fast_bytes": 0, "slow_bytes": 0}}
        draw(plot_link_bytes({"static": [metrics_row(1, 5.0, exchange=zero)]}))
        draw(plot_link_bytes({"static": [metrics_row(1, 5.0, exchange={})]}))

    def test_a_kind_that_one_strategy_lacks(self):
        runs = {"static": [metrics_row(1, 5.0, exchange={})], "repack": [metrics_row(1, 5.0)]}
        _, slow = draw(plot_link_bytes(runs)).axes
        assert [bar.get_height() for bar in slow.patches] == [0, 0, 4e6, 0]


class TestLosses:
    def test_difference_to_the_first_with_zeros_hollow(self):
        runs = {
            "dynamic": [metrics_row(1, 5.0), metrics_row(2, 4.0), metrics_row(3, 3.0)],
            "repack": [metrics_row(1, 5.0), metrics_row(2, 4.25), metrics_row(3, 3.0)],
        }
        curves, difference = draw(plot_losses(runs)).axes
        assert [line.get_ydata().tolist() for line in curves.lines] == [[5, 4, 3], [5, 4.25, 3]]
        line, full, hollow = difference.lines
        assert full.get_xdata().tolist() == [2]
        assert full.get_ydata().tolist() == [0.25]
        assert hollow.get_xdata().tolist() == [1, 3]
        assert hollow.get_markerfacecolor() != hollow.get_color()
        low, high = difference.get_ylim()
        assert all(low < y < high for y in [*line.get_ydata(), *hollow.get_ydata()])

    def test_earlier_curves_show_beside_later_ones(self):
        same = [metrics_row(1, 5.0), metrics_row(2, 4.0)]
        lines = draw(plot_losses({"static": same, "dynamic": same, "repack": same})).axes[0].lines
        assert [line.get_linewidth() for line in lines] == sorted(
            (line.get_linewidth() for line in lines), reverse=True
        )

    def test_all_equal(self):
        same = [metrics_row(1, 5.0), metrics_row(2, 4.0)]
        draw(plot_losses({"dynamic": same, "repack": same}))

    def test_other_steps_are_not_compared(self):
        runs = {"dynamic": [metrics_row(1, 5.0)], "repack": [metrics_row(2, 4.0), metrics_row(1, 6.0)]}
        _, full, _ = draw(plot_losses(runs)).axes[1].lines
        assert full.get_ydata().tolist() == [1.0]

    def test_one_run_has_nothing_to_compare(self):
        assert len(draw(plot_losses({"dynamic": [metrics_row(1, 5.0)]})).axes) == 1


class TestBalance:
    def test_ratio_by_step(self):
        rows = [metrics_row(1, 5.0), metrics_row(2, 4.0, tokens_per_rank_max=750)]
        figure = draw(plot_balance({"dynamic": rows}))
        assert figure.axes[0].lines[0].get_ydata().tolist() == [1.2, 1.5]
        assert "dynamic  (median 1.35)" in texts(figure)

    def test_perfectly_even(self):
        low, high = draw(plot_balance({"dynamic": [metrics_row(1, 5.0, tokens_per_rank_max=500)]})).axes[0].get_ylim()
        assert low < 1 < high

    def test_end_labels_do_not_touch(self):
        runs = {name: [metrics_row(1, 5.0, tokens_per_rank_max=600 + i)] for i, name in enumerate("abcde")}
        figure = draw(plot_balance(runs))
        boxes = [t.get_window_extent() for t in figure.axes[0].texts if "median" in t.get_text()]
        boxes.sort(key=lambda box: box.y0)
        assert len(boxes) == 5
        assert all(below.y1 <= above.y0 for below, above in pairwise(boxes))

    def test_every_strategy_has_its_own_colour(self):
        names = [
            "static",
            "dynamic",
            "redistribute",
            "halo",
            "repack",
            "repack+parents",
            "joint",
            "mine",
            "yours",
        ]
        lines = draw(plot_balance({name: [metrics_row(1, 5.0)] for name in names})).axes[0].lines
        assert len({line.get_color() for line in lines[: len(names)]}) == len(names)


def test_importing_and_drawing_leave_pyplot_alone():
    code = (
        "import sys, layerwise.report.plots as p\n"
        "assert 'matplotlib' not in sys.modules and 'torch' not in sys.modules\n"
        "from tests.runs import metrics_row\n"
        "p.plot_balance({'dynamic': [metrics_row(1, 5.0)]}).canvas.draw()\n"
        "assert 'matplotlib.pyplot' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[1])


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UnsupportedError, match=r"layerwise\[train\]"):
        plot_balance({"dynamic": [metrics_row(1, 5.0)]})


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        *[(0, "0 B"), (0.4, "<1 B"), (1, "1 B"), (999, "999 B"), (1000, "1 kB"), (1234, "1.2 kB")],
        *[(999_600, "1.0 MB"), (12_345_678, "12.3 MB"), (123_456_789, "123 MB"), (5e9, "5 GB")],
        (7.25e15, "7,250 TB"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(("seconds", "text"), [(0.00034, "340 us"), (0.0121, "12.1 ms"), (4.214, "4.21 s")])
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_means_count_steps_without_the_kind_as_zero():
    rows = [metrics_row(1, 5.0, slow_bytes=6), metrics_row(2, 5.0, exchange={})]
    assert mean_of(rows, "exchange", "sliding_attention", "slow_bytes") == 3


def test_groups_are_summed_in_order_of_degree():
    rows = [metrics_row(1, 5.0, parents={"8": 2, "16": 1}), metrics_row(2, 5.0, parents={"8": 1, "2": 0})]
    assert list(by_degree(rows, "parents").items()) == [(8, 3), (16, 1)]
