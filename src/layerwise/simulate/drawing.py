"""Ranks x time, and tokens per rank, as a matplotlib Figure for papers; `page` has the interactive one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layerwise.errors import SpecError
from layerwise.files import whole_file
from layerwise.report.plots import INK, MUTED, new_figure, style_axes
from layerwise.simulate.series import Window, merged_labels, timeline_window
from layerwise.simulate.step import Simulation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
MAX_NODE_LINES = 20  # more would hide the bars


def draw_timelines(simulations: Sequence[Simulation]) -> Figure:
    """One row per simulation, on one scale of time: what ranks do in a window, and the tokens they hold."""
    windows = [timeline_window(simulation) for simulation in simulations]
    labels = merged_labels(windows)
    figure = new_figure(11.0, 0.9 + 3.0 * len(windows))
    panels = figure.subplots(len(windows), 2, sharex="col", sharey="row", squeeze=False, width_ratios=[5, 1])
    for (time, tokens), window in zip(panels, windows, strict=True):
        _draw_events(time, window)
        tokens.barh(np.arange(len(window.tokens)), window.tokens, height=0.86, color=MUTED)
        time.set_title(window.title, loc="left", fontsize=10.5, color=INK)
        time.set_ylabel("rank")
        for ax in (time, tokens):
            style_axes(ax)
            ax.grid(visible=False)
            _draw_nodes(ax, window)
    panels[0, 0].set_xlim(0, max(window.end_ms for window in windows))
    panels[-1, 0].set_xlabel("ms")
    panels[-1, 1].set_xlabel("tokens")
    panels[-1, 1].xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    panels[-1, 1].locator_params(axis="x", nbins=2)
    _legend(figure, labels)
    return figure


def check_suffix(path: Path, option: str) -> None:
    """Raise SpecError where matplotlib writes no such format, UnsupportedError where it is missing."""
    legal = sorted(new_figure(1.0, 1.0).canvas.get_supported_filetypes())
    if path.suffix.lower().removeprefix(".") not in legal:
        raise SpecError(f"{option} {path}: no format for pictures; legal suffixes: {', '.join(legal)}")


def write_drawing(path: Path, simulations: Sequence[Simulation], option: str) -> None:
    """Write the picture; the suffix says which format. Raises SpecError where it cannot be written."""
    figure = draw_timelines(simulations)
    with whole_file(path, option) as part:
        figure.savefig(part, dpi=DPI)


def _draw_events(ax: Axes, window: Window) -> None:
    """One collection per label: a bar of its own for each of thousands of events would take minutes."""
    from matplotlib.collections import PolyCollection

    middle, half = window.rank + (window.every - 1) / 2, 0.43 * window.every  # a shown rank stands for those after it
    left, right = window.start_ms, window.start_ms + window.duration_ms
    low, high = middle - half, middle + half
    corners = np.stack([left, low, left, high, right, high, right, low], axis=1).reshape(-1, 4, 2)
    for index, colour in enumerate(window.colours):
        ax.add_collection(PolyCollection(corners[window.label == index], facecolors=colour, linewidths=0))


def _draw_nodes(ax: Axes, window: Window) -> None:
    num_ranks = len(window.tokens)
    ax.set_ylim(num_ranks - 0.5, -0.5)
    firsts = range(window.ranks_per_node, num_ranks, window.ranks_per_node)
    for first in firsts if len(firsts) < MAX_NODE_LINES else ():
        ax.axhline(first - 0.5, color=INK, linewidth=0.6)


def _legend(figure: Figure, labels: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in labels.items()]
    figure.legend(handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=9.5, labelcolor=INK)
