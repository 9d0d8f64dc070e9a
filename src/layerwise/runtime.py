"""Routes of one micro-batch on one rank, and the attention call that follows them.

    with use_routes(routes):
        loss = model(input_ids, position_ids)      # its attention layers call attention(q, k, v, kind=...)

Nothing here knows a strategy: a plan's shards and tiles are all there is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from layerwise.errors import PlanMismatchError, SpecError, UnsupportedError
from layerwise.exchange import Meter, Site, exchange
from layerwise.groups import World
from layerwise.kernels import varlen_attention
from layerwise.plan import Ints, StepPlan
from layerwise.route import Route, build_route
from layerwise.spec import AttentionSpec
from layerwise.traffic import Block, exchange_blocks, shard_blocks


@dataclass(frozen=True, kw_only=True, eq=False)
class Routes:
    """What one rank needs to run one micro-batch.

    attention, by_kind: the attention and the route of each layer kind.
    position_ids: int64 [T], each local token's position in its own sample.
    piece_index: int64 [T], which local shard each token belongs to; piece_samples: the sample of each, int64 [pieces].
    shard_block: the ranks that share samples with this one, or None; shared_samples: the samples that its ranks share.
    """

    world: World
    meter: Meter
    backend: str
    attention: dict[str, AttentionSpec]
    by_kind: dict[str, Route]
    position_ids: Tensor
    piece_index: Tensor
    piece_samples: Ints
    shard_block: Block | None
    shared_samples: Ints

    @property
    def num_pieces(self) -> int:
        """Local shards."""
        return len(self.piece_samples)


def build_routes(
    plan: StepPlan,
    index: int,
    world: World,
    *,
    meter: Meter | None = None,
    backend: str = "auto",
    device: torch.device | None = None,
) -> Routes:
    """The routes of this rank for micro-batch `index` of the plan. No collective: it may run ahead, on any thread."""
    if (plan.num_ranks, plan.ranks_per_node) != (world.num_ranks, world.ranks_per_node):
        raise SpecError(
            f"the plan is for {plan.num_ranks} ranks, {plan.ranks_per_node} per node, but the run has "
            f"{world.num_ranks} ranks, {world.ranks_per_node} per node: plan with the cluster that you run on"
        )
    microbatch = plan.microbatches[index]
    device = device or torch.device("cpu")
    local = microbatch.shards.rows[microbatch.shards.column("rank") == world.rank]
    lengths = local[:, 3] - local[:, 2]
    piece_index = np.repeat(np.arange(len(local)), lengths)
    within = np.arange(len(piece_index)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    blocks = shard_blocks(microbatch, plan.num_ranks, plan.ranks_per_node)
    shard_block = next((b for b in blocks if b.lo <= world.rank < b.hi), None)
    routes = {
        kind: build_route(
            microbatch,
            kind,
            spec,
            world.rank,
            exchange_blocks(microbatch, kind, plan.num_ranks, plan.ranks_per_node),
        ).to(device)
        for kind, spec in plan.attention.items()
    }
    return Routes(
        world=world,
        meter=meter or Meter(world.ranks_per_node),
        backend=backend,
        attention=plan.attention,
        by_kind=routes,
        position_ids=torch.from_numpy(local[:, 2][piece_index] + within).to(device),
        piece_index=torch.from_numpy(piece_index).to(device),
        piece_samples=local[:, 0],
        shard_block=shard_block,
        shared_samples=_shared_samples(
            microbatch.shards.column("sample"), microbatch.shards.column("rank"), shard_block
        ),
    )


def _shared_samples(sample: Ints, rank: Ints, block: Block | None) -> Ints:
    if block is None:
        return np.zeros(0, np.int64)
    inside = (block.lo <= rank) & (rank < block.hi)
    samples, counts = np.unique(sample[inside], return_counts=True)
    return samples[counts > 1]


def plan_blocks(plan: StepPlan) -> set[Block]:
    """Every block of ranks that some micro-batch of the plan needs a group for."""
    size = (plan.num_ranks, plan.ranks_per_node)
    return {
        block
        for microbatch in plan.microbatches
        for blocks in (
            shard_blocks(microbatch, *size),
            *(exchange_blocks(microbatch, kind, *size) for kind in plan.attention),
        )
        for block in blocks
    }


def agree(plan: StepPlan, world: World, *, num_valid_tokens: int, content: int = 0) -> int:
    """Compare the plan over all ranks, make its groups, and return the valid tokens of the whole step.

    To be called on every rank before the first collective that depends on the plan. `num_valid_tokens` are this rank's
    tokens with a label; `content` is a hash of the step's samples.
    Raises PlanMismatchError, on every rank, where two ranks hold different plans.
    """
    gathered = world.gather_ints([plan.digest() ^ content, num_valid_tokens])
    digests = [row[0] for row in gathered]
    for rank, digest in enumerate(digests):
        if digest != digests[0]:
            raise PlanMismatchError(
                f"rank 0 holds plan {digests[0]:016x} and rank {rank} holds {digest:016x}: all ranks must see the same "
                "samples and tokens in the same order (seed anything random by step, not by rank), and the same "
                "cluster, model, strategy and version"
            )
    world.prepare(plan_blocks(plan))
    return sum(row[1] for row in gathered)


_current: ContextVar[Routes | None] = ContextVar("layerwise_routes", default=None)


@contextmanager
def use_routes(routes: Routes) -> Iterator[Routes]:
    """Attention layers called inside follow these routes."""
    token = _current.set(routes)
    try:
        yield routes
    finally:
        _current.reset(token)


def current_routes() -> Routes:
    """The routes of the micro-batch being computed. Raises SpecError outside `use_routes`."""
    routes = _current.get()
    if routes is None:
        raise SpecError(
            "attention() was called without routes: wrap the forward in `with microbatch.routes():`; recompute during "
            "backward finds them through layerwise.checkpoint (or pass routes= explicitly)"
        )
    return routes


def checkpoint(fn: Callable[..., Any], *args: Any) -> Any:
    """Activation checkpointing of fn(*args) whose recompute replays the exchange with its own micro-batch's routes.

    The backward may run after other micro-batches' forwards, and on another thread.
    """
    routes = current_routes()

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return use_routes(routes), use_routes(routes)

    return torch_checkpoint(fn, *args, use_reentrant=False, context_fn=contexts)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    kind: str,
    window: int | None = None,
    scale: float | None = None,
    sinks: Tensor | None = None,
    routes: Routes | None = None,
) -> Tensor:
    """Causal attention of this rank's packed tokens, wherever the plan computes it.

    q: [T, H, D], k: [T, Hk, D], v: [T, Hk, Dv]: the local tokens, in the order of the micro-batch; T may be 0.
    kind: the layer kind, e.g. "full_attention"; window: the sliding window if the caller wants it checked against
    the plan's.
    scale: of the scores, default D ** -0.5. sinks: [H], a logit per head that takes part in the softmax only.
    Returns [T, H, Dv]. Runs two all-to-alls where this rank's exchange block is wider than one rank, else none.
    Raises SpecError for shapes or windows that are not the plan's.
    """
    routes = routes or current_routes()
    if kind not in routes.by_kind:
        raise SpecError(f"layer kind {kind!r} is not planned; the plan has {sorted(routes.by_kind)}")
    spec, route = routes.attention[kind], routes.by_kind[kind]
    _check_call(q, k, v, spec, kind, window, sinks, len(routes.position_ids))
    site = Site(kind, routes.world.comm(route.block), routes.meter)
    rows = exchange((q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)), route.to_tiles, site)
    out = _attend(rows, route, spec, scale, sinks, routes.backend)
    (local,) = exchange((out,), route.from_tiles, site)
    return local.view(q.shape[0], spec.num_heads, spec.v_head_dim)


def _attend(
    rows: tuple[Tensor, ...],
    route: Route,
    spec: AttentionSpec,
    scale: float | None,
    sinks: Tensor | None,
    backend: str,
) -> Tensor:
    """Run the kernel calls over the tile-side rows; [rows, Dv] in tile order."""
    q_rows, k_rows, v_rows = rows
    q_sizes = [call.segments.total_q * (call.h1 - call.h0) for call in route.calls]
    kv_sizes = [call.segments.total_k * call.num_kv_heads for call in route.calls]
    parts = zip(route.calls, q_rows.split(q_sizes), k_rows.split(kv_sizes), v_rows.split(kv_sizes), strict=True)
    outs = [
        varlen_attention(
            q.view(-1, call.h1 - call.h0, spec.head_dim),
            k.view(-1, call.num_kv_heads, spec.head_dim),
            v.view(-1, call.num_kv_heads, spec.v_head_dim),
            call.segments,
            window=spec.window,
            scale=scale,
            sinks=None if sinks is None else sinks[call.h0 : call.h1],
            backend=backend,
        ).reshape(-1, spec.v_head_dim)
        for call, q, k, v in parts
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)


def _check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: AttentionSpec,
    kind: str,
    window: int | None,
    sinks: Tensor | None,
    num_tokens: int,
) -> None:
    expected = {
        "q": (num_tokens, spec.num_heads, spec.head_dim),
        "k": (num_tokens, spec.num_kv_heads, spec.head_dim),
        "v": (num_tokens, spec.num_kv_heads, spec.v_head_dim),
    }
    for (name, shape), tensor in zip(expected.items(), (q, k, v), strict=True):
        if tuple(tensor.shape) != shape:
            raise SpecError(
                f"{kind}: {name} has shape {tuple(tensor.shape)}, the plan expects [tokens, heads, dim] = {shape}: "
                "packed rows without a batch dimension, heads before dim, KV heads not expanded"
            )
    if not q.dtype == k.dtype == v.dtype:
        raise SpecError(
            f"{kind}: q, k and v travel in one buffer and need one dtype, got {q.dtype}, {k.dtype}, {v.dtype}"
        )
    if window is not None and window != spec.window:
        raise UnsupportedError(
            f"{kind}: the layer asks for window={window}, the plan was made for window={spec.window}"
        )
    if sinks is not None and tuple(sinks.shape) != (spec.num_heads,):
        raise SpecError(
            f"{kind}: sinks have shape {tuple(sinks.shape)}, expected one per query head: ({spec.num_heads},)"
        )
