"""Small clusters, models and lengths that the planning tests share."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from layerwise.plan import StepPlan
from layerwise.planners import Planner, plan_step
from layerwise.spec import ClusterSpec, ModelSpec

# ranks -> (nodes, ranks per node); 6 and 12 have nodes that are no power of two, or no power of two of nodes.
WORLDS = {
    1: (1, 1),
    2: (1, 2),
    4: (2, 2),
    6: (1, 6),
    8: (2, 4),
    12: (3, 4),
    16: (2, 8),
    32: (4, 8),
    64: (8, 8),
}


def make_cluster(num_ranks: int, **settings: Any) -> ClusterSpec:
    nodes, ranks_per_node = WORLDS[num_ranks]
    return ClusterSpec(num_nodes=nodes, ranks_per_node=ranks_per_node, **settings)


def make_model(num_heads: int = 8, num_kv_heads: int = 2, **settings: Any) -> ModelSpec:
    base: dict[str, Any] = {
        "num_layers": 4,
        "layer_types": ("full_attention", "sliding_attention", "sliding_attention", "sliding_attention"),
        "hidden_size": 32,
        "vocab_size": 64,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 8,
        "sliding_window": 16,
        "intermediate_size": 64,
    }
    return ModelSpec(**{**base, **settings})


# Rates at which long samples are worth wide groups and the slow link hurts, at thousands of tokens.
WIDE_CLUSTER = make_cluster(
    16,
    fast_bytes_per_s=100e6,
    slow_bytes_per_s=100e6 / 7,
    message_latency_s=1e-5,
    peak_flops_per_s=2e9,
    element_bytes=4,
)
WIDE_MODEL = make_model(num_kv_heads=4, hidden_size=64, head_dim=16, sliding_window=256, intermediate_size=192)


def wide_plan(strategy: str, lengths: list[int], budget: int = 2560, **options: Any) -> StepPlan:
    """A step on WIDE_CLUSTER, where the longest samples span nodes."""
    return plan_step(
        lengths,
        cluster=WIDE_CLUSTER,
        model=WIDE_MODEL,
        strategy=strategy,
        max_tokens_per_rank=budget,
        **options,
    )


def tiny_wide_planner(
    strategy: str, num_ranks: int, model: ModelSpec, lengths: Sequence[int], *, microbatches: int = 1, spare: int = 8
) -> Planner:
    """A planner with wide groups although the samples are tiny, and room for them in about so many micro-batches.

    Attention is dear beside the links, and parents stay repacked where the cost model would leave them wide.
    """
    per_node = max(1, num_ranks // 2)
    cluster = ClusterSpec(
        num_nodes=num_ranks // per_node,
        ranks_per_node=per_node,
        peak_flops_per_s=1e9,
        attention_efficiency=0.001,
    )
    budget = max(-(-int(1.5 * sum(lengths)) // (num_ranks * microbatches)) + spare, -(-max(lengths) // per_node))
    options = {"static": {"sp_degree": per_node}, "dynamic": {}}.get(strategy, {"fallback": False})
    return Planner(strategy=strategy, cluster=cluster, model=model, max_tokens_per_rank=budget, options=options)


def long_tailed(seed: int, num_samples: int, cap: int, log_mean: float = 4.0) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.minimum(np.exp(rng.normal(log_mean, 1.3, num_samples)).astype(int) + 1, cap).tolist()
