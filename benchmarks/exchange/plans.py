"""Steps of every strategy with wide parents, of a chosen number of bytes per rank."""

from __future__ import annotations

import numpy as np

from layerwise.plan import StepPlan
from layerwise.planners import Planner
from layerwise.spec import ClusterSpec, ModelSpec

MB = 1_000_000
ELEMENT_BYTES = 4  # float32
MODEL = ModelSpec(
    num_layers=2,
    layer_types=("full_attention", "sliding_attention"),
    hidden_size=1024,
    vocab_size=128,
    num_heads=16,
    num_kv_heads=4,
    head_dim=64,
    sliding_window=64,
    intermediate_size=1024,
)
# Q, K and V of one token.
TOKEN_BYTES = (MODEL.num_heads + 2 * MODEL.num_kv_heads) * MODEL.head_dim * ELEMENT_BYTES


def make_cluster(num_ranks: int) -> ClusterSpec:
    """Two nodes on which attention is so slow that the longest sample is worth all ranks."""
    return ClusterSpec(
        num_nodes=2, ranks_per_node=num_ranks // 2, peak_flops_per_s=1e9, attention_efficiency=0.001, element_bytes=4
    )


def plan_of(strategy: str, num_ranks: int, megabytes: float) -> StepPlan:
    """One micro-batch whose Q, K and V rows are `megabytes` MB per rank on average.

    Two fifths of the tokens are one sample, as many as a node can hold; the others are a dozen per rank.
    """
    total = int(megabytes * MB / TOKEN_BYTES) * num_ranks
    shares = np.random.default_rng(0).lognormal(0.0, 1.0, 12 * num_ranks)
    short = np.maximum((0.6 * total * shares / shares.sum()).astype(int), 1)
    lengths = [int(0.4 * total), *short.tolist()]
    cluster = make_cluster(num_ranks)
    options = {"static": {"sp_degree": num_ranks}, "dynamic": {}}.get(strategy, {"fallback": False})
    budget = int(1.25 * sum(lengths) / num_ranks) + 16
    plan = Planner(strategy=strategy, cluster=cluster, model=MODEL, max_tokens_per_rank=budget, options=options)(
        lengths
    )
    assert len(plan.microbatches) == 1, "the budget has room for one micro-batch"
    return plan
