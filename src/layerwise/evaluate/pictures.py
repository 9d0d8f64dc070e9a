"""Interactive pictures of an evaluation; each function takes results and returns a plotly Figure.

Plotly is imported when a picture is drawn. `drawings` has the same pictures as files for papers.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING

from layerwise.errors import UnsupportedError
from layerwise.evaluate.sensitivity import VariantResult
from layerwise.evaluate.series import PART_COLOURS, by_axis, gain_series, gap_bars, strategy_colours, token_panels
from layerwise.evaluate.steps import StepResult
from layerwise.labels import counted
from layerwise.report.plots import FAINT, INK, MUTED, PAPER

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def require_plotly() -> None:
    """Raise UnsupportedError where interactive pictures cannot be drawn."""
    if find_spec("plotly") is None:
        raise UnsupportedError("interactive pictures need the package `plotly`: pip install 'layerwise[report]'")


def picture_gains(steps: Sequence[StepResult]) -> Figure:
    """What each strategy saves in each step; full dots are steps with wide parents."""
    figure = _subplots(1, 1)
    for name, series in gain_series(steps).items():
        texts = [
            f"step {index}: {counted(step.num_samples, 'sample')}, longest {counted(step.longest_tokens, 'token')}"
            for index, step in enumerate(steps)
        ]
        symbols = ["circle" if step.wide else "circle-open" for step in steps]
        figure.add_scatter(
            x=list(range(len(steps))),
            y=series.tolist(),
            name=name,
            mode="markers",
            text=texts,
            hovertemplate="%{text}<br>saves %{y:.2f}%",
            marker={"color": strategy_colours(steps)[name], "symbol": symbols, "size": 8},
        )
    figure.update_xaxes(title="step")
    figure.update_yaxes(title="saving, % of the step")
    return _styled(figure, 420)


def picture_tokens(steps: Sequence[StepResult]) -> Figure:
    """Tokens per rank before and after, in the step with the highest saving; micro-batches are stacked."""
    panels = token_panels(steps)
    figure = _subplots(len(panels), 1, titles=[panel.title for panel in panels], shared_y=True)
    for row, panel in enumerate(panels, start=1):
        for index, tokens in enumerate(panel.tokens):
            figure.add_bar(
                x=list(range(len(tokens))),
                y=tokens.tolist(),
                name=f"micro-batch {index}",
                marker={"color": strategy_colours(steps)[panel.strategy], "opacity": 1 / (1 + 0.6 * index)},
                hovertemplate="rank %{x}: %{y:,} tokens",
                showlegend=False,
                row=row,
                col=1,
            )
    figure.update_layout(barmode="stack", bargap=0.15)
    figure.update_yaxes(title="tokens")
    figure.update_xaxes(title="rank", row=len(panels), col=1)
    return _styled(figure, 240 * len(panels))


def picture_gaps(steps: Sequence[StepResult]) -> Figure:
    """Mean seconds above the ideal, by layer kind and strategy."""
    bars = gap_bars(steps)
    kinds = list(dict.fromkeys(bar.kind for bar in bars))
    figure = _subplots(1, len(kinds), titles=kinds, shared_y=True)
    for column, kind in enumerate(kinds, start=1):
        for part, colour in PART_COLOURS.items():
            of_kind = [bar for bar in bars if bar.kind == kind]
            figure.add_bar(
                x=[bar.strategy for bar in of_kind],
                y=[bar.parts_s[part] for bar in of_kind],
                name=part,
                legendgroup=part,
                showlegend=column == 1,
                marker={"color": colour},
                hovertemplate="%{x}: %{y:.3f} s",
                row=1,
                col=column,
            )
    figure.update_layout(barmode="relative")
    figure.update_yaxes(title="seconds above the ideal", row=1, col=1)
    return _styled(figure, 440)


def picture_sensitivity(results: Sequence[VariantResult]) -> Figure:
    """Saving of each strategy along each axis."""
    axes = by_axis(results)
    figure = _subplots(-(-len(axes) // 2), 2, titles=list(axes))
    for index, panel in enumerate(axes.values()):
        for name, series in panel.savings_pct.items():
            figure.add_scatter(
                x=panel.values,
                y=series,
                name=name,
                legendgroup=name,
                showlegend=index == 0,
                mode="lines+markers",
                line={"color": panel.colours[name]},
                hovertemplate="%{x}: %{y:.2f}%",
                row=index // 2 + 1,
                col=index % 2 + 1,
            )
    figure.update_xaxes(type="category")
    figure.update_yaxes(title="saving, %", col=1)
    return _styled(figure, 260 * -(-len(axes) // 2))


def _subplots(rows: int, columns: int, titles: Sequence[str] = (), shared_y: bool = False) -> Figure:
    from plotly.subplots import make_subplots

    sharing = ("all" if rows > 1 else True) if shared_y else False
    gap = 0.28 / rows if rows > 1 else 0
    return make_subplots(rows, columns, subplot_titles=titles or None, shared_yaxes=sharing, vertical_spacing=gap)


def _styled(figure: Figure, height_px: int) -> Figure:
    figure.update_layout(
        height=height_px + 60,
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        font={"color": INK, "family": "system-ui, sans-serif", "size": 13},
        margin={"l": 60, "r": 20, "t": 70, "b": 50},
        legend={"orientation": "h", "yref": "container", "y": 0.99, "yanchor": "top", "x": 0},
    )
    figure.update_annotations(font_size=13, font_color=MUTED)
    figure.update_xaxes(gridcolor=FAINT, zeroline=False)
    figure.update_yaxes(gridcolor=FAINT, zerolinecolor=MUTED)
    return figure
