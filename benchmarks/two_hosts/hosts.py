"""Hosts that are network namespaces, with a bridge between them in a namespace of its own.

Everything lives inside these namespaces, so removing them removes all of it. Their names hold the process that made
them; those of a run that was killed are recognised by that and removed by the next one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from layerwise.errors import UnsupportedError

PREFIX = "layerwise-two-hosts"
DEVICE = "eth0"
# Large packets: fewer of them for two cores to handle.
MTU_BYTES = 9000


@dataclass(frozen=True, kw_only=True)
class Host:
    """A network namespace and the address of its one interface, DEVICE."""

    namespace: str
    address: str

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` on this host."""
        return ["ip", "netns", "exec", self.namespace, *words]


def check_tools() -> None:
    """Raise UnsupportedError, with the way out, where hosts cannot be made here."""
    if os.geteuid() != 0:
        raise UnsupportedError(
            f"network namespaces need root, this is user {os.geteuid()}: run the same command with sudo"
        )
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UnsupportedError(f"the command {tool!r} is missing: install iproute2 (it holds ip and tc)")


@contextmanager
def make_hosts(num_hosts: int) -> Iterator[list[Host]]:
    """Hosts that reach one another through one bridge; removed again however the block ends.

    Raises UnsupportedError where the kernel refuses.
    """
    remove_stale()
    run = f"{PREFIX}-{os.getpid()}.{_start_ticks(os.getpid())}"
    switch = f"{run}-switch"
    hosts = [Host(namespace=f"{run}-host{k}", address=f"10.77.0.{k + 1}") for k in range(num_hosts)]
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", switch, "link", "set", "bridge0", "mtu", str(MTU_BYTES), "up")
        for index, host in enumerate(hosts):
            _plug_in(host, switch, f"port{index}")
        yield hosts
    finally:
        for namespace in (*(host.namespace for host in hosts), switch):
            remove_namespace(namespace)


def _plug_in(host: Host, switch: str, port: str) -> None:
    mtu = ("mtu", str(MTU_BYTES))
    _ip("netns", "add", host.namespace)
    _ip("-n", host.namespace, "link", "add", DEVICE, *mtu, "type", "veth", "peer", "name", port, *mtu, "netns", switch)
    _ip("-n", switch, "link", "set", port, "master", "bridge0", "up")
    _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", DEVICE)
    _ip("-n", host.namespace, "link", "set", DEVICE, "up")
    _ip("-n", host.namespace, "link", "set", "lo", "up")
    # A queue looks like loss to TCP, which then sends probes: bytes that are counted, and that nobody asked for.
    _run(host.command("sh", "-c", "echo 0 > /proc/sys/net/ipv4/tcp_early_retrans"))


def remove_stale() -> None:
    """Remove the namespaces of runs that are no more, and the processes in them."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for line in listed.splitlines():
        name = line.split()[0]
        if name.startswith(f"{PREFIX}-") and not _maker_lives(name):
            remove_namespace(name)


def remove_namespace(namespace: str) -> None:
    """Kill what still runs in a namespace, then remove it; none by that name is no error."""
    inside = subprocess.run(["ip", "netns", "pids", namespace], capture_output=True, text=True, check=False).stdout
    for pid in inside.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "delete", namespace], capture_output=True, check=False)


def _maker_lives(name: str) -> bool:
    """Whether the process that a namespace is named after still runs; its start time tells it from a later one."""
    pid, _, ticks = name.removeprefix(f"{PREFIX}-").partition("-")[0].partition(".")
    return pid.isdigit() and _start_ticks(int(pid)) == ticks


def _start_ticks(pid: int) -> str | None:
    """When a process started, in clock ticks since boot, or None where there is none; proc(5), field 22 of stat."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return stat.rpartition(")")[2].split()[19]


def _ip(*words: str) -> None:
    _run(["ip", *words])


def _run(words: list[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnsupportedError(
            f"`{' '.join(words)}` failed: {done.stderr.strip()}; this needs a Linux kernel with network namespaces, "
            "veth and bridge, and the capabilities NET_ADMIN and SYS_ADMIN (a container may lack them)"
        )
