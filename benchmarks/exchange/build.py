"""CPU time to build one rank's route of a layer kind, for 32K tokens of 64 query and 16 KV heads on one core."""

from __future__ import annotations

from time import process_time

import numpy as np

from layerwise.plan import Ints, StepPlan
from layerwise.planners import Planner
from layerwise.route import build_route
from layerwise.spec import ClusterSpec, ModelSpec
from layerwise.traffic import exchange_blocks

NUM_NODES, RANKS_PER_NODE, LOCAL_TOKENS = 4, 8, 32_768
MODEL = ModelSpec(
    num_layers=2,
    layer_types=("full_attention", "sliding_attention"),
    hidden_size=8192,
    vocab_size=128,
    num_heads=64,
    num_kv_heads=16,
    head_dim=128,
    sliding_window=4096,
    intermediate_size=1024,
)


def draw_lengths() -> Ints:
    """Samples of 1K tokens in the median and of up to 128K, for about 32K tokens per rank."""
    total = NUM_NODES * RANKS_PER_NODE * LOCAL_TOKENS
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(1000), 1.5, 2000), 1, 131_072).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), total))]


def plan_of(strategy: str) -> StepPlan:
    """A step of one micro-batch with those lengths."""
    options = {"static": {"sp_degree": RANKS_PER_NODE}, "dynamic": {}}.get(strategy, {"fallback": False})
    return Planner(
        strategy=strategy,
        cluster=ClusterSpec(num_nodes=NUM_NODES, ranks_per_node=RANKS_PER_NODE, attention_efficiency=0.05),
        model=MODEL,
        max_tokens_per_rank=int(1.3 * LOCAL_TOKENS),
        options=options,
    )(draw_lengths())


def build_ms(strategy: str, kind: str, repeats: int) -> float:
    """Median milliseconds of the slowest of a few ranks."""
    plan = plan_of(strategy)
    (microbatch,) = plan.microbatches
    blocks = exchange_blocks(microbatch, kind, plan.num_ranks, plan.ranks_per_node)
    slowest = 0.0
    for rank in range(0, plan.num_ranks, RANKS_PER_NODE + 1):
        spent = []
        for _ in range(repeats):
            start = process_time()
            build_route(microbatch, kind, plan.attention[kind], rank, blocks)
            spent.append(process_time() - start)
        slowest = max(slowest, float(np.median(spent)))
    return 1000 * slowest
