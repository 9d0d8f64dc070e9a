"""The timeline of a step: which rank is in which phase of which layer, from when and for how long.

A step is a row of sites, the same for all micro-batches: every layer forward, the LM head, every layer backward, and
moves of hidden states where layers keep them in different places. At a site a rank runs phases one after another; all
layers of a kind take equally long. Where ranks meet at every layer (`sync: layer`), a rank waits at the end of a site
for the slowest one; otherwise only at the end of the step.

Where attention sites run in parts (`overlap_parts`), a rank alternates between parts. Here each phase is one piece:
forward, `exchange_in` is what attention waits for before the first part and between parts, and `exchange_out` what is
left to wait for after the last; backward it is the other way round. What ran beside attention is told as hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from layerwise.cost import BACKWARD_ATTENTION, BACKWARD_LINEAR, MOVE_PASSES, CostModel, Floats, LayerTimes
from layerwise.plan import HOME, Ints, MicrobatchPlan, StepPlan

# In the order in which a rank runs them forward; backward undoes a layer from its end.
PHASES = ("exchange_in", "attention", "exchange_out", "linear", "exposed", "head", "move", "wait")
_LAYER_PHASES = slice(0, 5)
_HEAD, _MOVE, _WAIT = (PHASES.index(name) for name in ("head", "move", "wait"))
_EXCHANGES = [PHASES.index(name) for name in ("exchange_in", "exchange_out")]
_FORWARD_ORDER = tuple(range(len(PHASES)))
_BACKWARD_ORDER = tuple(PHASES.index(p) for p in ("linear", "exchange_out", "attention", "exchange_in")) + tuple(
    range(4, len(PHASES))
)
# What sites are beside the layer kinds.
LM_HEAD, MOVES, STEP_END = "lm_head", "moves", "step_end"


class Site(NamedTuple):
    """One pass through one layer, or through something that is none.

    layer: its index; of moves, the layer that they lead to (forward), one more than the last for the way home; -1 for
    the LM head and the end of the step.
    """

    layer: int
    kind: str
    backward: bool


class Events(NamedTuple):
    """What one rank does, in time order: columns of one length, without phases that take no time.

    microbatch, site (index into Timeline.sites) and phase (index into PHASES): int64. start_s, duration_s and hidden_s
    (as of Timeline; where it is not 0, duration_s may be): float64.
    """

    microbatch: Ints
    site: Ints
    phase: Ints
    start_s: Floats
    duration_s: Floats
    hidden_s: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class Timeline:
    """Every phase of a step.

    duration_s: float64 [microbatches, sites, len(PHASES), ranks]. hidden_s, of the same shape: what a phase takes
    beside that, while the rank attends; 0 but for exchanges.
    """

    sites: tuple[Site, ...]
    duration_s: Floats
    hidden_s: Floats

    @cached_property
    def start_s(self) -> Floats:
        """When each phase begins, float64 of the shape of `duration_s`; ranks are never idle, they wait."""
        order = self._order[None, :, :, None]
        in_time = np.take_along_axis(self.duration_s, order, axis=2)
        flat = in_time.reshape(-1, in_time.shape[-1])
        start = (np.cumsum(flat, axis=0) - flat).reshape(in_time.shape)
        result = np.empty_like(start)
        np.put_along_axis(result, np.broadcast_to(order, start.shape), start, axis=2)
        return result

    @property
    def _order(self) -> Ints:
        """Phases of each site as they follow one another, int64 [sites, len(PHASES)]."""
        return np.array([_BACKWARD_ORDER if site.backward else _FORWARD_ORDER for site in self.sites])

    @property
    def num_ranks(self) -> int:
        """Ranks of the cluster."""
        return self.duration_s.shape[-1]

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return float(self.duration_s.sum(axis=(0, 1, 2)).max())

    @property
    def kinds(self) -> tuple[str, ...]:
        """Layer kinds in order of first use, then what is no layer."""
        first_use = dict.fromkeys(site.kind for site in self.sites)
        extra = [kind for kind in first_use if kind in (LM_HEAD, MOVES, STEP_END)]
        return (*(kind for kind in first_use if kind not in extra), *extra)

    def phase_s(self, kind: str) -> Floats:
        """Seconds of each rank in each phase of this kind's sites, float64 [len(PHASES), ranks]."""
        return np.asarray(self._of_kind(self.duration_s, kind).sum(axis=(0, 1)))

    def rank_hidden_s(self, kind: str) -> Floats:
        """Seconds of each rank's exchanges at this kind's sites that attention hides, float64 [ranks]."""
        return np.asarray(self._of_kind(self.hidden_s, kind).sum(axis=(0, 1, 2)))

    def _of_kind(self, seconds: Floats, kind: str) -> Floats:
        return seconds[:, [index for index, site in enumerate(self.sites) if site.kind == kind]]

    def events(self, rank: int) -> Events:
        """What one rank does."""
        order = self._order[None]
        duration, start, hidden = (
            np.take_along_axis(a[..., rank], order, axis=2) for a in (self.duration_s, self.start_s, self.hidden_s)
        )
        microbatch, site, position = np.nonzero(duration + hidden)
        return Events(
            microbatch=microbatch,
            site=site,
            phase=self._order[site, position],
            start_s=start[microbatch, site, position],
            duration_s=duration[microbatch, site, position],
            hidden_s=hidden[microbatch, site, position],
        )


