"""One HTML file of an evaluation: tables, interactive pictures, the workload; opens anywhere, without a network."""

from __future__ import annotations

import html
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import yaml

from layerwise.evaluate.pictures import picture_gains, picture_gaps, picture_sensitivity, picture_tokens
from layerwise.evaluate.sensitivity import (
    REPACKING,
    VariantResult,
    sensitivity_cells,
    sensitivity_columns,
    verdict,
)
from layerwise.evaluate.steps import StepResult
from layerwise.evaluate.table import COLUMNS, IDEAL, Evaluation, cells, headings
from layerwise.evaluate.workload import Workload
from layerwise.report.html import html_page, html_table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure


def build_page(
    workload: Workload, steps: Sequence[StepResult], evaluation: Evaluation, sensitivity: Sequence[VariantResult]
) -> str:
    """The page; the picture of gaps shows the wide steps where there are any.

    Needs plotly; `require_plotly` says so in time.
    """
    wide = [step for step in steps if step.wide] or steps
    figures = [
        (picture_gains(steps), _GAINS_CAPTION),
        (picture_tokens(steps), _TOKENS_CAPTION),
        (picture_gaps(wide), _GAPS_CAPTION),
    ]
    if sensitivity:
        figures.append((picture_sensitivity(sensitivity), _SENSITIVITY_CAPTION))
    body = _BODY.format(
        headline=html.escape(_headline(evaluation)),
        tables="\n".join(_tables(evaluation, sensitivity)),
        figures="\n".join(_figures(figures)),
        workload=html.escape(yaml.safe_dump(workload.model_dump(), sort_keys=False)),
    )
    return html_page(f"Strategies on the workload {workload.name!r}", body, _NARROW_STYLE)


def _headline(evaluation: Evaluation) -> str:
    title, rows = headings(evaluation)[0]
    best = max((name for name in rows if name in REPACKING), key=lambda name: rows[name].saving_pct, default=IDEAL)
    text = f"{title}: {best} saves {rows[best].saving_pct:.2f}% of the time"
    return text + ("." if best == IDEAL else f", the ideal {rows[IDEAL].saving_pct:.2f}%.")


def _tables(evaluation: Evaluation, sensitivity: Sequence[VariantResult]) -> Iterator[str]:
    for title, rows in headings(evaluation):
        yield _table(title, ["strategy", *COLUMNS], [[name, *cells(figures)] for name, figures in rows.items()])
    if sensitivity:
        title = f"Saving in %, with one setting changed. {verdict(sensitivity)}"
        yield _table(title, sensitivity_columns(sensitivity), sensitivity_cells(sensitivity))


def _table(title: str, columns: list[str], rows: list[list[str]]) -> str:
    return f"<h2>{html.escape(title)}</h2>{html_table(columns, rows)}"


def _figures(figures: Sequence[tuple[Figure, str]]) -> Iterator[str]:
    """The first figure brings plotly's script along, for all of them."""
    for index, (figure, caption) in enumerate(figures):
        text = figure.to_html(
            full_html=False, include_plotlyjs=index == 0, div_id=f"picture-{index}", config={"displaylogo": False}
        )
        yield f"<div class='picture'>{text}</div><p class='note'>{html.escape(caption)}</p>"


_GAINS_CAPTION = (
    "Full dots are steps where the baseline has parents wider than a node; in the others there is little to repack. "
    "Click a name to hide its dots, drag to zoom."
)
_TOKENS_CAPTION = "Every layer waits for the fullest rank; the step shown is the one where repacking saves the most."
_GAPS_CAPTION = (
    "Mean over the steps with wide parents. Imbalance is compute of the rank that all wait for, above an even share; "
    "exchange is its all-to-alls; exposed traffic is what parameters and experts need and compute does not hide."
)
_SENSITIVITY_CAPTION = "One setting changed at a time, on the steps with the most attention work."

_NARROW_STYLE = """
th, td { padding: .42rem .55rem; }
th:first-child { text-align: left; }
.picture { background: #fff; border: 1px solid var(--line); border-radius: 10px; padding: .5rem; margin-top: 1.5rem; }
"""

_BODY = """<p class="lead">{headline}</p>
{tables}
<p class="note">All seconds are predictions of the cost model. Savings are those of the baseline's mean seconds; the
interval is a paired bootstrap over steps. The ideal spreads every layer's work evenly and needs no communication.</p>
<h2>Pictures</h2>
{figures}
<h2>Workload</h2>
<pre>{workload}</pre>"""
