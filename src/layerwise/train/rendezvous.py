"""A store of this attempt's own, where torchrun starts ranks again after one of them died.

torchrun's attempts share one store, in which process groups would find the addresses of dead processes
(pytorch/pytorch#135712), and its count of restarts differs between hosts. So the living ranks find out about one
another first, and then use names that no earlier attempt has used.
"""

from __future__ import annotations

import time
import uuid

import torch.distributed as dist

from layerwise.errors import RankFailedError

_POLL_S = 0.05
_HELLO, _ROLL, _READY = "layerwise/hello", "layerwise/roll", "layerwise/ready"


def fresh_store(store: dist.Store, rank: int, num_ranks: int, timeout_s: float) -> dist.Store:
    """The part of a store that belongs to the ranks that are alive now; every rank calls this.

    Raises RankFailedError where they have not all come in time.
    """
    me = uuid.uuid4().hex
    deadline = time.monotonic() + timeout_s
    if rank:
        store.set(f"{_HELLO}/{rank}", me)
    while time.monotonic() < deadline:
        leader = _answer(store, me, rank) if rank else _call_the_roll(store, me, num_ranks)
        if leader:
            return dist.PrefixStore(leader, store)
        time.sleep(_POLL_S)
    raise RankFailedError(f"rank {rank}: not all {num_ranks} ranks came within timeout_s={timeout_s}")


def _call_the_roll(store: dist.Store, me: str, num_ranks: int) -> str | None:
    """Rank 0: say who has said hello; done when all of them, none of whom is of an earlier attempt, have answered."""
    if num_ranks == 1:
        return me
    names = [name.decode() for name in store.multi_get([f"{_HELLO}/{rank}" for rank in range(1, num_ranks)])]
    store.set(_ROLL, " ".join([me, *names]))
    return me if store.check([f"{_READY}/{me}/{name}" for name in names]) else None


def _answer(store: dist.Store, me: str, rank: int) -> str | None:
    """Another rank: answer a roll that has its name; one of an earlier attempt has not."""
    roll = store.get(_ROLL).decode().split()
    if rank >= len(roll) or roll[rank] != me:
        return None
    store.set(f"{_READY}/{roll[0]}/{me}", "")
    return roll[0]
