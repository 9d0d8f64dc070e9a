"""Run a script on several gloo ranks of one machine: python -m tests.hf.ranks 4 script.py [arguments]

As torchrun does, but ranks are forked from one process that has imported what takes long and computes nothing itself.
The first rank that fails ends the others.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

TIMEOUT_S = 400


def run_ranks(num_ranks: int, script: Path, *arguments: object) -> str:
    """What the script printed, of all ranks together. Raises CalledProcessError."""
    command = [sys.executable, "-m", "tests.hf.ranks", str(num_ranks), str(script), *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


def main(num_ranks: int, script: str, arguments: list[str]) -> int:
    for name in ("layerwise.hf.trainer", "transformers.models.gpt_oss.modeling_gpt_oss"):
        importlib.import_module(name)
    _shard_on_cpus()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = set()
    for rank in range(num_ranks):
        child = os.fork()
        if child == 0:
            signal.alarm(TIMEOUT_S)
            where = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
            os.environ.update({name: str(value) for name, value in where.items()})
            os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
            sys.argv = [script, *arguments]
            sys.path.insert(0, str(Path(script).parent))
            runpy.run_path(script, run_name="__main__")
            return 0
        children.add(child)
    failed = False
    while children:
        child, status = os.wait()
        children.remove(child)
        if status and not failed:
            failed = True
            for other in children:
                os.kill(other, signal.SIGTERM)
    return int(failed)


def _shard_on_cpus() -> None:
    """Accelerate leaves FSDP out on CPUs, without a word; here it takes the ranks for devices as any."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
            self.distributed_type, self.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = init


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:]))
