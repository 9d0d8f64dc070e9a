"""Ranks that were started apart find one another, in a store where an earlier attempt may have left its names."""

from __future__ import annotations

import random
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from layerwise.errors import CollectiveError, LayerwiseError, SpecError
from layerwise.train.launch import launch
from layerwise.train.rendezvous import meet, open_store
from tests.train.cli import environment
from tests.train.small import small_config, write_samples

pytestmark = pytest.mark.timeout(100)


def together(ranks: list[int], main: Callable[[int], None]) -> None:
    """main(rank) on a thread for each."""
    threads = [threading.Thread(target=main, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)


def attempt(store: dist.Store, num_ranks: int, seed: int) -> set[bytes]:
    """All ranks meet, in any order, and each leaves its number; what every one of them then sees."""
    delays = random.Random(seed).sample(range(num_ranks), num_ranks)
    seen: list[bytes] = []

    def main(rank: int) -> None:
        time.sleep(0.02 * delays[rank])
        own = dist.PrefixStore(meet(store, rank, num_ranks, timeout_s=10), store)
        own.set(f"here/{rank}", f"{seed}")
        seen.extend(own.multi_get([f"here/{other}" for other in range(num_ranks)]))

    together(list(range(num_ranks)), main)
    assert len(seen) == num_ranks**2
    return set(seen)


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
def test_every_attempt_has_names_of_its_own(num_ranks: int) -> None:
    store = dist.HashStore()
    for seed in range(4):
        assert attempt(store, num_ranks, seed) == {f"{seed}".encode()}


@pytest.mark.parametrize("attempts_before", [0, 1])
@pytest.mark.parametrize(
    ("came", "said"),
    [
        ([0], {0: "ranks 1-4 of 5"}),
        ([0, 1, 3], dict.fromkeys((0, 1, 3), "ranks 2, 4 of 5")),
        ([0, 1, 2, 4], dict.fromkeys((0, 1, 2, 4), "rank 3 of 5")),
    ],
)
def test_ranks_that_do_not_come_are_named(came: list[int], said: dict[int, str], attempts_before: int) -> None:
    """By all that came, and whether or not an earlier attempt has left names of the missing ones."""
    store, errors = dist.HashStore(), dict[int, str]()
    for seed in range(attempts_before):
        attempt(store, 5, seed)

    def main(rank: int) -> None:
        with pytest.raises(CollectiveError) as error:
            meet(store, rank, 5, timeout_s=0.4)
        errors[rank] = str(error.value)

    together(came, main)
    assert sorted(errors) == came
    for rank, text in errors.items():
        assert text.startswith(f"rank {rank}, the first meeting of all ranks: waited 0.4 s for {said[rank]}: "), text


def test_without_rank_0_it_is_named_by_the_others() -> None:
    """What an earlier attempt left of others cannot be told from the living without rank 0."""
    store, errors = dist.HashStore(), []

    def main(rank: int) -> None:
        with pytest.raises(CollectiveError) as error:
            meet(store, rank, 4, timeout_s=0.3)
        errors.append(error.value.peers)

    together([1, 2], main)
    assert errors == [[0, 3], [0, 3]]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def meet_at(monkeypatch: pytest.MonkeyPatch, host: str, port: object) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_the_store_listens_where_it_is_told_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    meet_at(monkeypatch, "127.0.0.2", port)
    store = open_store(0, 2, timeout_s=5)
    other = open_store(1, 2, timeout_s=5)
    other.set("key", "value")
    assert store.get("key") == b"value"
    for elsewhere in ("127.0.0.1", socket.gethostbyname(socket.gethostname())):
        with socket.socket() as probe:
            assert probe.connect_ex((elsewhere, port)), f"{elsewhere} answers, too"


@pytest.mark.parametrize(
    ("host", "port", "rank", "error", "message"),
    [
        ("", "29500", 0, SpecError, "MASTER_ADDR='' and MASTER_PORT='29500' do not say where ranks meet"),
        ("127.0.0.1", "x", 1, SpecError, "a port from 1 to 65535"),
        ("127.0.0.1", "65536", 1, SpecError, "a port from 1 to 65535"),
        ("192.0.2.1", "29500", 0, SpecError, "rank 0 cannot listen at MASTER_ADDR=192.0.2.1, MASTER_PORT=29500: .*own"),
        ("127.0.0.1", "1", 1, CollectiveError, r"rank 1, .*waited 1 s for rank 0 at MASTER_ADDR=127\.0\.0\.1"),
    ],
)
def test_a_store_that_cannot_be_had(
    monkeypatch: pytest.MonkeyPatch, host: str, port: str, rank: int, error: type[LayerwiseError], message: str
) -> None:
    meet_at(monkeypatch, host, port)
    with pytest.raises(error, match=message):
        open_store(rank, 2, timeout_s=1)


@pytest.mark.parametrize(("rank", "size"), [("2", "2"), ("-1", "2"), ("a", "2"), ("0", "")])
def test_numbers_of_ranks_that_are_none(monkeypatch: pytest.MonkeyPatch, rank: str, size: str) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(SpecError, match=f"RANK='{rank}' and WORLD_SIZE='{size}' are set, but"):
        launch(lambda *_: pytest.fail("started"), num_ranks=2, ranks_per_node=2, device="cpu", timeout_s=5)


def write_config(folder: Path, num_ranks: int) -> list[str]:
    path = folder / "config.yaml"
    path.write_text(small_config(write_samples(folder), 1, num_ranks, "timeout_s=3", "num_steps=1").to_yaml())
    return ["train", "--config", str(path), "--out", str(folder / "run")]


@pytest.mark.ranks
@pytest.mark.parametrize("launcher", ["ours", pytest.param("torchrun", marks=[pytest.mark.slow, pytest.mark.hosts])])
def test_a_rank_that_does_not_come_ends_the_run_and_is_named(tmp_path: Path, launcher: str) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [
        sys.executable,
        *(torchrun if launcher == "torchrun" else []),
        "-m",
        "tests.train.faults",
        "absent:1:0:0:0",
    ]
    done = subprocess.run(
        [*command, *write_config(tmp_path, 3)], capture_output=True, text=True, env=environment(), timeout=90
    )
    assert done.returncode == 1
    missing = "the first meeting of all ranks: waited 3 s for rank 1 of 3: not started, ended, stopped or cut off; .*"
    assert re.search(f"^layerwise: rank 0, {missing} raise timeout_s", done.stderr, re.M), done.stderr
    if launcher == "torchrun":
        assert re.search(f"^layerwise: rank 2, {missing}", done.stderr, re.M), done.stderr
    else:
        assert "Traceback" not in done.stderr  # torchrun has one of its own
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.ranks
@pytest.mark.parametrize("absent", [0, 1])
def test_a_rank_that_was_never_started_is_named(tmp_path: Path, absent: int) -> None:
    """Ranks that something else than torchrun starts, with the same variables."""
    command = [sys.executable, "-m", "layerwise", *write_config(tmp_path, 2)]
    names = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0"}
    present = {"RANK": str(1 - absent)}
    env = environment() | names | present
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert re.search(rf"^layerwise: rank {1 - absent}, .*: waited 3 s for rank {absent} ", done.stderr, re.M), (
        done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.ranks
def test_ranks_that_cannot_connect_say_how(tmp_path: Path) -> None:
    env = environment() | {"GLOO_SOCKET_IFNAME": "ib7"}
    command = [sys.executable, "-m", "layerwise", *write_config(tmp_path, 2)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    said = (
        "^layerwise: rank 0, the first meeting of all ranks: all ranks came, but they cannot connect over gloo: .*ib7"
    )
    assert re.search(said, done.stderr, re.M), done.stderr
    assert "Traceback" not in done.stderr
