"""One step's exchanges on one rank, and the same bytes through nothing but the collective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.exchange import STAGING, GroupComm, Meter, Site, exchange
from layerwise.groups import World
from layerwise.plan import HOME, StepPlan
from layerwise.route import RowMap, Side
from layerwise.runtime import Routes, build_routes, plan_blocks, relocate
from layerwise.spec import AttentionSpec

# (process group, elements to send to each peer, elements to receive from each)
Call = tuple[Any, list[int], list[int]]


@dataclass(frozen=True)
class StepExchange:
    """The rows of every layer kind to their tiles and back, forward and backward, without any attention."""

    routes: Routes
    inputs: dict[str, tuple[Tensor, ...]]
    grads: dict[str, tuple[Tensor, ...]]
    hidden: Tensor

    def run(self) -> list[Tensor]:
        """All exchanges of one step, and the moves of a strategy that has them; a step's rows live until its end."""
        made: list[Tensor] = []
        for kind, rows in self.inputs.items():
            moved = relocate(relocate(self.hidden, target=kind, routes=self.routes), source=kind, routes=self.routes)
            if moved is not self.hidden:
                made += [moved, *torch.autograd.grad(moved, self.hidden, self.hidden.detach())]
            arrived = self.there_and_back(kind)
            made += [*arrived, *torch.autograd.grad(arrived, rows, self.grads[kind])]
        return made

    def there_and_back(self, kind: str) -> tuple[Tensor, ...]:
        """Q as if it were the output, and K and V as the kernel gets them."""
        route = self.routes.by_kind[kind]
        site = Site(kind, self.routes.world.comm(route.block), self.routes.meter)
        q, k, v = exchange(self.inputs[kind], route.to_tiles, site)
        return *exchange((q,), route.from_tiles, site), k, v


def make_step(plan: StepPlan, world: World, hidden_size: int) -> StepExchange:
    """Random rows for this rank's part of the plan, float32."""
    world.prepare(plan_blocks(plan))
    routes = build_routes(plan, 0, world, meter=Meter(plan.ranks_per_node))
    random = torch.Generator().manual_seed(world.rank)

    def rows(num_rows: int, width: int) -> Tensor:
        return torch.randn(num_rows, width, generator=random)

    inputs, grads = {}, {}
    for kind, spec in plan.attention.items():
        num_tokens = len(routes.tokens_at(kind).position_ids)
        inputs[kind] = tuple(rows(num_tokens * heads, spec.head_dim).requires_grad_() for heads in _heads(spec))
        tile_rows = [row_map.dst.num_rows for row_map in routes.by_kind[kind].to_tiles]
        num_rows = [num_tokens * spec.num_heads, *tile_rows[1:]]
        grads[kind] = tuple(rows(n, spec.head_dim) for n in num_rows)
    hidden = rows(len(routes.tokens_at(HOME).position_ids), hidden_size).requires_grad_()
    return StepExchange(routes, inputs, grads, hidden)


def _heads(spec: AttentionSpec) -> tuple[int, int, int]:
    return spec.num_heads, spec.num_kv_heads, spec.num_kv_heads


def bare_calls(step: StepExchange) -> Calls:
    """The all-to-alls of the step; as in any bare all_to_all_single, the rows that a rank keeps are part of it."""
    routes, calls = step.routes, []
    for kind in step.inputs:
        place = routes.place_of(kind)
        moves = [routes.moves[key] for key in ((HOME, place), (place, HOME)) if key in routes.moves]
        for move in moves:
            calls += _both_ways((move.rows,), [step.hidden.shape[1]], routes.world.comm(move.block))
        route = routes.by_kind[kind]
        widths, comm = [x.shape[1] for x in step.inputs[kind]], routes.world.comm(route.block)
        calls += _both_ways(route.to_tiles, widths, comm) + _both_ways(route.from_tiles, widths[:1], comm)
    return Calls(calls, torch.randn(max((sum(send_splits) for _, send_splits, _ in calls), default=0)))


@dataclass(frozen=True)
class Calls:
    """All-to-alls that were worked out, and a buffer to send from."""

    calls: list[Call]
    send: Tensor

    def run(self) -> list[Tensor]:
        """Nothing else: each from a buffer that is ready into a new tensor. A step's rows live until its end."""
        results = []
        for group, send_splits, recv_splits in self.calls:
            results.append(self.send.new_empty(sum(recv_splits)))
            send = self.send[: sum(send_splits)]
            dist.all_to_all_single(results[-1], send, recv_splits, send_splits, group=group)
        return results

    def run_with_copies(self) -> list[Tensor]:
        """Between two plain copies of the same bytes, into a new tensor: an exchange that reorders rows at no cost."""
        results = []
        for group, send_splits, recv_splits in self.calls:
            source = self.send[: sum(send_splits)]
            send, recv = STAGING.take(len(source), self.send), STAGING.take(sum(recv_splits), self.send)
            send.copy_(source)
            dist.all_to_all_single(recv, send, recv_splits, send_splits, group=group)
            results.append(recv.clone())
            STAGING.give(send, recv)
        return results


def _both_ways(maps: tuple[RowMap, ...], widths: list[int], comm: GroupComm | None) -> list[Call]:
    if comm is None:
        return []
    there, back = (_elements([getattr(m, end) for m in maps], widths, comm.block.size) for end in ("src", "dst"))
    return [(comm.group, there, back), (comm.group, back, there)]


def _elements(sides: list[Side], widths: list[int], num_peers: int) -> list[int]:
    """Elements per peer, those of the rank itself included."""
    elements = np.zeros(num_peers, np.int64)
    for side, width in zip(sides, widths, strict=True):
        np.add.at(elements, side.peer, side.pieces.sizes * width)
    return elements.tolist()
