"""The training that is disturbed: a tiny mixture of experts in float64, made-up tokens, a few local ranks."""

from __future__ import annotations

import json
import multiprocessing
import os
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.train.config import TrainConfig, load_config
from layerwise.train.run import METRICS_FILE, load_data, prepare_folder, run_training

# (nodes, ranks per node, settings): every restart takes another one.
SHAPES: list[tuple[int, int, list[str]]] = [
    (1, 2, ["sharding=fsdp"]),
    (1, 1, ["strategy=static", "strategy_options={sp_degree: 1}"]),
    (2, 1, ["strategy=dynamic"]),
    (1, 3, ["strategy=joint"]),
    (1, 2, ["sharding=hsdp", "expert_parallel=2"]),
    (2, 2, []),
]
_SETTINGS = [
    *("model=demo", "model.num_layers=2", "model.layer_types=[full_attention, sliding_attention]"),
    *("model.sliding_window=16", "model.hidden_size=32", "model.vocab_size=64", "model.num_experts=4"),
    *("model.moe_intermediate_size=16", "model.shared_intermediate_size=16"),
    *("cluster=demo", "tokens_per_step=400", "max_tokens_per_rank=400", "dtype=float64", "timeout_s=60"),
    *("checkpoint.every_steps=5", "checkpoint.keep=3"),
]


def write_samples(folder: Path) -> Path:
    """200 token lists, some of them ten times as long as others."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(rng.normal(3.5, 1.0, 200)).astype(int) + 1, 400)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"input_ids": rng.integers(0, 64, n).tolist()}) + "\n" for n in lengths))
    return path


def make_config(samples: Path, num_steps: int, shape: tuple[int, int, list[str]]) -> TrainConfig:
    """The same training on ranks of this shape."""
    nodes, ranks, settings = shape
    size = [f"cluster.num_nodes={nodes}", f"cluster.ranks_per_node={ranks}", f"num_steps={num_steps}"]
    return load_config(None, [*_SETTINGS, *size, f"data.source={samples}", *settings])


def start(config: TrainConfig, out: Path) -> BaseProcess:
    """Start a launcher, which starts the ranks; it begins a run in `out` or goes on with the one there."""
    process = multiprocessing.get_context("fork").Process(target=_launcher, args=(config, out))
    process.start()
    return process


def _launcher(config: TrainConfig, out: Path) -> None:
    log = os.open(out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    try:
        prepare_folder(config, out, resume=True)
        run_training(config, load_data([config]), out, resume=True)
    except LayerwiseError as error:
        os.write(2, f"layerwise: {error}\n".encode())
        os._exit(1)


def whole_rows(out: Path) -> list[dict[str, Any]]:
    """The steps that a run, which may be writing just now, has recorded."""
    path = out / METRICS_FILE
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]