def build_timeline(plan: StepPlan, cost: CostModel) -> Timeline:
    """The timeline of a plan under a cost model; it takes as long as `cost.predict` says."""
    forward = _forward_sites(plan, cost)
    sites = [*forward, *(site._replace(backward=True) for site in reversed(forward))]
    times = [cost.layer_times(microbatch) for microbatch in plan.microbatches]
    duration_s = np.stack([_microbatch_s(*part, cost, sites) for part in zip(plan.microbatches, times, strict=True)])
    if cost.cluster.sync == "step":
        sites.append(Site(-1, STEP_END, True))
        rank_s = duration_s.sum(axis=(0, 1, 2))
        duration_s = np.pad(duration_s, ((0, 0), (0, 1), (0, 0), (0, 0)))
        duration_s[-1, -1, _WAIT] = rank_s.max() - rank_s
    hidden_s = np.zeros_like(duration_s)
    for index, site in enumerate(sites):
        if site.kind in cost.attention:
            hidden_s[:, index, _EXCHANGES] = [part[site.kind].hidden_s[int(site.backward)] for part in times]
    return Timeline(sites=tuple(sites), duration_s=duration_s, hidden_s=hidden_s)


def _forward_sites(plan: StepPlan, cost: CostModel) -> list[Site]:
    """Layers, moves where any micro-batch has one, and the LM head, in the order of forward."""
    sites = []
    for layer, kind in enumerate((*cost.model.all_layer_types, LM_HEAD)):
        if any(moved_between(microbatch, cost, layer) is not None for microbatch in plan.microbatches):
            sites.append(Site(layer, MOVES, False))
        sites.append(Site(-1 if kind == LM_HEAD else layer, kind, False))
    return sites


def moved_between(microbatch: MicrobatchPlan, cost: CostModel, layer: int) -> tuple[str, str] | None:
    """The places between which hidden states move on their way to a layer, or None where they stay.

    layer: its index; one more than the last for the way home.
    """
    path = (HOME, *cost.model.all_layer_types, HOME)
    source, target = (kind if kind in microbatch.shards_by_kind else HOME for kind in path[layer : layer + 2])
    return None if source == target else (source, target)


def _microbatch_s(
    microbatch: MicrobatchPlan, times: dict[str, LayerTimes], cost: CostModel, sites: list[Site]
) -> Floats:
    """Seconds of one micro-batch, float64 [sites, len(PHASES), ranks]."""
    num_ranks = cost.cluster.num_ranks
    passes = {kind: _layer_passes(of_layer, cost) for kind, of_layer in times.items()}
    head_s: Floats = np.asarray(cost.head_token_s * microbatch.tokens_per_rank(num_ranks))
    passes[LM_HEAD] = _even_passes(head_s, _HEAD, 1 / (1 + BACKWARD_LINEAR), cost)
    moves = {
        (move.source, move.target): _even_passes(cost.move_s(move.sent), _MOVE, 1 / MOVE_PASSES, cost)
        for move in cost.moves(microbatch)
    }
    nothing = np.zeros((2, len(PHASES), num_ranks))
    rows = []
    for site in sites:
        if site.kind == MOVES:
            places = moved_between(microbatch, cost, site.layer)
            both = nothing if places is None else moves[places]
        else:
            both = passes[site.kind]
        rows.append(both[int(site.backward)])
    return np.stack(rows)


def _even_passes(total_s: Floats, phase: int, forward_share: float, cost: CostModel) -> Floats:
    """A site of one phase, alike on all ranks: forward and backward, float64 [2, len(PHASES), ranks]."""
    passes = np.zeros((2, len(PHASES), len(total_s)))
    share = np.array([[forward_share], [1 - forward_share]])
    passes[:, phase] = share * total_s
    if cost.cluster.sync == "layer":
        passes[:, _WAIT] = share * (total_s.max() - total_s)
    return passes


def _layer_passes(times: LayerTimes, cost: CostModel) -> Floats:
    """One layer forward and backward, float64 [2, len(PHASES), ranks]; recomputation belongs to backward."""
    total = np.stack([times.to_tiles_s, times.attention_s, times.from_tiles_s, times.linear_s, times.exposed_s])
    exchange = 1 / cost.passes
    attention, linear = 1 / (cost.forwards + BACKWARD_ATTENTION), 1 / (cost.forwards + BACKWARD_LINEAR)
    # How much of the exposed traffic is forward depends on what hides it; it is split as exchanges are.
    forward = np.array([exchange, attention, exchange, linear, exchange])[:, None] * total
    both = np.stack([forward, total - forward])
    both[:, _EXCHANGES] -= times.hidden_s
    both = np.maximum(both, 0)  # where all is hidden, rounding may go below
    passes = np.zeros((2, len(PHASES), total.shape[1]))
    if cost.cluster.sync == "layer":
        both, passes[:, _WAIT] = _fit(*both)
    passes[:, _LAYER_PHASES] = both
    return passes


def _fit(forward: Floats, backward: Floats) -> tuple[Floats, Floats]:
    """Seconds of both passes, [2, phases, ranks], that fit beside those of the slowest rank, and the waits, [2, ranks].

    The cost model lets ranks wait for one another once for forward and backward together. The slowest rank sets how
    long each pass lasts; a rank whose own share would not fit into one of them does the rest in the other.
    """
    total = forward + backward
    forward_s, total_s = forward.sum(axis=0), total.sum(axis=0)
    slowest = int(total_s.argmax())
    limit_s, site_s = forward_s[slowest], total_s[slowest]
    fitted_s = np.clip(forward_s, total_s - (site_s - limit_s), limit_s)
    less = np.divide(fitted_s, forward_s, out=np.ones_like(total_s), where=fitted_s < forward_s)
    more = np.divide(fitted_s - forward_s, total_s - forward_s, out=np.zeros_like(total_s), where=fitted_s > forward_s)
    waits = np.stack([limit_s - fitted_s, site_s - limit_s - (total_s - fitted_s)])
    fitted = forward * less + backward * more
    return np.stack([fitted, total - fitted]), np.maximum(waits, 0)
