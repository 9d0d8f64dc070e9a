"""What the bench computes: a small cluster, a small model, and the lengths of a few steps.

The paper's setting made smaller: samples are 64 times shorter, and links and FLOP rates are so much slower that a step
takes seconds. What stays is the proportion of exchange to compute: an MFU of `dynamic` near 60%.
"""

from __future__ import annotations

import numpy as np

from benchmarks.two_hosts.links import Links
from layerwise.evaluate.workload import LengthDistribution
from layerwise.plan import Ints
from layerwise.planners import Planner
from layerwise.spec import FULL, SLIDING, ClusterSpec, ModelSpec

STRATEGIES = ("static", "dynamic", "halo", "redistribute", "repack", "repack+parents", "joint")
# Those that are measured with overlap too: attention sites in parts, of which some travel while others compute.
OVERLAPPED = ("dynamic", "repack+parents")
RANKS_PER_HOST = 8
MAX_TOKENS_PER_RANK = 512
# What links are shaped to, per rank while all ranks are busy. They are slow so that the time that two cores take to
# wake 16 processes for one all-to-all, the latency, is a small part of a step.
SLOW_BYTES_PER_S = 1e6
MESSAGE_LATENCY_S = 0.5e-3
PEAK_FLOPS_PER_S = 63e6
# The long samples of each step, in tokens, by the number of hosts. `dynamic` gives one of them more ranks than a host
# has.
LONG_TOKENS = {2: ((1700,), (2200, 900)), 4: ((2600, 1800), (2600,))}
FILL = 0.7

# One full-attention layer per three sliding ones. hidden_size is num_heads x head_dim, so that the hidden state of a
# token can serve as its query heads.
MODEL = ModelSpec(
    name="two-hosts",
    num_layers=4,
    layer_types=(FULL, SLIDING, SLIDING, SLIDING),
    hidden_size=128,
    vocab_size=256,
    num_heads=16,
    num_kv_heads=4,
    head_dim=8,
    sliding_window=64,
    num_experts=8,
    experts_per_token=4,
    moe_intermediate_size=8,
)

# The web pages of the paper's workload (src/layerwise/presets/workload-paper.yaml), 64 times shorter.
SHORT = LengthDistribution(median_tokens=463 / 64, sigma=1.246, tail_share=0.0467, tail_index=1.692, max_tokens=128)


def wanted_links(ratio: float) -> Links:
    """What strategies plan for, so that their plans are the same in every run."""
    return Links(
        fast_bytes_per_s=ratio * SLOW_BYTES_PER_S, slow_bytes_per_s=SLOW_BYTES_PER_S, latency_s=MESSAGE_LATENCY_S
    )


def cluster_of(num_hosts: int, links: Links) -> ClusterSpec:
    """A cluster with these links, and accelerators as slow as the links."""
    return ClusterSpec(
        name="two-hosts",
        num_nodes=num_hosts,
        ranks_per_node=RANKS_PER_HOST,
        fast_bytes_per_s=links.fast_bytes_per_s,
        slow_bytes_per_s=links.slow_bytes_per_s,
        message_latency_s=links.latency_s,
        peak_flops_per_s=PEAK_FLOPS_PER_S,
        attention_efficiency=0.80,
        linear_efficiency=0.72,
        element_bytes=4,
    )


def step_lengths(num_hosts: int, step: int) -> Ints:
    """Tokens of each sample of a step, int64 [samples]: long ones, and short ones up to FILL of the budget."""
    long = LONG_TOKENS[num_hosts][step]
    budget = FILL * num_hosts * RANKS_PER_HOST * MAX_TOKENS_PER_RANK - sum(long)
    short = SHORT.quantile(np.random.default_rng(step).random(int(budget)))
    return np.concatenate([long, short[: int(np.searchsorted(np.cumsum(short), budget))]])


def planner_of(strategy: str, cluster: ClusterSpec) -> Planner:
    """The strategy on the bench's model; static groups are one host."""
    options = {"sp_degree": RANKS_PER_HOST} if strategy == "static" else {}
    return Planner(
        strategy=strategy, cluster=cluster, model=MODEL, max_tokens_per_rank=MAX_TOKENS_PER_RANK, options=options
    )
