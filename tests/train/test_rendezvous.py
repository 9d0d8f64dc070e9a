"""Ranks of a new attempt find one another in a store where an earlier attempt has left its names."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch.distributed as dist

from layerwise.errors import RankFailedError
from layerwise.train.rendezvous import fresh_store


def attempt(store: dist.Store, num_ranks: int, seed: int) -> set[bytes]:
    """All ranks meet, in any order, and each leaves its number; what every one of them then sees."""
    delays = random.Random(seed).sample(range(num_ranks), num_ranks)
    seen: list[bytes] = []

    def main(rank: int) -> None:
        time.sleep(0.02 * delays[rank])
        own = fresh_store(store, rank, num_ranks, timeout_s=10)
        own.set(f"here/{rank}", f"{seed}")
        seen.extend(own.multi_get([f"here/{other}" for other in range(num_ranks)]))

    threads = [threading.Thread(target=main, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(seen) == num_ranks**2
    return set(seen)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_attempt_has_names_of_its_own(num_ranks: int) -> None:
    store = dist.HashStore()
    for seed in range(4):
        assert attempt(store, num_ranks, seed) == {f"{seed}".encode()}


def test_ranks_that_do_not_come_are_not_waited_for_for_ever() -> None:
    store = dist.HashStore()
    attempt(store, 2, 0)
    with pytest.raises(RankFailedError, match=r"rank 0: not all 2 ranks came within timeout_s=0\.2"):
        fresh_store(store, 0, 2, timeout_s=0.2)
