"""Training and the doctor under torchrun on two hosts, which are network namespaces with names of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.two_hosts import hosts
from benchmarks.two_hosts.hosts import DEVICE, Host
from layerwise.errors import UnsupportedError
from layerwise.train.checkpoint import step_folders
from tests.train.cli import environment, metrics
from tests.train.small import small_config, train_small, write_samples

pytestmark = [pytest.mark.ranks, pytest.mark.slow, pytest.mark.hosts, pytest.mark.timeout(300)]

PORT, RANKS_PER_HOST = 29400, 2
# Namespaces of the network share the host name, by which ranks tell hosts apart; this one gives them their own.
NAMED = (
    "import os, socket, sys; socket.sethostname(sys.argv[1]); os.execv(sys.executable, [sys.executable, *sys.argv[2:]])"
)


@pytest.fixture(scope="module")
def two_hosts() -> Iterator[list[Host]]:
    try:
        hosts.check_tools()
        with hosts.make_hosts(2) as made:
            yield made
    except UnsupportedError as error:
        pytest.skip(f"hosts cannot be made here: {error}")


@contextmanager
def start_torchrun(
    two_hosts: list[Host], launcher_options: list[str], *arguments: object, interface: str = DEVICE
) -> Iterator[list[subprocess.Popen[str]]]:
    """`torchrun ... -m layerwise ARGUMENTS` on both hosts, ended with the block."""
    words = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(RANKS_PER_HOST), *launcher_options]
    words += ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{two_hosts[0].address}:{PORT}"]
    with ExitStack() as stack:
        agents = []
        for index, host in enumerate(two_hosts):
            # A host finds out by its name whether it holds the rendezvous, and no name resolves here.
            own = ["--rdzv-conf", f"is_host={int(index == 0)}", "--local-addr", host.address]
            named = ["unshare", "--uts", sys.executable, "-c", NAMED, f"host{index}"]
            agent = subprocess.Popen(
                host.command(*named, *words, *own, "-m", "layerwise", *map(str, arguments)),
                env=environment() | {"GLOO_SOCKET_IFNAME": interface},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            agents.append(stack.enter_context(agent))
            stack.callback(agent.kill)
        yield agents


def torchrun(
    two_hosts: list[Host], *arguments: object, interface: str = DEVICE
) -> list[subprocess.CompletedProcess[str]]:
    """The same, to its end."""
    with start_torchrun(two_hosts, [], *arguments, interface=interface) as agents:
        said = [agent.communicate(timeout=200) for agent in agents]
    return [
        subprocess.CompletedProcess(agent.args, agent.returncode, *texts)
        for agent, texts in zip(agents, said, strict=True)
    ]


def test_two_hosts_learn_what_one_learns(two_hosts: list[Host], tmp_path: Path) -> None:
    config = small_config(write_samples(tmp_path), 2, RANKS_PER_HOST, "num_steps=4", "checkpoint.every_steps=2")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    for done in torchrun(two_hosts, "train", "--config", tmp_path / "config.yaml", "--out", tmp_path / "hosts"):
        assert done.returncode == 0, done.stderr
    train_small(config, tmp_path / "local")
    rows = [metrics(tmp_path / name) for name in ("hosts", "local")]
    assert len(rows[0]) == 4
    for ours, theirs in zip(*rows, strict=True):
        assert ours["loss"] == theirs["loss"]
        assert ours["exchange"] == theirs["exchange"]


def test_the_doctor_sees_two_hosts(two_hosts: list[Host], tmp_path: Path) -> None:
    config = small_config(write_samples(tmp_path), 2, RANKS_PER_HOST, "checkpoint.every_steps=2")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    options = ["--config", tmp_path / "config.yaml", "--out", tmp_path / "run", "--json", tmp_path / "found.json"]
    for done in torchrun(two_hosts, "doctor", *options):
        assert done.returncode == 0, done.stderr + done.stdout
    found = {check["name"]: check for check in json.loads((tmp_path / "found.json").read_text())["checks"]}
    assert found["ranks"]["found"] == "4 ranks on 2 hosts, as the config says"
    assert re.fullmatch(rf"ranks meet at {two_hosts[0].address}:\d+; gloo on {DEVICE}", found["network"]["found"])
    assert "host1 is" in found["clocks"]["found"]
    assert found["clocks"]["status"] == "ok"
    assert "on all hosts the same one" in found["checkpoints"]["found"]
    assert "the cluster spec says" in found["link between nodes"]["found"]
    assert "each of 2 hosts" in found["data"]["found"]


def test_an_interface_that_is_not_there_is_named(two_hosts: list[Host], tmp_path: Path) -> None:
    for index, done in enumerate(torchrun(two_hosts, "doctor", "--timeout-s", "20", interface="ib0")):
        assert done.returncode == 1
        assert f"host{index}: GLOO_SOCKET_IFNAME=ib0" in done.stdout


def test_all_hosts_go_on_after_a_rank_was_killed(two_hosts: list[Host], tmp_path: Path) -> None:
    config = small_config(write_samples(tmp_path), 2, RANKS_PER_HOST, "checkpoint.every_steps=2", "num_steps=10")
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    out = tmp_path / "hosts"
    options = ["--config", tmp_path / "config.yaml", "--out", out, "--resume"]
    with start_torchrun(two_hosts, ["--max-restarts", "2"], "train", *options) as agents:
        deadline = time.monotonic() + 100
        while not step_folders(out / "checkpoints"):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        killed = kill_a_rank(two_hosts[1])
        said = [agent.communicate(timeout=150)[1] for agent in agents]
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert killed
    assert any("going on from" in text for text in said), said
    train_small(config, tmp_path / "local")
    assert [row["loss"] for row in metrics(out)] == [row["loss"] for row in metrics(tmp_path / "local")]


def kill_a_rank(host: Host) -> bool:
    """Kill the process of a rank, not torchrun, on a host."""
    inside = subprocess.run(["ip", "netns", "pids", host.namespace], capture_output=True, text=True, check=True).stdout
    for pid in map(int, inside.split()):
        if b"\0LOCAL_RANK=1\0" in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(pid, signal.SIGKILL)
            return True
    return False
