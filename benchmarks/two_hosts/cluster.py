"""torchrun on every host, as on a user's cluster: one command line per host, one rendezvous for all."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

from benchmarks.two_hosts.hosts import DEVICE, Host
from benchmarks.two_hosts.workload import RANKS_PER_HOST
from layerwise.errors import RankFailedError

PORT = 29400
PR_SET_PDEATHSIG = 1  # prctl(2): the child gets a signal when its parent dies
STOP_S = 10.0
TAIL_LINES = 40


def run_ranks(hosts: list[Host], module: str, argument: Path, folder: Path, timeout_s: float) -> None:
    """Run `python -m module argument` in RANKS_PER_HOST processes per host, and return when all have ended.

    The standard output of the first host's ranks is ours; what is said to standard error goes to files in `folder`.
    Raises RankFailedError where a rank fails, or all together take longer than `timeout_s`.
    """
    with ExitStack() as stack:
        logs = [folder / f"host{index}.log" for index in range(len(hosts))]
        agents = [
            stack.enter_context(_agent(hosts, index, [module, str(argument)], log)) for index, log in enumerate(logs)
        ]
        try:
            _watch(agents, logs, timeout_s)
        finally:
            _stop(agents)


def _agent(hosts: list[Host], index: int, worker: list[str], log: Path) -> subprocess.Popen[bytes]:
    """torchrun on one host. The first holds the rendezvous, which it cannot find out from its name."""
    words = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(len(hosts))]
    words += ["--nproc-per-node", str(RANKS_PER_HOST), "--rdzv-id", "two-hosts", "--rdzv-backend", "c10d"]
    words += ["--rdzv-endpoint", f"{hosts[0].address}:{PORT}", "--rdzv-conf", f"is_host={int(index == 0)}"]
    words += ["--local-addr", hosts[index].address, "--module", *worker]
    quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE} | quiet
    with log.open("wb") as errors:
        return subprocess.Popen(
            hosts[index].command(*words),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=None if index == 0 else errors,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is ours to handle
            preexec_fn=lambda: ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
        )


def _watch(agents: list[subprocess.Popen[bytes]], logs: list[Path], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while any(agent.poll() is None for agent in agents) and not any(agent.poll() for agent in agents):
        if time.monotonic() > until:
            raise RankFailedError(f"the ranks had not ended after {timeout_s:.0f} s: {_tail(logs[0])}")
        time.sleep(0.2)
    failed = [index for index, agent in enumerate(agents) if agent.poll()]
    if failed:
        raise RankFailedError(f"ranks of host {failed[0]} failed: {_tail(logs[failed[0]])}")


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(["the end of what they said:", *lines])


def _stop(agents: list[subprocess.Popen[bytes]]) -> None:
    """torchrun ends its ranks when it is told to end; their namespaces' removal ends any that are left."""
    for agent in agents:
        agent.terminate()
    for agent in agents:
        with suppress(subprocess.TimeoutExpired):
            agent.wait(STOP_S)
        agent.kill()
