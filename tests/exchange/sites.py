"""One attention site of every layer kind, run on the ranks of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from layerwise import LocalWorld
from layerwise.exchange import Count, Meter
from layerwise.groups import World
from layerwise.plan import StepPlan
from layerwise.runtime import attention, build_routes, plan_blocks


class Site(NamedTuple):
    """What one rank has of a site: the output, the gradients of q, k and v, and what it sent."""

    tensors: list[Tensor]
    count: Count


def run_rank(
    plan: StepPlan, overlap_parts: int, world: World, wrap: Callable[[Any], Any] = lambda comm: comm
) -> dict[str, Site]:
    """By layer kind; float64 from a fixed seed, through comms that `wrap` wraps."""
    world.prepare(plan_blocks(plan))
    plain_comm = world.comm
    world.comm = lambda block: None if block is None else wrap(plain_comm(block))
    meter = Meter(plan.ranks_per_node)
    routes = build_routes(replace(plan, overlap_parts=overlap_parts), 0, world, meter=meter)
    routes.reached.update(routes.places)  # rows are made where they are needed
    sites = {}
    for kind, spec in plan.attention.items():
        make = torch.Generator().manual_seed(world.rank)
        num_tokens = len(routes.tokens_at(kind).position_ids)
        shapes = [(spec.num_heads, spec.head_dim), (spec.num_kv_heads, spec.head_dim)]
        shapes += [(spec.num_kv_heads, spec.v_head_dim), (spec.num_heads, spec.v_head_dim)]
        *rows, weight = (torch.randn(num_tokens, *s, dtype=torch.float64, generator=make) for s in shapes)
        rows = [x.requires_grad_() for x in rows]
        out = attention(*rows, kind=kind, routes=routes)
        grads = torch.autograd.grad((out * weight).sum(), rows)
        sites[kind] = Site([out.detach(), *grads], meter.counts.get(kind, Count()))
    world.comm = plain_comm
    return sites


def run_sites(
    plan: StepPlan, overlap_parts: int, wrap: Callable[[Any], Any] = lambda comm: comm
) -> list[dict[str, Site]]:
    """By rank."""
    world = LocalWorld(plan.num_ranks, plan.ranks_per_node)
    return world.run(lambda world: run_rank(plan, overlap_parts, world, wrap))


def assert_close(before: dict[str, Site], after: dict[str, Site], rtol: float = 1e-12, atol: float = 1e-13) -> None:
    """The same numbers of one rank, by default up to the order of sums."""
    for kind, site in before.items():
        for a, b in zip(site.tensors, after[kind].tensors, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
