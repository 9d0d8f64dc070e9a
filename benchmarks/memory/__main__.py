"""Peak memory of a rank against the tokens that it holds, as a run reports it: a straight line.

    python -m benchmarks.memory [--tokens 2048,4096,6144,8192]

Two ranks with sharded state (fsdp) train two steps per point on the CPU, in processes of their own. The peak is of the
whole process, so the line does not start at zero. Exits with status 1 where a point is more than 5% off the line.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch

from benchmarks.options import each, whole
from layerwise.train.config import load_config
from layerwise.train.run import load_data, read_metrics, run_training

SAMPLE_TOKENS = 512
OFF_LIMIT = 0.05
MODEL = [
    *("model=demo", "model.hidden_size=128", "model.num_layers=4", "model.num_experts=4"),
    *("model.vocab_size=16384", "cluster=demo", "cluster.num_nodes=1", "cluster.ranks_per_node=2"),
]


def peak_mib(num_tokens: int, recompute: bool) -> float:
    """The most that a rank held, with so many tokens on each of two ranks."""
    with tempfile.TemporaryDirectory(prefix="layerwise-memory-") as name:
        return _train(num_tokens, recompute, Path(name))


def _train(num_tokens: int, recompute: bool, folder: Path) -> float:
    samples = [{"input_ids": [7] * SAMPLE_TOKENS}] * (2 * num_tokens // SAMPLE_TOKENS)
    (folder / "rows.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    sizes = [f"max_tokens_per_rank={num_tokens}", f"tokens_per_step={2 * num_tokens}", "num_steps=2"]
    data = f"data.source={folder / 'rows.jsonl'}"
    config = load_config(None, [*MODEL, *sizes, data, "sharding=fsdp", f"activation_checkpointing={recompute}"])
    run_training(config, load_data([config]), folder)
    return float(read_metrics(folder)[-1]["peak_bytes_max"]) / 2**20


def main() -> int:
    """Print the points and the line through them."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    points = each(whole(SAMPLE_TOKENS, of=SAMPLE_TOKENS))
    parser.add_argument("--tokens", type=points, default="2048,4096,6144,8192", help="per rank, at least three points")
    tokens = np.array(parser.parse_args().tokens)
    if len(set(tokens)) < 3:
        parser.error("argument --tokens: a line goes through any two points; give three or more")
    torch.set_num_threads(1)
    worst = 0.0
    for recompute in (False, True):
        peaks = np.array([peak_mib(int(count), recompute) for count in tokens])
        slope, start = np.polyfit(tokens, peaks, 1)
        line = start + slope * tokens
        off = np.abs(peaks / line - 1)
        worst = max(worst, float(off.max()))
        print(f"activation_checkpointing={recompute}: {start:.0f} MiB + {slope * 1024:.1f} KiB per token")
        for count, peak, expected in zip(tokens, peaks, line, strict=True):
            print(f"  {count:6d} tokens per rank: {peak:7.1f} MiB, line {expected:7.1f} MiB")
    print(f"largest distance from the line: {worst:.1%} (limit {OFF_LIMIT:.0%})")
    return 0 if worst <= OFF_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
