"""Routes of one micro-batch on one rank, and the attention call that follows them.

    with use_routes(routes):
        loss = model(input_ids, position_ids)      # its attention layers call attention(q, k, v, kind=...)

Hidden states are at HOME before the first layer and after the last; `relocate` takes them to the shards of a layer
kind and back. That is free, and may be left out, where every kind's layers run at home.

Nothing here knows a strategy: a plan's shards and tiles are all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from layerwise.errors import SpecError
from layerwise.exchange import (
    Comm,
    Flight,
    Meter,
    Site,
    depart,
    exchange,
    land,
    outside_graph,
    profiler_range,
    range_name,
)
from layerwise.groups import World
from layerwise.kernels import Kernel, check_backend
from layerwise.plan import HOME, Ints, MicrobatchPlan, Shard, StepPlan, Table
from layerwise.route import Move, Route, block_of, build_move, build_parts, build_route
from layerwise.runtime.attention_call import attend, cast_rows, check_call
from layerwise.spec import AttentionSpec
from layerwise.traffic import Block, exchange_blocks, move_blocks, shard_blocks

# The meter's name for moves of hidden states, beside the layer kinds.
MOVES = "moves"


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalTokens:
    """The tokens whose hidden states this rank holds at one place, in packed order; T may be 0.

    position_ids: int64 [T], each token's position in its own sample.
    piece_index: int64 [T], which of the rank's pieces each token belongs to.
    """

    position_ids: Tensor
    piece_index: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """What one rank needs to run one micro-batch.

    microbatch: its number in the step. layer_types: as of StepPlan.
    attention, by_kind: the attention and the route of each layer kind.
    parts: the route of each layer kind in parts that overlap; one part is the whole.
    places: the local tokens at HOME, and in layers of kinds with shards of their own.
    moves: by source and target place, for any two places.
    piece_samples: the samples of which this rank holds tokens at some place, ascending, int64 [pieces].
    shard_block: the ranks that share samples with this one, or None; shared_samples: the samples that its ranks share.
    reached: places that hidden states were at; whoever attends elsewhere has forgotten to relocate them.
    """

    world: World
    microbatch: int
    layer_types: tuple[str, ...]
    meter: Meter
    backend: str | Kernel
    attention: dict[str, AttentionSpec]
    by_kind: dict[str, Route]
    parts: dict[str, tuple[Route, ...]]
    places: dict[str, LocalTokens]
    moves: dict[tuple[str, str], Move]
    piece_samples: Ints
    shard_block: Block | None
    shared_samples: Ints
    reached: set[str] = field(default_factory=lambda: {HOME})

    @property
    def num_pieces(self) -> int:
        """Samples of which this rank holds tokens at some place."""
        return len(self.piece_samples)

    @property
    def position_ids(self) -> Tensor:
        """int64 [T], of the local tokens at home."""
        return self.tokens_at(HOME).position_ids

    def place_of(self, kind: str) -> str:
        """Where layers of this kind keep hidden states: the kind itself, or HOME. Raises SpecError."""
        if kind != HOME and kind not in self.by_kind:
            raise SpecError(f"layer kind {kind!r} is not planned; the plan has {sorted(self.by_kind)}")
        return kind if kind in self.places else HOME

    def tokens_at(self, kind: str) -> LocalTokens:
        """The local tokens in layers of this kind, or at HOME. Raises SpecError."""
        return self.places[self.place_of(kind)]

    def site(self, kind: str, comm: Comm | None, name: str = "exchange") -> Site:
        """Where an exchange of this micro-batch takes place."""
        return Site(kind, comm, self.meter, name, self.world.progress)


def build_routes(
    plan: StepPlan,
    index: int,
    world: World,
    *,
    meter: Meter | None = None,
    backend: str | Kernel = "auto",
    device: torch.device | None = None,
) -> Routes:
    """The routes of this rank for micro-batch `index` of the plan. No collective: it may run ahead, on any thread.

    Each of the plan's `overlap_parts` has two all-to-alls of its own; their bytes are together what they are without
    parts. device: of the indices, by default the world's.
    Raises SpecError where plan and world differ or nothing is known of the backend, UnsupportedError where its package
    is missing.
    """
    if (plan.num_ranks, plan.ranks_per_node) != (world.num_ranks, world.ranks_per_node):
        raise SpecError(
            f"the plan is for {plan.num_ranks} ranks, {plan.ranks_per_node} per node, but the run has "
            f"{world.num_ranks} ranks, {world.ranks_per_node} per node: plan with the cluster that you run on"
        )
    if isinstance(backend, str):
        check_backend(backend)
    elif not callable(backend):
        raise SpecError(
            f"backend={backend!r} is neither a name nor a kernel: a function as of layerwise.kernels.Kernel"
        )
    for kind, spec in plan.attention.items():
        if spec.linear and not spec.mixer:
            raise SpecError(
                f"{kind}: plans may split linear mixers by heads, but there is no kernel yet that runs them; a "
                "ModelSpec with linear_mixer runs each sample on one rank"
            )
    microbatch, size = plan.microbatches[index], (plan.num_ranks, plan.ranks_per_node)
    device = device or world.device
    places = microbatch.places
    owners = np.concatenate([shards.rows[:, :2] for shards in places.values()])
    pieces = np.unique(owners[owners[:, 1] == world.rank, 0])
    shard_block = block_of(world.rank, shard_blocks(microbatch, *size))
    blocks = {kind: exchange_blocks(microbatch, kind, *size) for kind in plan.attention}
    by_kind = {
        kind: build_route(microbatch, kind, spec, world.rank, blocks[kind]).to(device)
        for kind, spec in plan.attention.items()
    }
    parts: dict[str, tuple[Route, ...]] = {kind: (route,) for kind, route in by_kind.items()}
    if plan.overlap_parts > 1:
        for kind, spec in plan.attention.items():
            cut = build_parts(microbatch, kind, spec, world.rank, blocks[kind], plan.overlap_parts)
            parts[kind] = tuple(part.to(device) for part in cut)
    return Routes(
        world=world,
        microbatch=index,
        layer_types=plan.layer_types,
        meter=meter or Meter(world.ranks_per_node),
        backend=backend,
        attention=plan.attention,
        by_kind=by_kind,
        parts=parts,
        places={place: _local_tokens(shards, pieces, world.rank, device) for place, shards in places.items()},
        moves=_build_moves(microbatch, size, world.rank, device),
        piece_samples=pieces,
        shard_block=shard_block,
        shared_samples=_shared_samples(owners, shard_block),
    )


def _local_tokens(shards: Table[Shard], pieces: Ints, rank: int, device: torch.device) -> LocalTokens:
    sample, _, lo, hi = shards.rows[shards.column("rank") == rank].T
    ends = np.cumsum(hi - lo)
    within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - (hi - lo), hi - lo)
    piece_index = np.repeat(np.searchsorted(pieces, sample), hi - lo)
    return LocalTokens(
        position_ids=torch.from_numpy(np.repeat(lo, hi - lo) + within).to(device),
        piece_index=torch.from_numpy(piece_index).to(device),
    )


def _build_moves(
    microbatch: MicrobatchPlan, size: tuple[int, int], rank: int, device: torch.device
) -> dict[tuple[str, str], Move]:
    moves = {}
    for (source, from_shards), (target, to_shards) in combinations(microbatch.places.items(), 2):
        move = build_move(from_shards, to_shards, rank, move_blocks(microbatch, source, target, *size))
        moves[source, target] = move.to(device)
        moves[target, source] = moves[source, target].inverse()
    return moves


def _shared_samples(owners: Ints, block: Block | None) -> Ints:
    """Of (sample, rank) pairs, int64 [pairs, 2]: the samples that several ranks of the block hold."""
    if block is None:
        return np.zeros(0, np.int64)
    inside = (block.lo <= owners[:, 1]) & (owners[:, 1] < block.hi)
    samples, counts = np.unique(np.unique(owners[inside], axis=0)[:, 0], return_counts=True)
    return samples[counts > 1]


def plan_blocks(plan: StepPlan) -> set[Block]:
    """Every block of ranks that some micro-batch of the plan needs a group for."""
    size = (plan.num_ranks, plan.ranks_per_node)
    blocks: set[Block] = set()
    for microbatch in plan.microbatches:
        blocks.update(shard_blocks(microbatch, *size))
        for kind in plan.attention:
            blocks.update(exchange_blocks(microbatch, kind, *size))
        for source, target in combinations(microbatch.places, 2):
            blocks.update(move_blocks(microbatch, source, target, *size))
    return blocks


_current: ContextVar[Routes | None] = ContextVar("layerwise_routes", default=None)


@contextmanager
def use_routes(routes: Routes, *, layers_before: int = 0) -> Iterator[Routes]:
    """Attention layers called inside follow these routes. Messages count them from `layers_before` on."""
    token = _current.set(routes)
    progress = routes.world.progress
    progress.microbatch, progress.layer = routes.microbatch, layers_before - 1
    try:
        yield routes
    finally:
        _current.reset(token)


def in_routes() -> bool:
    """Whether a micro-batch's routes are in use here."""
    return _current.get() is not None


