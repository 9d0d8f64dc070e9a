"""Running the command line as people do: in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).parents[2] / "examples" / "demo.yaml"
# Small enough for 16 ranks on two cores. Attention is slow beside the links of this cluster, so that some of the steps
# have a parent over both nodes all the same.
SMALL = [
    *("--set", "model.num_layers=2"),
    *("--set", "model.layer_types=[full_attention, sliding_attention]"),
    *("--set", "tokens_per_step=2200"),
    *("--set", "max_tokens_per_rank=224"),
    *("--set", "data.max_tokens_per_sample=1000"),
    *("--set", "cluster.attention_efficiency=0.1"),
    *("--set", "cluster.message_latency_s=2e-4"),
]

# A shell that starts jobs in the background has them ignore Ctrl-C, and children inherit that.
_START = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from layerwise.cli import main; main()"
)


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "COLUMNS": "200"}


def start(*arguments: object) -> subprocess.Popen[str]:
    """Start `layerwise ...`."""
    command = [sys.executable, "-c", _START, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())


def run(*arguments: object, timeout_s: float = 110) -> subprocess.CompletedProcess[str]:
    """Run `layerwise ...` to its end."""
    process = start(*arguments)
    try:
        out, err = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
