"""Small made-up runs and plans for pictures and reports."""

from typing import Any

import numpy as np

from layerwise.plan import MicrobatchPlan, Shard, StepPlan, shard_table, tile_table
from layerwise.report.page import RunRecord
from layerwise.spec import AttentionSpec


def metrics_row(step: int, loss: float, *, slow_bytes: int = 0, **changes: Any) -> dict[str, Any]:
    """One step of 16 ranks, one full and three sliding layers, all ranks in every exchange."""
    row = {
        "step": step,
        "loss": loss,
        "num_tokens": 8000,
        "num_valid_tokens": 7990,
        "step_s": 2.0,
        "mfu": 0.414,
        "plan_s": 0.012,
        "predicted_s": 0.0005,
        "tokens_per_rank_max": 600,
        "tokens_per_rank_mean": 500.0,
        "microbatches": 1,
        "exchange": {
            "full_attention": {"calls": 64, "fast_bytes": 3_000_000, "slow_bytes": 4_000_000},
            "sliding_attention": {"calls": 192, "fast_bytes": 9_000_000, "slow_bytes": slow_bytes},
        },
        "exchange_wait_s": {"full_attention": 0.2, "sliding_attention": 0.05},
        "predicted_saving": 0.0595,
        "parents": {"16": 1},
        "children": {"1": 3, "8": 1},
        "fallbacks": 0,
        "grad_norm": 1.5,
    }
    return row | changes


def run(strategy: str, rows: list[dict[str, Any]]) -> RunRecord:
    """A record of that run."""
    layers = {"full_attention": 1, "sliding_attention": 3}
    return RunRecord(strategy=strategy, rows=rows, num_ranks=16, num_layers=layers)


def plan_of(strategy: str, groups: list[tuple[int, list[int]]], *microbatches: list[int]) -> StepPlan:
    """16 ranks on two nodes; groups holds (length, ranks) of each sample, cut into equal parts.

    `microbatches` lists the samples of each; default: all in one. Without tiles, it does not validate.
    """
    parts = [
        Shard(sample, rank, int(cut[0]), int(cut[-1]) + 1)
        for sample, (length, ranks) in enumerate(groups)
        for rank, cut in zip(ranks, np.array_split(np.arange(length), len(ranks)), strict=True)
        if len(cut)
    ]
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=16, v_head_dim=16)
    return StepPlan(
        strategy=strategy,
        num_ranks=16,
        ranks_per_node=8,
        max_tokens_per_rank=10_000,
        lengths=tuple(length for length, _ in groups),
        attention={"full_attention": spec},
        microbatches=tuple(
            MicrobatchPlan(
                shards=shard_table([part for part in parts if part.sample in samples]),
                tiles={"full_attention": tile_table([])},
            )
            for samples in microbatches or [list(range(len(groups)))]
        ),
    )
