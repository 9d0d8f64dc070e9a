"""Pictures of plans and runs. Every function takes plain rows or plans and returns a matplotlib Figure.

A run is a strategy name and its metrics rows, one mapping per optimizer step as in metrics.jsonl. Matplotlib
is imported when a picture is drawn, and its global state (pyplot, rcParams) is left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from layerwise.errors import UnsupportedError
from layerwise.labels import format_bytes, kind_label
from layerwise.plan import Ints, MicrobatchPlan, StepPlan
from layerwise.report.rows import Rows, Runs, balance, column, mean_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DASHED = (0, (4, 3))
INK, MUTED, FAINT, PAPER = "#1c2733", "#5f6c7b", "#e3e8ee", "#ffffff"
_STRATEGY_COLOURS = {
    "static": "#8a94a0",
    "dynamic": "#e07b39",
    "redistribute": "#b8912b",
    "halo": "#8c6bb1",
    "repack": "#3fa796",
    "repack+parents": "#1f6fb2",
    "joint": "#b83b6e",
}
_OTHER_COLOURS = ("#444c56", "#6a9f2d", "#a0522d", "#0a7e8c")
_LOCAL_BLUES = (
    "#d3e4f3",
    "#a3c9e5",
    "#64a3d1",
    "#2a73b3",
    "#124a84",
)  # samples inside a node, narrow to wide
_WIDE_ORANGES = ("#f2a65a", "#d9682b", "#a8401a", "#6e2410")  # samples across nodes


def plot_repacking(before: StepPlan, after: StepPlan) -> Figure:
    """Tokens of every rank under two plans of a step, in each plan's micro-batch of the longest sample.

    One bar per rank, one segment per sample, coloured by how many ranks share the sample: blues stay inside
    a node, oranges cross nodes.
    """
    fig = new_figure(10.0, 6.4)
    panels = fig.subplots(2, 1, sharex=True, sharey=True)
    longest = int(np.argmax(before.lengths))
    shown: set[tuple[bool, int]] = set()
    for ax, plan in zip(panels, (before, after), strict=True):
        microbatch = next(m for m in plan.microbatches if longest in m.samples)
        shown |= _draw_shards(ax, plan, microbatch, longest)
        style_axes(ax)
        _draw_nodes(ax, plan)
        ax.set_ylabel("tokens on the rank")
        ax.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    top = panels[0].get_ylim()[1]
    panels[0].set_ylim(0, top * 1.06)
    panels[1].set_xlabel("rank")
    _sharing_legend(fig, shown, before.ranks_per_node)
    return fig


def plot_link_bytes(runs: Runs) -> Figure:
    """Mean bytes per step on the fast and the slow link, by layer kind and strategy; zeros are labelled."""
    fig = new_figure(10.0, 4.2)
    panels = fig.subplots(1, 2, sharey=True)
    for ax, link, title in zip(
        panels,
        ("fast_bytes", "slow_bytes"),
        ("Fast link: ranks of one node", "Slow link: between nodes"),
        strict=True,
    ):
        _draw_bars(ax, runs, link)
        style_axes(ax)
        ax.set_title(title, loc="left", fontsize=11, color=INK, fontweight="bold")
        ax.axhline(0, color=MUTED, linewidth=1)
        ax.yaxis.set_major_formatter(lambda value, _: format_bytes(value))
    highest = max((bar.get_height() for ax in panels for bar in ax.patches), default=0.0)
    panels[0].set_ylim(0, highest * 1.15 or 1.0)
    panels[0].set_ylabel("mean per step, all ranks")
    handles, labels = panels[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper left", ncols=4, frameon=False, fontsize=10, labelcolor=INK)
    return fig


def plot_losses(runs: Runs) -> Figure:
    """Loss of every strategy by step and, given several, their absolute difference to the first."""
    several = len(runs) > 1
    fig = new_figure(10.0, 5.4 if several else 3.6)
    heights = [2, 1] if several else [1]
    panels = fig.subplots(len(heights), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    colours = colours_of(runs)
    for index, (strategy, rows) in enumerate(runs.items()):
        # Equal curves hide one another, so each later one is thinner and the earlier ones show at its sides.
        width = 1.8 + 3.6 * (len(runs) - 1 - index) / max(len(runs) - 1, 1)
        steps, loss = column(rows, "step"), column(rows, "loss")
        panels[0].plot(
            steps, loss, color=colours[strategy], linewidth=width, label=strategy, alpha=0.9, **_marker(rows)
        )
    panels[0].set_ylabel("loss per token")
    panels[0].legend(frameon=False, fontsize=10, labelcolor=INK, loc="upper right")
    if several:
        _draw_differences(panels[1], runs, colours)
    panels[-1].set_xlabel("step")
    for ax in panels:
        style_axes(ax)
        _step_axis(ax, runs)
    return fig


def plot_balance(runs: Runs) -> Figure:
    """Tokens of the fullest rank over the mean of all ranks, by step and strategy; 1 is perfectly even."""
    fig = new_figure(10.0, 3.6)
    ax = fig.subplots()
    ends = {}
    last_step = max((row["step"] for rows in runs.values() for row in rows), default=0)
    for strategy, colour in colours_of(runs).items():
        ratios = balance(runs[strategy])
        steps = column(runs[strategy], "step")
        ax.plot(steps, ratios, color=colour, linewidth=2, **_marker(runs[strategy]))
        if len(ratios):
            ends[f"{strategy}  (median {np.median(ratios):.2f})"] = (float(ratios[-1]), colour)
    ax.axhline(1, color=MUTED, linewidth=1, linestyle=_DASHED)
    _note(ax, "perfectly even", (0, 1), ("axes fraction", "data"), (4, -4), va="top")
    low, high = ax.get_ylim()
    ax.set_ylim(min(low, 1 - 0.12 * (high - 1)) if high > 1 else 0.9, max(high, 1.1))
    _end_labels(ax, ends, last_step)
    ax.set_ylabel("tokens per rank, max / mean")
    ax.set_xlabel("step")
    style_axes(ax)
    _step_axis(ax, runs)
    return fig


def new_figure(width_in: float, height_in: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise UnsupportedError("pictures need the package `matplotlib`: pip install 'layerwise[train]'") from None
    return Figure(figsize=(width_in, height_in), dpi=100, layout="constrained", facecolor=PAPER)


def style_axes(ax: Axes) -> None:
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(MUTED)
    ax.tick_params(which="both", length=0, labelsize=9.5, labelcolor=MUTED, pad=5)
    ax.grid(axis="y", color=FAINT, linewidth=0.9)
    ax.set_axisbelow(True)
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set(color=MUTED, fontsize=10)


def _step_axis(ax: Axes, runs: Runs) -> None:
    from matplotlib.ticker import MaxNLocator

    steps = [row["step"] for rows in runs.values() for row in rows]
    margin = 0.4 + 0.01 * (max(steps) - min(steps))
    ax.set_xlim(min(steps) - margin, max(steps) + margin)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=12, min_n_ticks=1))


def _marker(rows: Rows) -> dict[str, Any]:
    return {"marker": "o", "markersize": 4} if len(rows) <= 40 else {}


def colours_of(runs: Runs) -> dict[str, str]:
    other = iter(_OTHER_COLOURS * (len(runs) // len(_OTHER_COLOURS) + 1))
    return {strategy: _STRATEGY_COLOURS.get(strategy) or next(other) for strategy in runs}


def _draw_bars(ax: Axes, runs: Runs, link: str) -> None:
    """One group of bars per layer kind, one bar per strategy."""
    kinds = list(dict.fromkeys(kind for rows in runs.values() for row in rows for kind in row["exchange"]))
    width = 0.8 / max(len(runs), 1)
    separator = "\n" if len(runs) * len(kinds) > 6 else " "  # narrow bars have room for narrow labels only
    for index, (strategy, colour) in enumerate(colours_of(runs).items()):
        heights = [mean_of(runs[strategy], "exchange", kind, link) for kind in kinds]
        x = np.arange(len(kinds)) + (index - (len(runs) - 1) / 2) * width
        bars = ax.bar(x, heights, width=width * 0.92, color=colour, label=strategy)
        labels = [format_bytes(height).replace(" ", separator) for height in heights]
        ax.bar_label(bars, labels=labels, padding=3, fontsize=9.5, color=INK)
    ax.set_xticks(np.arange(len(kinds)), [kind_label(kind) for kind in kinds])


def _sharing(plan: StepPlan, sample: Ints, rank: Ints) -> tuple[Ints, Ints]:
    """How many ranks, and how many nodes, hold each shard's sample, int64 [shards] each.

    Rank counts are rounded up to a power of two: 13 tokens over 16 ranks leave three of them without any.
    """
    num_ranks, num_nodes = np.ones_like(sample), np.ones_like(sample)
    for s in np.unique(sample):
        of = sample == s
        num_ranks[of] = 1 << (len(np.unique(rank[of])) - 1).bit_length()
        num_nodes[of] = len(np.unique(rank[of] // plan.ranks_per_node))
    return num_ranks, num_nodes


def _sharing_colour(num_ranks: int, across_nodes: bool, ranks_per_node: int) -> str:
    if not across_nodes:
        return _LOCAL_BLUES[min(num_ranks.bit_length() - 1, len(_LOCAL_BLUES) - 1)]
    octaves = num_ranks.bit_length() - ranks_per_node.bit_length() - 1
    return _WIDE_ORANGES[min(max(octaves, 0), len(_WIDE_ORANGES) - 1)]


def _sharing_legend(fig: Figure, shown: set[tuple[bool, int]], ranks_per_node: int) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(
            color=_sharing_colour(num_ranks, across, ranks_per_node),
            label=f"{num_ranks} rank{'s' if num_ranks > 1 else ''}{' across nodes' if across else ''}",
        )
        for across, num_ranks in sorted(shown)
    ]
    handles.append(Patch(facecolor=PAPER, edgecolor=INK, linewidth=1.4, label="the longest sample"))
    legend = fig.legend(
        handles=handles,
        title="A sample is shared by",
        alignment="left",
        loc="outside upper left",
        ncols=min(len(handles), 7),
        frameon=False,
        fontsize=9.5,
        labelcolor=INK,
        handlelength=1.2,
        columnspacing=1.4,
    )
    legend.get_title().set(fontsize=9.5, color=MUTED)


def _draw_shards(ax: Axes, plan: StepPlan, microbatch: MicrobatchPlan, longest: int) -> set[tuple[bool, int]]:
    """Draw one stacked bar per rank; returns the (across nodes, number of ranks) that samples have."""
    sample, rank, lo, hi = (microbatch.shards.column(name) for name in ("sample", "rank", "lo", "hi"))
    num_ranks, num_nodes = _sharing(plan, sample, rank)
    order = np.lexsort((sample, -np.asarray(plan.lengths)[sample], -num_ranks, num_nodes == 1))
    size = (hi - lo)[order]
    bottom = _stacked(rank[order], size, plan.num_ranks)
    sample, rank, num_ranks, across = sample[order], rank[order], num_ranks[order], num_nodes[order] > 1
    shown = set(zip(across.tolist(), num_ranks.tolist(), strict=True))
    style: dict[str, Any] = {"width": 0.86, "linewidth": 0.5, "edgecolor": PAPER}
    for key in shown:
        of = (across == key[0]) & (num_ranks == key[1])
        colour = _sharing_colour(key[1], key[0], plan.ranks_per_node)
        ax.bar(rank[of], size[of], bottom=bottom[of], color=colour, **style)
    of = sample == longest
    ax.bar(rank[of], size[of], bottom=bottom[of], **style | {"fill": False, "edgecolor": INK, "linewidth": 1.4})

    tokens, crossing = microbatch.tokens_per_rank(plan.num_ranks), len(np.unique(sample[across]))
    ax.axhline(tokens.mean(), color=INK, linewidth=1.1, linestyle=_DASHED)
    _note(ax, f"mean\n{tokens.mean():,.0f}", (1, tokens.mean()), ("axes fraction", "data"), (4, 0), color=INK)
    ax.set_title(plan.strategy, loc="left", fontsize=12.5, fontweight="bold", color=INK)
    balance_text = f"max/mean {tokens.max() / tokens.mean():.2f}"
    crossing_text = f"{crossing} of {len(microbatch.samples)} samples across nodes"
    ax.set_title(f"{balance_text}  ·  {crossing_text}", loc="right", fontsize=10, color=MUTED)
    return shown


def _stacked(rank: Ints, size: Ints, num_ranks: int) -> Ints:
    """Where each segment starts when those of a rank are put on one another in the order given."""
    top = np.zeros(num_ranks, dtype=np.int64)
    bottom = np.zeros(len(rank), dtype=np.int64)
    for row, (r, tokens) in enumerate(zip(rank.tolist(), size.tolist(), strict=True)):
        bottom[row] = top[r]
        top[r] += tokens
    return bottom


def _draw_nodes(ax: Axes, plan: StepPlan) -> None:
    ax.set_xlim(-0.6, plan.num_ranks - 0.4)
    num_nodes = -(-plan.num_ranks // plan.ranks_per_node)
    for node in range(num_nodes):
        first = node * plan.ranks_per_node
        if node:
            ax.axvline(first - 0.5, color=MUTED, linewidth=1.2)
        _note(ax, f"node {node}", (first - 0.4, 1), ("data", "axes fraction"), (3, -3), va="top")
    every = max(1, plan.num_ranks // 32)
    ax.set_xticks(range(0, plan.num_ranks, every))


def _draw_differences(ax: Axes, runs: Runs, colours: Mapping[str, str]) -> None:
    """A log scale has no 0: equal losses are drawn hollow on the floor of the panel."""
    (first, base), *others = runs.items()
    by_step = {row["step"]: row["loss"] for row in base}
    differences = {
        name: [(row["step"], abs(row["loss"] - by_step[row["step"]])) for row in rows if row["step"] in by_step]
        for name, rows in others
    }
    positive = [d for pairs in differences.values() for _, d in pairs if d > 0]
    floor = 10 ** (np.floor(np.log10(min(positive))) - 1) if positive else 1e-16
    for name, pairs in differences.items():
        steps, values = np.array([s for s, _ in pairs]), np.array([d for _, d in pairs])
        colour, equal = colours[name], values == 0
        ax.plot(steps, np.maximum(values, floor), color=colour, linewidth=1.4, alpha=0.5)
        ax.plot(steps[~equal], values[~equal], "o", color=colour, markersize=4)
        ax.plot(steps[equal], np.full(equal.sum(), floor), "o", color=colour, markersize=4, markerfacecolor=PAPER)
    ax.set_yscale("log")
    ax.set_ylim(floor / 3, max(positive, default=1e-13) * 10)
    title = f"Absolute difference to {first} (hollow: exactly equal)"
    ax.set_title(title, loc="left", fontsize=10, color=MUTED)


def _end_labels(ax: Axes, ends: Mapping[str, tuple[float, str]], last_step: float) -> None:
    """Name each curve at its right end, spread so that no two names touch."""
    low, high = ax.get_ylim()
    gap, previous = (high - low) * 0.085, -np.inf
    for text, (value, colour) in sorted(ends.items(), key=lambda item: item[1][0]):
        previous = max(value, previous + gap)
        _note(ax, text, (last_step, previous), "data", (10, 0), color=colour, fontsize=10, fontweight="bold")


def _note(
    ax: Axes,
    text: str,
    xy: tuple[float, float],
    coords: Any,
    offset_points: tuple[float, float],
    **style: Any,
) -> None:
    """Text at a point, moved by an offset in points."""
    style = {"va": "center", "fontsize": 9, "color": MUTED, **style}
    ax.annotate(text, xy, offset_points, xycoords=coords, textcoords="offset points", annotation_clip=False, **style)
