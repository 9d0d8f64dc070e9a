"""The all-to-alls of other libraries around attention, on the even inputs that they need.

Each function takes q, k and v of one sample, [tokens of this rank, heads, D], to heads of all tokens, takes q back as
if it were the output, and runs backward. The peers' own functions are called as their attention modules call them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.exchange.plans import MODEL
from benchmarks.exchange.step import make_step
from layerwise.groups import World
from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table

Run = Callable[[], object]
FULL = "full_attention"


def even_plan(num_ranks: int, ranks_per_node: int, tokens_per_rank: int) -> StepPlan:
    """One sample on all ranks, equally many tokens and heads on each."""
    spec = MODEL.attention(FULL)
    heads, length = spec.num_heads // num_ranks, num_ranks * tokens_per_rank
    shards = [Shard(0, rank, rank * tokens_per_rank, (rank + 1) * tokens_per_rank) for rank in range(num_ranks)]
    tiles = [Tile(0, rank, 0, length, 0, rank * heads, (rank + 1) * heads) for rank in range(num_ranks)]
    return StepPlan(
        strategy="even",
        num_ranks=num_ranks,
        ranks_per_node=ranks_per_node,
        max_tokens_per_rank=tokens_per_rank,
        lengths=(length,),
        attention={FULL: spec},
        microbatches=(MicrobatchPlan(shards=shard_table(shards), tiles={FULL: tile_table(tiles)}),),
    )


def make_peers(world: World, tokens_per_rank: int) -> dict[str, Run]:
    """Ours first, then those that are installed."""
    plan = even_plan(world.num_ranks, world.ranks_per_node, tokens_per_rank)
    runs = {"layerwise": make_step(plan, world, 1).run}
    if find_spec("deepspeed"):
        runs["DeepSpeed, batch first"] = _ulysses(_deepspeed(0), tokens_per_rank, world.num_ranks, batch_dim=0)
        runs["DeepSpeed, sequence first"] = _ulysses(_deepspeed(1), tokens_per_rank, world.num_ranks, batch_dim=1)
    if find_spec("yunchang"):
        runs["long-context-attention"] = _ulysses(_yunchang(), tokens_per_rank, world.num_ranks, batch_dim=0)
    return runs


def _deepspeed(batch_dim: int) -> Callable[[Tensor, bool], Tensor]:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    from deepspeed.comm import init_distributed
    from deepspeed.sequence.layer import _SeqAllToAll

    init_distributed(dist_backend="gloo", verbose=False)  # around the groups that exist
    sequence_dim = 1 - batch_dim
    return lambda x, there: _SeqAllToAll.apply(
        dist.group.WORLD, x, *((2, sequence_dim) if there else (sequence_dim, 2)), batch_dim
    )


def _yunchang() -> Callable[[Tensor, bool], Tensor]:
    from yunchang.comm.all_to_all import SeqAllToAll4D

    return lambda x, there: SeqAllToAll4D.apply(dist.group.WORLD, x, *((2, 1) if there else (1, 2)), False)


def _ulysses(swap: Callable[[Tensor, bool], Tensor], num_tokens: int, num_ranks: int, batch_dim: int) -> Run:
    spec = MODEL.attention(FULL)

    def random(tokens: int, heads: int) -> Tensor:
        return torch.randn(tokens, heads, spec.head_dim).unsqueeze(batch_dim)

    heads = (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
    rows = [random(num_tokens, n).requires_grad_() for n in heads]
    grads = [random(num_tokens, spec.num_heads)]
    grads += [random(num_tokens * num_ranks, spec.num_kv_heads // num_ranks) for _ in range(2)]

    def run() -> tuple[Tensor, ...]:
        q, k, v = (swap(x, True) for x in rows)
        return (q, k, v, *torch.autograd.grad((swap(q, False), k, v), rows, grads))

    return run
