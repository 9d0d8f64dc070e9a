"""Steps of a given number of samples, with lengths of the evaluation workload, for clusters of any size."""

from __future__ import annotations

import os
from math import gcd

import numpy as np

from layerwise.evaluate.workload import Workload, load_workload
from layerwise.plan import Ints
from layerwise.planners import Planner


def use_one_core() -> None:
    """Keep this process on one of the cores it may use, so that one core's time is measured."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def resized(num_ranks: int) -> Workload:
    """The `paper` workload on this many ranks, nodes of 8."""
    workload = load_workload("paper")
    cluster = workload.cluster_spec
    settings = {
        "num_nodes": num_ranks // cluster.ranks_per_node,
        "expert_parallel_degree": gcd(num_ranks, cluster.expert_parallel_degree),
    }
    return workload.change(cluster=cluster.model_dump() | settings)


def draw_samples(workload: Workload, num_steps: int, num_samples: int) -> list[Ints]:
    """`num_steps` steps of exactly `num_samples` lengths, int64 [samples] each."""
    lengths: Ints = np.zeros(0, dtype=np.int64)
    drawn = 1
    while len(lengths) < num_steps * num_samples:
        drawn *= 2
        lengths = np.concatenate(workload.draw_steps(drawn))
    return list(lengths[: num_steps * num_samples].reshape(num_steps, num_samples))


def make_planner(workload: Workload, strategy: str, max_tokens_per_rank: int) -> Planner:
    """A planner for the workload's cluster and model; `static` groups two nodes, so that any sample fits."""
    two_nodes = {"sp_degree": 2 * workload.cluster_spec.ranks_per_node}
    return Planner(
        strategy=strategy,
        cluster=workload.cluster_spec,
        model=workload.model_spec,
        max_tokens_per_rank=max_tokens_per_rank,
        options=two_nodes if strategy == "static" else {},
    )
