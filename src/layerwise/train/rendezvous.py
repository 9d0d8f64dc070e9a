"""How ranks find one another: each says in a store that it is there, and one that waits in vain knows who is missing.

torchrun's attempts share one store, in which process groups would find the addresses of dead processes
(pytorch/pytorch#135712), and its count of restarts differs between hosts. So the living ranks find out about one
another first, and then use names that no earlier attempt has used.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from layerwise.errors import CollectiveError, SpecError
from layerwise.exchange import first_line
from layerwise.labels import ranks_label

_POLL_S = 0.02
_HELLO, _ROLL, _READY, _GO = "layerwise/hello", "layerwise/roll", "layerwise/ready", "layerwise/go"
_ABSENT = "-"
_WHERE = "the first meeting of all ranks"


def open_store(rank: int, num_ranks: int, timeout_s: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT. torchrun holds it; without torchrun rank 0 does, on that address only.

    Raises SpecError where the variables do not name one, CollectiveError where it does not answer in time.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise SpecError(
            f"RANK and WORLD_SIZE are set, but MASTER_ADDR={host!r} and MASTER_PORT={port!r} do not say where ranks "
            "meet: give an address of rank 0's host and a port from 1 to 65535, or start ranks with torchrun"
        )
    holds_it = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    listener = _listen(host, int(port)) if holds_it else None
    timeout = timedelta(seconds=timeout_s)
    try:
        return dist.TCPStore(
            host, int(port), num_ranks, holds_it, timeout, wait_for_workers=False, master_listen_fd=listener
        )
    except dist.DistError as error:
        reason = (
            f"waited {timeout_s:g} s for rank 0 at MASTER_ADDR={host}, MASTER_PORT={port}: {first_line(error)}; is "
            "rank 0 (or torchrun) running there, and can this host reach it?"
        )
        raise CollectiveError(_WHERE, reason, rank=rank, peers=[0]) from None


def _listen(host: str, port: int) -> int:
    """A listening socket on this address alone; torch's own would be on all interfaces."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server((str(address[0]), port), family=family, backlog=4096).detach()
    except OSError as error:
        raise SpecError(
            f"rank 0 cannot listen at MASTER_ADDR={host}, MASTER_PORT={port}: {error.strerror}; give an address of its "
            "own host and a port that is free"
        ) from None


def meet(store: dist.Store, rank: int, num_ranks: int, timeout_s: float) -> str:
    """A name for this attempt, the same on all ranks that are alive now, and never used before. Every rank calls this.

    Raises CollectiveError that says who has not come in time.
    """
    meeting = _Meeting(store, rank, num_ranks, me=uuid.uuid4().hex)
    deadline = time.monotonic() + timeout_s
    try:
        meeting.say_hello()
        while (leader := meeting.leader()) is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        missing = [] if leader else meeting.missing()
    except dist.DistError as error:
        reason = (
            f"the store in which ranks meet is gone ({first_line(error)}): did rank 0 end, or torchrun on its host?"
        )
        raise CollectiveError(_WHERE, reason, rank=rank, peers=[0]) from None
    if leader is None:
        reason = (
            f"waited {timeout_s:g} s for {ranks_label(missing)} of {num_ranks}: not started, ended, stopped or cut "
            "off; look at the log and the host, and raise timeout_s if it was only slow"
        )
        raise CollectiveError(_WHERE, reason, rank=rank, peers=missing)
    return leader


@dataclass(frozen=True)
class _Meeting:
    """Rank 0 leads: it writes a roll of those who said hello, they answer it, and when all have, it says go.

    Every rank has a name of its own, `me`, so that none is taken for one of an earlier attempt.
    """

    store: dist.Store
    rank: int
    num_ranks: int
    me: str

    def say_hello(self) -> None:
        self.store.set(f"{_HELLO}/{self.rank}", self.me)

    def leader(self) -> str | None:
        """Rank 0's name, once all have answered its roll."""
        roll = self._roll()
        if not self._is_on(roll):
            return None
        leader = roll[0]
        if self.rank == 0:
            if _ABSENT in roll or not self._have_answered(leader, roll[1:]):
                return None
            self.store.set(f"{_GO}/{leader}", "")
        else:
            self.store.set(f"{_READY}/{leader}/{self.me}", "")
        return leader if self.store.check([f"{_GO}/{leader}"]) else None

    def missing(self) -> list[int]:
        """Who has not come, as far as this rank can tell."""
        others = [rank for rank in range(1, self.num_ranks) if rank != self.rank]
        roll = self._roll()
        if self._is_on(roll):
            return [r for r in others if roll[r] == _ABSENT or not self._have_answered(roll[0], [roll[r]])]
        return [0, *(r for r in others if not self.store.check([f"{_HELLO}/{r}"]))]

    def _is_on(self, roll: list[str]) -> bool:
        return roll[self.rank : self.rank + 1] == [self.me]

    def _have_answered(self, leader: str, names: list[str]) -> bool:
        return not names or self.store.check([f"{_READY}/{leader}/{name}" for name in names])

    def _roll(self) -> list[str]:
        """Names by rank; rank 0 writes it anew. What an earlier attempt left has not our name."""
        if self.rank:
            return self.store.get(_ROLL).decode().split() if self.store.check([_ROLL]) else []
        keys = [f"{_HELLO}/{rank}" for rank in range(self.num_ranks)]
        roll = [self.store.get(key).decode() if self.store.check([key]) else _ABSENT for key in keys]
        self.store.set(_ROLL, " ".join(roll))
        return roll


def connect(store: dist.Store, rank: int, num_ranks: int, *, backend: str, timeout_s: float) -> None:
    """Make the default process group of ranks that have met. Raises CollectiveError where they cannot connect."""
    timeout = timedelta(seconds=timeout_s)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    except RuntimeError as error:
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        chosen = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ) or "not set"
        reason = (
            f"all ranks came, but they cannot connect over {backend}: {first_line(error)}; see whether {names[0]} or "
            f"{names[1]} ({chosen}) names the interface between hosts; layerwise doctor looks at it"
        )
        others = [other for other in range(num_ranks) if other != rank]
        raise CollectiveError(_WHERE, reason, rank=rank, peers=others) from None
