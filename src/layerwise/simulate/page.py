"""One HTML file of simulations: a table for each strategy and an interactive picture; opens without a network."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

import yaml

from layerwise.report.html import html_page, html_table
from layerwise.report.plots import INK, MUTED, PAPER
from layerwise.simulate.series import Window, merged_labels, timeline_window
from layerwise.simulate.step import Simulation
from layerwise.simulate.table import columns, headline, kind_cells, memory_line, overlap_line

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ROW_PX = 7


def build_page(simulations: Sequence[Simulation]) -> str:
    """The page; all simulations are of one cluster and one model."""
    cost = simulations[0].cost
    settings = {"cluster": cost.cluster.model_dump(mode="json"), "model": cost.model.model_dump(mode="json")}
    picture = picture_timelines(simulations).to_html(
        full_html=False, include_plotlyjs=True, div_id="timelines", config={"displaylogo": False}
    )
    body = _BODY.format(
        tables="\n".join(_table(simulation) for simulation in simulations),
        picture=picture,
        settings=html.escape(yaml.safe_dump(settings, sort_keys=False)),
    )
    title = f"{cost.model.name} on {cost.cluster.name}: one step, simulated"
    return html_page(title, body, "th, td { padding: .42rem .7rem; }")


def picture_timelines(simulations: Sequence[Simulation]) -> Figure:
    """One row per simulation, on one scale of time: what ranks do in a window, and the tokens they hold."""
    from plotly.subplots import make_subplots

    windows = [timeline_window(simulation) for simulation in simulations]
    figure = make_subplots(
        len(windows),
        2,
        column_widths=[0.84, 0.16],
        horizontal_spacing=0.02,
        vertical_spacing=0.12 / len(windows),
        shared_xaxes="columns",
        shared_yaxes="rows",
        subplot_titles=[text for window in windows for text in (window.title, "")],
    )
    labels = merged_labels(windows)
    for row, window in enumerate(windows, start=1):
        _add_events(figure, window, labels, row)
        figure.add_bar(
            x=window.tokens,
            y=list(range(len(window.tokens))),
            orientation="h",
            marker={"color": MUTED},
            hovertemplate="rank %{y}: %{x:,} tokens<extra></extra>",
            showlegend=False,
            row=row,
            col=2,
        )
    figure.update_annotations(x=0, xanchor="left")
    figure.update_xaxes(title="ms", row=len(windows), col=1)
    figure.update_xaxes(title="tokens", row=len(windows), col=2)
    figure.update_yaxes(title="rank", autorange="reversed", col=1)
    shown_ranks = len(windows[0].tokens) // windows[0].every
    return _styled(figure, 160 + len(windows) * (90 + ROW_PX * max(shown_ranks, 16)))


def _add_events(figure: Figure, window: Window, labels: dict[str, str], row: int) -> None:
    """One trace per label, so that a click in the legend hides it; each label is in the legend once."""
    named = {trace.legendgroup for trace in figure.data}
    for name in (name for name in labels if name in window.labels):
        of = window.label == window.labels.index(name)
        figure.add_bar(
            x=window.duration_ms[of],
            base=window.start_ms[of],
            y=window.rank[of],
            width=window.every,
            orientation="h",
            name=name,
            legendgroup=name,
            showlegend=name not in named,
            marker={"color": labels[name], "line": {"width": 0}},
            hovertext=[text for text, shown in zip(window.texts, of, strict=True) if shown],
            hovertemplate="rank %{y}<br>%{hovertext}<extra></extra>",
            row=row,
            col=1,
        )


def _styled(figure: Figure, height_px: int) -> Figure:
    return figure.update_layout(
        height=height_px,
        barmode="overlay",
        bargap=0.1,
        paper_bgcolor=PAPER,
        plot_bgcolor=PAPER,
        font={"color": INK, "family": "system-ui, sans-serif", "size": 13},
        margin={"l": 50, "r": 40, "t": 90, "b": 50},
        modebar={"orientation": "v"},
        legend={"orientation": "h", "y": 1.0, "yref": "container", "yanchor": "top", "x": 0},
    )


def _table(simulation: Simulation) -> str:
    names = [name.replace("-\n", "").strip() for name in columns(simulation)]
    table = html_table(names, [kind_cells(simulation, kind) for kind in simulation.timeline.kinds])
    warning = simulation.memory_warning and f"Warning: {simulation.memory_warning}"
    notes = [overlap_line(simulation), memory_line(simulation), warning]
    text = "".join(f"<p class='note'>{html.escape(note)}</p>" for note in notes if note)
    return f"<h2>{html.escape(headline(simulation))}</h2>{table}{text}"


_BODY = """{tables}
<p class="note">All seconds are predictions of the cost model: means over ranks, but for the highest compute of a rank.
Bytes are what all ranks send, forward and backward. Tokens, bytes and calls are exact.</p>
<h2>What ranks do</h2>
<div class="scroll">{picture}</div>
<p class="note">Of the micro-batch with the longest sample: the last layers forward, the LM head, and the
same layers backward; all layers of a kind take equally long. Drag to zoom, click a name to hide it.</p>
<h2>Settings</h2>
<pre>{settings}</pre>"""
