"""One HTML file that tells what a few runs did: table, pictures, settings; no network, no scripts."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from layerwise.errors import DataError
from layerwise.files import write_whole
from layerwise.labels import counted, format_bytes, format_seconds, kind_label
from layerwise.plan import StepPlan
from layerwise.report.html import html_page
from layerwise.report.plots import plot_balance, plot_link_bytes, plot_losses, plot_repacking
from layerwise.report.profile import StepProfile, plot_profile, profile_table
from layerwise.report.rows import Runs, balance, by_degree, column, mean_of
from layerwise.spec import FULL

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STEP_FIELDS = frozenset(
    {"step", "loss", "num_tokens", "step_s", "mfu", "plan_s", "predicted_s", "microbatches", "exchange", "parents"}
    | {"children", "fallbacks", "tokens_per_rank_max", "tokens_per_rank_mean", "exchange_wait_s"}
)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What one strategy's run left: `rows` as in metrics.jsonl, one per step, and what divides them.

    `num_layers` counts the layers of each kind, `profile` is of a few steps. Raises DataError where steps or fields
    are missing.
    """

    strategy: str
    rows: Sequence[Mapping[str, Any]]
    num_ranks: int
    num_layers: Mapping[str, int]
    profile: StepProfile | None = None

    def __post_init__(self) -> None:
        if not self.rows:
            raise DataError(f"strategy {self.strategy!r}: the run has no steps to report")
        for row in self.rows:
            missing = sorted(STEP_FIELDS - set(row))
            if missing:
                raise DataError(f"strategy {self.strategy!r}: a metrics row lacks {missing}; it has {sorted(row)}")


def strategy_rows(runs: Sequence[RunRecord]) -> list[dict[str, str]]:
    """The summary table, one row per strategy, ready to print; every row has the same keys, the headings.

    Times, rates and balance are medians over steps, bytes and calls means, groups sums over the run.
    """
    return [_strategy_row(run, _kinds(runs)) for run in runs]


def headline(runs: Sequence[RunRecord]) -> str:
    """What the first and the last run show, in one sentence."""
    first, last = runs[0], runs[-1]
    kinds = [kind for kind in _kinds(runs) if kind in first.num_layers]
    sparse = [kind for kind in kinds if kind != FULL]
    subject = "Sparse layers" if sparse else "Attention layers"
    moved = [format_bytes(_slow_bytes(run, sparse or kinds)) for run in (first, last)]
    if len(runs) == 1:
        change = (
            f"from {first.rows[0]['loss']:.4f} to {first.rows[-1]['loss']:.4f} in {counted(len(first.rows), 'step')}"
        )
        return f"{subject} moved {moved[0]} over the slow link per step with {first.strategy}; the loss went {change}."
    return (
        f"{subject} moved {moved[0]} over the slow link per step with {first.strategy} and {moved[1]} with "
        f"{last.strategy}; {_agreement(first, last)}."
    )


def write_report(
    path: str | Path,
    *,
    title: str,
    runs: Sequence[RunRecord],
    plans: tuple[StepPlan, StepPlan] | None = None,
    config_text: str,
) -> None:
    """Write the report; `plans` are one step planned without and with repacking, `config_text` the settings.

    The file is replaced as a whole or not at all. Raises UnsupportedError without matplotlib, and
    SpecError where the file cannot be written.
    """
    by_strategy: Runs = {run.strategy: run.rows for run in runs}
    if len(by_strategy) < len(runs):
        raise DataError(f"strategies must differ to be compared; got {[run.strategy for run in runs]}")
    figures = [] if plans is None else [_figure("repacking", plot_repacking(*plans), _REPACKING_CAPTION)]
    figures += [
        _figure("bytes", plot_link_bytes(by_strategy), _BYTES_CAPTION),
        _figure("loss", plot_losses(by_strategy), _LOSS_CAPTION),
        _figure("balance", plot_balance(by_strategy), _BALANCE_CAPTION),
    ]
    profiles = [_profile(run.strategy, run.profile) for run in runs if run.profile is not None]
    body = _BODY.format(
        headline=html.escape(headline(runs)),
        table=_table(strategy_rows(runs)),
        figures="\n".join(figures),
        profiles="\n".join(profiles),
        config=html.escape(config_text),
    )
    write_whole(Path(path), html_page(title, body), "report")


def _strategy_row(run: RunRecord, kinds: list[str]) -> dict[str, str]:
    rows = run.rows
    row = {
        "strategy": run.strategy,
        "steps": str(len(rows)),
        "loss, first step": f"{rows[0]['loss']:.6f}",
        "loss, last step": f"{rows[-1]['loss']:.6f}",
        "tokens/s on this machine": f"{np.median(column(rows, 'num_tokens') / column(rows, 'step_s')):,.0f}",
        "step time on this machine": _median_time(run, "step_s"),
        "step time predicted for the cluster": _median_time(run, "predicted_s"),
        "planning time": _median_time(run, "plan_s"),
        "MFU on this machine": f"{np.median(column(rows, 'mfu')):.1%}",
        "waiting for exchanges, mean rank": _median_wait(rows),
        "tokens per rank, max/mean": f"{np.median(balance(rows)):.3f}",
    }
    for link in ("slow", "fast"):
        for kind in kinds:
            row[f"{link} link per step, {kind_label(kind)}"] = format_bytes(
                mean_of(rows, "exchange", kind, f"{link}_bytes")
            )
    for kind in filter(run.num_layers.__contains__, kinds):
        row[f"all-to-all calls per layer, {kind_label(kind)}"] = f"{_calls_per_layer(run, kind):.2f}"
    row["parents formed"] = _groups(by_degree(rows, "parents"))
    row["children formed"] = _groups(by_degree(rows, "children"))
    row["parents left wide"] = f"{sum(r['fallbacks'] for r in rows):,}"
    return row


