"""The timeline as a trace that Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per node and strategy, one thread per rank. Each site is a slice named after its layer kind, which is what
Perfetto colours by, around one slice per phase. Times are microseconds, as the Trace Event Format asks for. An
exchange that attention hides in part has the slice of what it does not hide, maybe of no length, and says the rest.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from layerwise.cost import CostModel
from layerwise.files import write_whole
from layerwise.plan import HOME, Ints, MicrobatchPlan
from layerwise.simulate.step import Simulation
from layerwise.simulate.timeline import LM_HEAD, MOVES, PHASES, STEP_END, Events, Site, moved_between
from layerwise.traffic import elements, match

# Names from the palette of chrome://tracing.
_KIND_COLOURS = {
    "full_attention": "thread_state_iowait",
    "sliding_attention": "thread_state_running",
    "chunked_attention": "rail_load",
    "linear_attention": "rail_animation",
    LM_HEAD: "olive",
    MOVES: "terrible",
    STEP_END: "grey",
}
_EXCHANGES = {"exchange_in": 0, "exchange_out": 1}


def write_trace(
    path: Path,
    simulations: Mapping[str, Simulation],
    *,
    ranks: Collection[int] | None = None,
    layers: Collection[int] | None = None,
    option: str = "--trace",
) -> None:
    """Write the timelines of these strategies into one file, piece by piece; None means all ranks and all layers.

    The LM head and the end of the step are always there. Raises SpecError, naming `option`, where it cannot be written.
    """
    write_whole(path, trace_pieces(simulations, ranks=ranks, layers=layers), option)


def trace_pieces(
    simulations: Mapping[str, Simulation],
    *,
    ranks: Collection[int] | None = None,
    layers: Collection[int] | None = None,
) -> Iterator[str]:
    """The text of the file in pieces of one event each."""
    separator = '{"displayTimeUnit": "ms", "traceEvents": [\n'
    first_process = 0
    for strategy, simulation in simulations.items():
        for event in _events(strategy, simulation, first_process, ranks, layers):
            yield separator + json.dumps(event)
            separator = ",\n"
        first_process += simulation.cost.cluster.num_nodes
    yield "\n]}\n"


def _events(
    strategy: str,
    simulation: Simulation,
    first_process: int,
    ranks: Collection[int] | None,
    layers: Collection[int] | None,
) -> Iterator[dict[str, Any]]:
    per_node = simulation.cost.cluster.ranks_per_node
    sent = [_sent_bytes(microbatch, simulation.cost) for microbatch in simulation.plan.microbatches]
    tokens = [_tokens(microbatch, simulation.cost) for microbatch in simulation.plan.microbatches]
    shown = range(simulation.timeline.num_ranks) if ranks is None else sorted(ranks)
    for node in sorted({rank // per_node for rank in shown}):
        process = first_process + node
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": f"{strategy}, node {node}"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
    for rank in shown:
        thread = {"pid": first_process + rank // per_node, "tid": rank}
        yield {"ph": "M", "name": "thread_name", **thread, "args": {"name": f"rank {rank}"}}
        yield {"ph": "M", "name": "thread_sort_index", **thread, "args": {"sort_index": rank}}
        for event in _rank_events(simulation, rank, sent, tokens, layers):
            yield event | thread


def _rank_events(
    simulation: Simulation,
    rank: int,
    sent: Sequence[Mapping[Any, Ints]],
    tokens: Sequence[Mapping[str, Ints]],
    layers: Collection[int] | None,
) -> Iterator[dict[str, Any]]:
    """The slices of one rank: a site's, then those of its phases."""
    timeline = simulation.timeline
    events = timeline.events(rank)
    ends = np.flatnonzero(np.diff(events.site, append=-1) | np.diff(events.microbatch, append=-1)) + 1
    start = 0
    for end in ends.tolist():
        rows, start = range(start, end), end
        site, microbatch = timeline.sites[int(events.site[rows[0]])], int(events.microbatch[rows[0]])
        if layers is not None and site.layer not in layers and site.layer >= 0:
            continue
        of_place = tokens[microbatch].get(site.kind, tokens[microbatch][HOME])
        yield _site_slice(events, rows, site, microbatch, int(of_place[rank]))
        for row in rows:
            yield _phase_slice(simulation, events, row, site, sent[microbatch], rank)


