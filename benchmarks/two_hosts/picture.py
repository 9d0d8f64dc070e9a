"""The results as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.two_hosts.figures import Measured, summarize
from benchmarks.two_hosts.records import Results
from benchmarks.two_hosts.workload import RANKS_PER_HOST
from layerwise.labels import kind_label
from layerwise.report.plots import INK, MUTED, PAPER, colours_of, new_figure, style_axes
from layerwise.runtime import MOVES
from layerwise.spec import FULL, SLIDING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KIND_COLOURS = {FULL: "#a8401a", SLIDING: "#2a73b3", MOVES: "#b8912b"}


def plot_results(results: Results) -> Figure:
    """Step seconds measured and predicted, exchange seconds by layer kind, and bytes between hosts, by strategy."""
    measured = summarize(results)
    fig = new_figure(12.0, 4.2)
    panels = fig.subplots(1, 3, sharey=True, gridspec_kw={"width_ratios": [1.3, 1, 0.8]})
    for ax, draw in zip(panels, (_draw_steps, _draw_exchanges, _draw_bytes), strict=True):
        draw(ax, measured)
        style_axes(ax)
        ax.grid(False, axis="y")
    panels[0].set_yticks(range(len(measured)), list(measured))
    panels[0].invert_yaxis()
    settings = results.settings
    fig.suptitle(
        f"{settings.num_hosts} network namespaces x {RANKS_PER_HOST} gloo ranks, links {settings.ratio:g}:1; measured,"
        f" with exchanges real, compute paced; medians of {settings.repetitions} repetitions",
        fontsize=10,
        color=MUTED,
        x=0.01,
        ha="left",
    )
    return fig


def _draw_steps(ax: Axes, measured: dict[str, Measured]) -> None:
    colours = colours_of({row.variant.strategy: [] for row in measured.values()})
    for y, row in enumerate(measured.values()):
        ax.barh(y, row.step_s, 0.62, color=colours[row.variant.strategy])
        ax.plot([row.seconds.min(), row.seconds.max()], [y, y], color=INK, linewidth=1.2)
        ax.plot(row.predicted_s, y, "D", color=PAPER, markeredgecolor=INK, markersize=5)
        ax.annotate(f"{row.step_s:.2f} s", (0, y), (6, 0), textcoords="offset points", va="center", color=PAPER)
    ax.plot([], [], "D", color=PAPER, markeredgecolor=INK, markersize=5, label="predicted")
    ax.plot([], [], color=INK, linewidth=1.2, label="fastest to slowest")
    ax.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=2)
    ax.set_title("Seconds of a step", loc="left", fontsize=11, color=INK, fontweight="bold")


def _draw_exchanges(ax: Axes, measured: dict[str, Measured]) -> None:
    left = np.zeros(len(measured))
    for kind, colour in KIND_COLOURS.items():
        seconds = np.array([row.transfer_s(kind)[0] for row in measured.values()])
        if seconds.any():
            ax.barh(
                range(len(measured)),
                seconds,
                0.62,
                left=left,
                color=colour,
                label=kind if kind == MOVES else kind_label(kind),
            )
        left += seconds
    ax.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=3)
    ax.set_title("in exchanges (slowest rank)", loc="left", fontsize=11, color=INK, fontweight="bold")


def _draw_bytes(ax: Axes, measured: dict[str, Measured]) -> None:
    megabytes = [row.counted_bytes / 1e6 for row in measured.values()]
    ax.barh(range(len(measured)), megabytes, 0.62, color=MUTED)
    for y, value in enumerate(megabytes):
        ax.annotate(f"{value:.1f}", (value, y), (4, 0), textcoords="offset points", va="center", color=INK, fontsize=9)
    ax.margins(x=0.2)
    ax.set_title("MB between hosts", loc="left", fontsize=11, color=INK, fontweight="bold")