def _kinds(runs: Sequence[RunRecord]) -> list[str]:
    """Layer kinds, and what else was exchanged: routed rows of experts, hidden states that moved."""
    return list(dict.fromkeys(kind for run in runs for row in run.rows for kind in row["exchange"]))


def _slow_bytes(run: RunRecord, kinds: list[str]) -> float:
    return sum(mean_of(run.rows, "exchange", kind, "slow_bytes") for kind in kinds)


def _median_time(run: RunRecord, key: str) -> str:
    return format_seconds(float(np.median(column(run.rows, key))))


def _median_wait(rows: Sequence[Mapping[str, Any]]) -> str:
    return format_seconds(float(np.median([sum(row["exchange_wait_s"].values()) for row in rows])))


def _calls_per_layer(run: RunRecord, kind: str) -> float:
    """Per micro-batch and rank: 4 where every rank takes part (two forward, two backward)."""
    layers = run.num_layers[kind] * run.num_ranks
    calls = mean_of(run.rows, "exchange", kind, "calls")
    return calls / (layers * mean_of(run.rows, "microbatches"))


def _groups(counts: Mapping[int, int]) -> str:
    return ", ".join(f"{count:,} x SP{degree}" for degree, count in counts.items()) or "none"


def _agreement(first: RunRecord, last: RunRecord) -> str:
    losses = {row["step"]: row["loss"] for row in first.rows}
    gaps = [abs(row["loss"] - losses[row["step"]]) for row in last.rows if row["step"] in losses]
    if not gaps:
        return "they have no step in common"
    if max(gaps) == 0:
        return f"the losses of {counted(len(gaps), 'step')} are exactly equal"
    return f"the losses of {counted(len(gaps), 'step')} differ by at most {max(gaps):.1e}"


def _table(rows: list[dict[str, str]]) -> str:
    """Strategies are the columns: a few of them, and many numbers."""
    lines = []
    for index, heading in enumerate(rows[0]):
        tag = "td" if index else "th"
        cells = "".join(f"<{tag}>{html.escape(row[heading])}</{tag}>" for row in rows)
        lines.append(f"<tr><th scope='row'>{html.escape(heading)}</th>{cells}</tr>")
    return f"<table>{''.join(lines)}</table>"


def _profile(strategy: str, profile: StepProfile) -> str:
    figure = _figure(f"profile-{strategy}", plot_profile(profile), _PROFILE_CAPTION.format(steps=profile.num_steps))
    return f"<h2>Where the time of a step went, {html.escape(strategy)}</h2>{figure}{profile_table(profile)}"


def _figure(name: str, figure: Figure, caption: str) -> str:
    text = html.escape(caption)
    return f"<figure>{_svg(name, figure)}<figcaption>{text}</figcaption></figure>"


def _svg(name: str, figure: Figure) -> str:
    """The figure as an inline <svg> whose ids start with `name`, so that pictures on one page do not mix."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "path", "svg.hashsalt": name}):
        figure.savefig(buffer, format="svg", metadata={"Creator": None, "Date": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    return re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", text)


_REPACKING_CAPTION = (
    "One step, one bar per rank, one segment per sample: orange samples lie on several nodes, blue ones "
    "inside one, and bars of equal height mean that every rank holds equally many tokens."
)
_BYTES_CAPTION = (
    "What the all-to-alls of one step put on each link, forward and backward, summed over ranks: layers "
    "whose samples stay inside a node leave the slow link alone."
)
_LOSS_CAPTION = (
    "The loss of the same steps under each strategy, on top of one another, and how far apart they are: a "
    "layout changes where the work is done, not what is learned."
)
_BALANCE_CAPTION = (
    "Every layer waits for the rank with the most tokens: 1.0 means that no rank waits, 1.2 that the "
    "fullest holds a fifth more than the mean."
)

_PROFILE_CAPTION = (
    "Mean of {steps} profiled steps, forward and backward. Exchanges hold packing, unpacking and waiting, also for "
    "ranks that come late; MoE is router and experts; other is all the rest, such as projections, norms, the loss, "
    "gradient sums and waiting for the plan. Profiling itself slows steps down."
)

_BODY = """<p class="lead">{headline}</p>
<div class="scroll">{table}</div>
<p class="note">
Times, rates and balance are medians over steps; bytes are means per step, summed over ranks; calls are
means per layer, micro-batch and rank, forward and backward; groups are counted over the whole run. The
predicted step time is the cost model's, for the cluster in the settings below, and does not describe this
machine.</p>
<h2>Pictures</h2>
{figures}
{profiles}
<h2>Settings</h2>
<details open><summary class="note">every option, with defaults filled in</summary>
<pre>{config}</pre></details>"""
