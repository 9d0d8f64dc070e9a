"""Runs small enough to be made several times in a test: tiny model, made-up tokens, in this process and its forks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from layerwise.train.config import TrainConfig, load_config
from layerwise.train.run import load_data, prepare_folder, run_training
from tests.train.cli import DEMO, metrics

MODEL = [
    *("model.num_layers=2", "model.layer_types=[full_attention, sliding_attention]", "model.sliding_window=16"),
    *("model.hidden_size=32", "model.vocab_size=64", "model.num_experts=4"),
    *("model.moe_intermediate_size=16", "model.shared_intermediate_size=16"),
]
STEPS = ["tokens_per_step=600", "max_tokens_per_rank=700", "num_steps=8", "dtype=float64", "timeout_s=60"]


def write_samples(folder: Path, num_samples: int = 60) -> Path:
    """Token lists of very different lengths."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(3.5, 1.0, num_samples)).astype(int) + 1, 400)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": rng.integers(0, 64, n).tolist()}) + "\n" for n in lengths))
    return path


def small_config(samples: Path, num_nodes: int, ranks_per_node: int, *settings: str) -> TrainConfig:
    """A run of 8 steps of these samples."""
    cluster = [f"cluster.num_nodes={num_nodes}", f"cluster.ranks_per_node={ranks_per_node}"]
    data = [f"data.source={samples}", "data.overlong=error", "data.max_tokens_per_sample=null"]
    return load_config(DEMO, [*MODEL, *STEPS, *cluster, *data, *settings])


def train_small(config: TrainConfig, out: Path, *, resume: bool = False) -> list[dict[str, Any]]:
    """Train, and the metrics of every step."""
    prepare_folder(config, out, resume=resume)
    run_training(config, load_data([config]), out, resume=resume)
    return metrics(out)
