"""What the pictures of simulations show, as arrays: a window of the timeline, and tokens per rank.

All layers of a kind take equally long, so a window of one period of the layer pattern shows what the whole step does:
of the micro-batch with the longest sample, the last layers forward, the LM head, and the same layers backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.cost import Floats
from layerwise.labels import format_seconds
from layerwise.plan import Ints
from layerwise.simulate.step import Simulation
from layerwise.simulate.table import kind_name
from layerwise.simulate.timeline import PHASES, Site

MAX_LAYERS, MAX_RANKS = 8, 128

_KIND_COLOURS = {
    "full_attention": "#d9682b",
    "sliding_attention": "#2a73b3",
    "chunked_attention": "#3fa796",
    "linear_attention": "#8c6bb1",
    "lm_head": "#b8912b",
    "moves": "#b83b6e",
}
# Shares of white (positive) or black (negative) in the colour of the kind, and what a person calls the phase.
_TINTS = {"attention": 0.0, "linear": 0.5, "exchange_in": -0.4, "exchange_out": -0.4, "exposed": -0.7}
_PHASE_NAMES = {"linear": "linear work", "exchange_in": "exchange", "exchange_out": "exchange"} | {
    "exposed": "exposed traffic"
}
WAIT, WAIT_COLOUR = "waiting", "#eceff3"


@dataclass(frozen=True, kw_only=True, eq=False)
class Window:
    """Events of one simulation in the window.

    Columns, all of one length: rank, label (index into `labels`), int64; start_ms, duration_ms, float64, from the
    window's begin. texts: one per event. tokens: what each rank holds in this micro-batch, int64 [ranks].
    """

    title: str
    labels: tuple[str, ...]
    colours: tuple[str, ...]
    rank: Ints
    label: Ints
    start_ms: Floats
    duration_ms: Floats
    texts: tuple[str, ...]
    tokens: Ints
    ranks_per_node: int

    @property
    def every(self) -> int:
        """Every how many ranks one is shown."""
        return -(-len(self.tokens) // MAX_RANKS)

    @property
    def end_ms(self) -> float:
        """How long the window is."""
        return float((self.start_ms + self.duration_ms).max())


def timeline_window(simulation: Simulation) -> Window:
    """The window of one simulation; of more than MAX_RANKS ranks, evenly spaced ones."""
    timeline, plan = simulation.timeline, simulation.plan
    longest = int(np.argmax(plan.lengths))
    index = next(i for i, microbatch in enumerate(plan.microbatches) if longest in microbatch.samples)
    tokens = plan.microbatches[index].tokens_per_rank(timeline.num_ranks)
    first, last = _shown_sites(timeline.sites, simulation)
    labels: dict[str, str] = {}
    columns: list[tuple[int, int, float, float]] = []
    texts = []
    for rank in range(0, timeline.num_ranks, -(-timeline.num_ranks // MAX_RANKS)):
        events = timeline.events(rank)
        inside = (events.microbatch == index) & (events.site >= first) & (events.site <= last)
        for row in np.flatnonzero(inside).tolist():
            site, phase = timeline.sites[int(events.site[row])], PHASES[int(events.phase[row])]
            name, colour = _label(site.kind, phase)
            labels[name] = colour
            start_s, duration_s = float(events.start_s[row]), float(events.duration_s[row])
            columns.append((rank, list(labels).index(name), 1e3 * start_s, 1e3 * duration_s))
            texts.append(_text(site, phase, duration_s, float(events.hidden_s[row])))
    rank_column, label, start_ms, duration_ms = (np.array(column) for column in zip(*columns, strict=True))
    return Window(
        title=f"{plan.strategy}: a step takes {format_seconds(simulation.prediction.seconds)}",
        labels=tuple(labels),
        colours=tuple(labels.values()),
        rank=rank_column,
        label=label,
        start_ms=start_ms - start_ms.min(),
        duration_ms=duration_ms,
        texts=tuple(texts),
        tokens=tokens,
        ranks_per_node=plan.ranks_per_node,
    )


def merged_labels(windows: Sequence[Window]) -> dict[str, str]:
    """Every label of these windows and its colour; waiting comes last."""
    merged = {name: colour for w in windows for name, colour in zip(w.labels, w.colours, strict=True)}
    return {name: merged[name] for name in sorted(merged, key=lambda name: name == WAIT)}


def _shown_sites(sites: Sequence[Site], simulation: Simulation) -> tuple[int, int]:
    """The first and the last site of the window: those around the LM head, as far as one period of layers."""
    model = simulation.cost.model
    first_layer = model.num_layers - min(len(model.layer_types), MAX_LAYERS)
    shown = [index for index, site in enumerate(sites) if site.layer >= first_layer and site.kind in model.kinds]
    return shown[0], shown[-1]


def _label(kind: str, phase: str) -> tuple[str, str]:
    """What the legend calls a phase of a kind, and its colour."""
    if phase == "wait":
        return WAIT, WAIT_COLOUR
    colour = _KIND_COLOURS[kind]
    if phase not in _TINTS:
        return kind_name(kind), colour
    return f"{kind_name(kind)}: {_PHASE_NAMES.get(phase, phase)}", _tinted(colour, _TINTS[phase])


def _tinted(colour: str, tint: float) -> str:
    target = 255 if tint > 0 else 0
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(part + abs(tint) * (target - part)):02x}" for part in parts)


def _text(site: Site, phase: str, duration_s: float, hidden_s: float) -> str:
    where = f"layer {site.layer}, " if site.layer >= 0 else ""
    direction = "backward" if site.backward else "forward"
    hidden = f", and {format_seconds(hidden_s)} hidden by attention" if hidden_s else ""
    took = f"{phase.replace('_', ' ')}: {format_seconds(duration_s)}{hidden}"
    return f"{kind_name(site.kind)}, {where}{direction}<br>{took}"