def _site_slice(events: Events, rows: range, site: Site, microbatch: int, tokens: int) -> dict[str, Any]:
    args: dict[str, Any] = {"microbatch": microbatch, "pass": "backward" if site.backward else "forward"}
    if site.layer >= 0:
        args["layer"] = site.layer
    return {
        "ph": "X",
        "name": site.kind,
        "cat": site.kind,
        "cname": _KIND_COLOURS[site.kind],
        "ts": _microseconds(events.start_s[rows[0]]),
        "dur": _microseconds(events.start_s[rows[-1]] + events.duration_s[rows[-1]] - events.start_s[rows[0]]),
        "args": args | {"tokens": tokens},
    }


def _phase_slice(
    simulation: Simulation, events: Events, row: int, site: Site, sent: Mapping[Any, Ints], rank: int
) -> dict[str, Any]:
    phase = PHASES[int(events.phase[row])]
    event: dict[str, Any] = {
        "ph": "X",
        "name": phase,
        "cat": site.kind,
        "ts": _microseconds(events.start_s[row]),
        "dur": _microseconds(events.duration_s[row]),
    }
    if phase in _EXCHANGES or phase == "move":
        plan = simulation.plan.microbatches[int(events.microbatch[row])]
        key = moved_between(plan, simulation.cost, site.layer) if phase == "move" else site.kind
        fast, slow = sent[key][int(site.backward), _EXCHANGES.get(phase, 0), :, rank].tolist()
        event["args"] = {"fast_bytes": fast, "slow_bytes": slow}
        if events.hidden_s[row]:
            event["args"]["hidden_us"] = _microseconds(events.hidden_s[row])
    return event


def _tokens(microbatch: MicrobatchPlan, cost: CostModel) -> dict[str, Ints]:
    """Tokens of each rank at home and in layers of each kind, int64 [ranks] each."""
    return {place: microbatch.tokens_per_rank(cost.cluster.num_ranks, place) for place in (HOME, *cost.model.kinds)}


def _sent_bytes(microbatch: MicrobatchPlan, cost: CostModel) -> dict[Any, Ints]:
    """What each rank sends at a site of each layer kind, and between each two places: int64 [2, 2, 2, ranks] each.

    Axes: forward and backward, exchange in and out, fast and slow link, rank. Recomputation belongs to backward.
    """
    table: dict[Any, Ints] = {}
    for layer in cost.layers:
        tiles = microbatch.tiles[layer.kind]
        transfers = match(microbatch.shards_at(layer.kind), tiles)
        there, back = (moved * cost.bytes_per_element for moved in elements(transfers, tiles, layer.spec))
        again = cost.forwards - 1
        table[layer.kind] = np.stack(
            [
                _both_passes(transfers.src, transfers.dst, there, again, cost),
                _both_passes(transfers.dst, transfers.src, back, again, cost),
            ],
            axis=1,
        )
    for move in cost.moves(microbatch):
        sent = move.sent.sent_bytes.astype(np.int64)
        table[move.source, move.target] = _both_passes(move.sent.src, move.sent.dst, sent, 0, cost)[:, None]
    return table


def _both_passes(src: Ints, dst: Ints, sent: Ints, again: int, cost: CostModel) -> Ints:
    """Bytes by pass, link and sending rank, int64 [2, 2, ranks]: backward goes the other way, after `again` repeats."""
    forward, backward = (_by_link(rank, src, dst, sent, cost) for rank in (src, dst))
    return np.stack([forward, again * forward + backward])


def _by_link(rank: Ints, src: Ints, dst: Ints, sent: Ints, cost: CostModel) -> Ints:
    slow = cost.cluster.node_of(src) != cost.cluster.node_of(dst)
    links = [(src != dst) & ~slow, slow]
    size = cost.cluster.num_ranks
    return np.stack([np.bincount(rank[link], weights=sent[link], minlength=size) for link in links]).astype(np.int64)


def _microseconds(seconds: float) -> float:
    return round(1e6 * float(seconds), 4)