def current_routes() -> Routes:
    """The routes of the micro-batch being computed. Raises SpecError outside `use_routes`."""
    routes = _current.get()
    if routes is None:
        raise SpecError(
            "attention() was called without routes: wrap the forward in `with microbatch.routes():`; recompute during "
            "backward finds them through layerwise.checkpoint (or pass routes= explicitly)"
        )
    return routes


def checkpoint(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Activation checkpointing of fn(*args, **kwargs) whose recompute follows its own micro-batch's routes.

    The backward may run after other micro-batches' forwards, and on another thread.
    """
    routes = current_routes()
    layers_before = routes.world.progress.layer + 1

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return use_routes(routes, layers_before=layers_before), use_routes(routes, layers_before=layers_before)

    return torch_checkpoint(partial(fn, **kwargs), *args, use_reentrant=False, context_fn=contexts)


@outside_graph
def relocate(hidden: Tensor, *, source: str = HOME, target: str = HOME, routes: Routes | None = None) -> Tensor:
    """Hidden states moved from where layers of kind `source` keep them to where those of `target` do.

    hidden: [T, C], this rank's tokens at the source, in packed order; returns [T', C], those at the target. Either
    place may be HOME. One all-to-all forward and one backward on ranks among which tokens change owners; else the
    same tensor, without any call. `routes.places` tells the tokens of a place.
    Raises SpecError for a kind that is not planned and for another number of tokens.
    """
    routes = routes or current_routes()
    places = routes.place_of(source), routes.place_of(target)
    num_tokens = len(routes.tokens_at(places[0]).position_ids)
    if hidden.dim() != 2 or len(hidden) != num_tokens:
        raise SpecError(
            f"hidden has shape {tuple(hidden.shape)}, expected [tokens at {places[0]}, C] = [{num_tokens}, C]"
        )
    routes.reached.add(places[1])
    if places not in routes.moves:
        return hidden
    move = routes.moves[places]
    (moved,) = exchange((hidden,), (move.rows,), routes.site(MOVES, routes.world.comm(move.block)))
    return moved


@outside_graph
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    layer: int | None = None,
    routes: Routes | None = None,
) -> Tensor:
    """Causal attention of this rank's packed tokens, wherever the plan computes it.

    q: [T, H, D], k: [T, Hk, D], v: [T, Hk, Dv]: the local tokens where layers of `kind` keep hidden states, in the
    order of the micro-batch; T may be 0.
    kind: the layer kind, e.g. "full_attention"; window: the sliding window if the caller wants it checked against
    the plan's.
    scale: of the scores, default D ** -0.5. sinks: [H], a logit per head that takes part in the softmax only.
    layer: its number, for messages; by default the attention calls of the micro-batch are counted.
    Returns [T, H, Dv] in the dtype of q, k and v; under autocast these are cast first, as a fused kernel's operands
    are. Runs two all-to-alls per part where this rank's exchange block is wider than one rank, else
    none.
    Raises SpecError for shapes or windows that are not the plan's.
    """
    routes = routes or current_routes()
    if routes.place_of(kind) not in routes.reached:
        raise SpecError(
            f"layers of kind {kind} keep their hidden states on other ranks in this plan of {sorted(routes.places)}: "
            f'bring them there with layerwise.relocate(hidden, target="{kind}"), and back after it, or use another '
            "strategy than redistribute"
        )
    num_tokens = len(routes.tokens_at(kind).position_ids)
    spec, route, parts = routes.attention[kind], routes.by_kind[kind], routes.parts[kind]
    q, k, v = cast_rows(q, k, v)
    check_call(q, k, v, spec, kind, window, sinks, num_tokens, routes.position_ids.device)
    progress = routes.world.progress
    progress.enter_layer(routes.microbatch, layer)
    computing = progress.point(f"attention of {kind}")
    comm = routes.world.comm(route.block)
    site_in, site_out = (routes.site(kind, comm, name) for name in ("exchange_in", "exchange_out"))
    there = tuple(Flight(part.to_tiles, site_in) for part in parts)
    back = tuple(Flight(part.from_tiles, site_out) for part in parts)
    tickets = depart(there, (q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)))
    returning = []
    for part, to_tiles, ticket, from_tiles in zip(parts, there, tickets, back, strict=True):
        rows = land((to_tiles,), [ticket])
        progress.at = computing
        with profiler_range(range_name("attention", kind)):
            out = attend(rows, part, spec, scale, sinks, routes.backend)
        returning += depart((from_tiles,), (out,))
    (local,) = land(back, returning)
    return local.view(q.shape[0], spec.num_heads, spec.v_head_dim)
