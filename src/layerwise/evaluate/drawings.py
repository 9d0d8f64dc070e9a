"""The pictures of an evaluation as matplotlib Figures, for papers; `pictures` has the interactive ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from layerwise.evaluate.sensitivity import VariantResult
from layerwise.evaluate.series import PART_COLOURS, by_axis, gain_series, gap_bars, strategy_colours, token_panels
from layerwise.evaluate.steps import StepResult
from layerwise.files import whole_file
from layerwise.report.plots import INK, MUTED, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 200
LONG_LABEL = 8  # longer labels would run into one another


def require_matplotlib() -> None:
    """Raise UnsupportedError where pictures cannot be drawn."""
    new_figure(1.0, 1.0)


def draw_gains(steps: Sequence[StepResult]) -> Figure:
    """What each strategy saves in each step; full dots are steps with wide parents."""
    figure = new_figure(10.0, 4.2)
    ax = figure.subplots()
    index, wide = np.arange(len(steps)), np.array([step.wide for step in steps])
    for name, series in gain_series(steps).items():
        colour = strategy_colours(steps)[name]
        ax.plot(index[wide], series[wide], "o", color=colour, markersize=4.5, label=name)
        ax.plot(index[~wide], series[~wide], "o", color=colour, markersize=3.5, markerfacecolor="none", alpha=0.6)
    ax.axhline(0, color=MUTED, linewidth=1)
    ax.set_xlabel("step")
    ax.set_ylabel("saving, % of the step")
    _finish(figure, [ax])
    return figure


def draw_tokens(steps: Sequence[StepResult]) -> Figure:
    """Tokens per rank before and after, in the step with the highest saving; micro-batches are stacked."""
    panels = token_panels(steps)
    figure = new_figure(10.0, 1.0 + 1.7 * len(panels))
    axes = figure.subplots(len(panels), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        bottom = np.zeros(panel.tokens.shape[1])
        for index, tokens in enumerate(panel.tokens):
            colour = strategy_colours(steps)[panel.strategy]
            ax.bar(np.arange(len(tokens)), tokens, bottom=bottom, color=colour, alpha=1 / (1 + 0.6 * index))
            bottom += tokens
        ax.set_title(panel.title, loc="left", fontsize=10.5, color=INK)
        ax.margins(x=0.01)
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes[-1].set_xlabel("rank")
    _finish(figure, axes, legend=False)
    return figure


def draw_gaps(steps: Sequence[StepResult]) -> Figure:
    """Mean seconds above the ideal, by layer kind and strategy."""
    bars = gap_bars(steps)
    kinds = list(dict.fromkeys(bar.kind for bar in bars))
    figure = new_figure(10.0, 4.6)
    axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for ax, kind in zip(axes, kinds, strict=True):
        for index, bar in enumerate(bar for bar in bars if bar.kind == kind):
            up, down = 0.0, 0.0
            for part, colour in PART_COLOURS.items():
                height = bar.parts_s[part]
                ax.bar(index, height, bottom=up if height >= 0 else down, color=colour, label=part)
                up, down = up + max(height, 0), down + min(height, 0)
        names = [bar.strategy for bar in bars if bar.kind == kind]
        ax.set_xticks(range(len(names)), names, rotation=40, ha="right")
        ax.set_title(kind, loc="left", fontsize=10.5, color=INK)
    axes[0].set_ylabel("seconds above the ideal")
    _finish(figure, axes)
    return figure


def draw_sensitivity(results: Sequence[VariantResult]) -> Figure:
    """Saving of each strategy along each axis."""
    panels = by_axis(results)
    rows = -(-len(panels) // 2)
    figure = new_figure(10.0, 0.8 + 2.4 * rows)
    axes = figure.subplots(rows, 2, squeeze=False).ravel()
    for ax, (axis, panel) in zip(axes, panels.items(), strict=False):
        for name, series in panel.savings_pct.items():
            ax.plot(range(len(series)), series, "o-", color=panel.colours[name], markersize=4, label=name)
        slope = {"rotation": 25, "ha": "right"} if max(map(len, panel.values)) > LONG_LABEL else {}
        ax.set_xticks(range(len(panel.values)), panel.values, **slope)
        ax.set_title(f"saving in %, by {axis}", loc="left", fontsize=10.5, color=INK)
    for ax in axes[len(panels) :]:
        ax.set_visible(False)
    _finish(figure, axes[: len(panels)])
    return figure


def _finish(figure: Figure, axes: Iterable[Axes], legend: bool = True) -> None:
    for ax in axes:
        style_axes(ax)
    if legend:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        first = dict(zip(reversed(labels), reversed(handles), strict=True))
        names = list(dict.fromkeys(labels))
        figure.legend([first[name] for name in names], names, loc="outside upper left", ncols=8, frameon=False)


def write_drawings(
    folder: Path, steps: Sequence[StepResult], sensitivity: Sequence[VariantResult], option: str
) -> list[Path]:
    """Write gains.png, tokens.png, gaps.png and, given results, sensitivity.png; returns their paths.

    Raises SpecError, naming the command line's `option`, where a file cannot be written.
    """
    wide = [step for step in steps if step.wide] or steps
    figures = {"gains": draw_gains(steps), "tokens": draw_tokens(steps), "gaps": draw_gaps(wide)}
    if sensitivity:
        figures["sensitivity"] = draw_sensitivity(sensitivity)
    paths = []
    for name, figure in figures.items():
        path = folder / f"{name}.png"
        with whole_file(path, option) as part:
            figure.savefig(part, dpi=DPI)
        paths.append(path)
    return paths
