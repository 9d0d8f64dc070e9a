"""Where the time of the profiled steps of a run went, per rank: one picture and one table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from layerwise.labels import format_seconds, kind_label
from layerwise.report.html import html_table
from layerwise.report.plots import INK, new_figure, style_axes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WORDS = {"exchange_in": "exchange in", "exchange_out": "exchange out", "attention": "kernel"}
_ALONE = {"exchange.moves": "moves", "exchange.experts": "exchange of experts", "moe": "MoE"}
_COLOURS = {
    "exchange_in": ("#a8401a", "#d9682b", "#f2a65a", "#f7cda3"),
    "exchange_out": ("#6d4aa0", "#9a7cc4", "#c3afe0", "#e0d6f0"),
    "attention": ("#124a84", "#2a73b3", "#64a3d1", "#a3c9e5"),
    "exchange": ("#6e2410", "#b83b6e"),
    "moe": ("#3fa796",),
    "optimizer": ("#8a94a0",),
    "other": ("#d5dbe2",),
}


@dataclass(frozen=True, kw_only=True)
class StepProfile:
    """Mean seconds of a profiled step: seconds_by_rank[rank][section]; sections that took no time are left out."""

    num_steps: int
    sections: tuple[str, ...]
    seconds_by_rank: NDArray[np.float64]


def read_profile(path: Path) -> StepProfile | None:
    """The summary that a profiled run left, or None where there is none."""
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    seconds = np.array(data["seconds_by_rank"], dtype=np.float64)
    used = np.flatnonzero(seconds.any(axis=0))
    return StepProfile(
        num_steps=data["num_steps"],
        sections=tuple(data["sections"][index] for index in used),
        seconds_by_rank=seconds[:, used],
    )


def section_label(section: str) -> str:
    """A section for people: "exchange_in.full_attention" reads "exchange in, full layers"."""
    part, _, kind = section.partition(".")
    return _ALONE.get(section) or (f"{_WORDS[part]}, {kind_label(kind)}" if part in _WORDS else section)


def profile_table(profile: StepProfile) -> str:
    """HTML: ranks down, sections across, and the whole step."""
    rows = [
        [f"rank {rank}", *(format_seconds(s) for s in seconds), format_seconds(float(seconds.sum()))]
        for rank, seconds in enumerate(profile.seconds_by_rank)
    ]
    return html_table(["", *map(section_label, profile.sections), "step"], rows)


def plot_profile(profile: StepProfile) -> Figure:
    """One bar per rank, one segment per section."""
    from matplotlib.ticker import MaxNLocator

    fig = new_figure(10.0, 4.2)
    ax = fig.subplots()
    ranks = np.arange(len(profile.seconds_by_rank))
    below = np.zeros(len(ranks))
    for section, colour, seconds in zip(
        profile.sections, _colours_of(profile.sections), profile.seconds_by_rank.T, strict=True
    ):
        ax.bar(ranks, seconds, bottom=below, width=0.8, color=colour, label=section_label(section))
        below += seconds
    style_axes(ax)
    ax.set_xlabel("rank")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    ax.set_ylabel("seconds of a step")
    fig.legend(loc="outside right upper", frameon=False, fontsize=9.5, labelcolor=INK, reverse=True)
    return fig


def _colours_of(sections: Sequence[str]) -> list[str]:
    """Shades of one colour for the same part of layers of different kinds."""
    seen: dict[str, int] = {}
    colours = []
    for section in sections:
        part = section.partition(".")[0]
        shades = _COLOURS[part]
        colours.append(shades[seen.setdefault(part, 0) % len(shades)])
        seen[part] += 1
    return colours
