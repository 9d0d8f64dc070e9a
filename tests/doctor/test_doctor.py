"""The doctor: what each finding says, how clocks and folders are looked at, and the command on real ranks."""

from __future__ import annotations

import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from layerwise.calibrate.links import LinkRate
from layerwise.cli import main
from layerwise.doctor import judge
from layerwise.doctor.check import Check
from layerwise.doctor.clock import ClockOffset, measure_offsets
from layerwise.doctor.facts import DataFacts, Facts, Network, rank_facts
from layerwise.doctor.folders import FolderFacts, look_at_folder
from layerwise.doctor.links import judge_link
from layerwise.doctor.words import gather_texts
from layerwise.groups import LocalWorld, World
from layerwise.spec import ClusterSpec
from tests.train.cli import DEMO, run

NETWORK = Network(
    interfaces={"lo": "127.0.0.1", "eth0": "10.0.0.1"},
    own_name_address="10.0.0.1",
    rendezvous="head:29500",
    rendezvous_address="10.0.0.1",
    towards_rendezvous="10.0.0.1",
)


def facts_of(*hosts: str, **changes: Any) -> list[Facts]:
    """One rank per name, healthy but for `changes`, which the last one has."""
    healthy = Facts(
        host="",
        local_rank=0,
        local_ranks=hosts.count(hosts[0]),
        versions={"python": "3.11.7", "torch": "2.13.0", "numpy": "2.4.6"},
        backend="gloo",
        device="CPU, 2 cores",
        device_index=None,
        num_gpus=0,
        memory_bytes=None,
        network=NETWORK,
        data=DataFacts(num_files=3),
    )
    facts = [
        healthy.model_copy(update={"host": host, "local_rank": hosts[:k].count(host)}) for k, host in enumerate(hosts)
    ]
    facts[-1] = facts[-1].model_copy(update=changes)
    return facts


def network(**changes: Any) -> Network:
    return NETWORK.model_copy(update=changes)


def cluster(num_nodes: int, ranks_per_node: int, **more: Any) -> ClusterSpec:
    return ClusterSpec(num_nodes=num_nodes, ranks_per_node=ranks_per_node, **more)


def expect(check: Check, status: str, *words: str) -> None:
    assert check.status == status, check
    for word in words:
        assert word in check.found + " | " + check.advice
    assert bool(check.advice) == (status != "ok")


@pytest.mark.parametrize(
    ("package", "status"), [("torch", "wrong"), ("numpy", "warning"), (None, "ok")], ids=["torch", "numpy", "none"]
)
def test_versions_that_differ(package: str | None, status: str) -> None:
    versions = facts_of("a")[0].versions | ({package: "1.0"} if package else {})
    words = (f"{package}: {facts_of('a')[0].versions[package]} on a; 1.0 on b",) if package else ("torch 2.13.0",)
    expect(judge.judge_versions(facts_of("a", "a", "b", versions=versions)), status, *words)


@pytest.mark.parametrize(
    ("hosts", "asked", "status", "words"),
    [
        ("aabb", (2, 2), "ok", ["4 ranks on 2 hosts, as the config says"]),
        ("aabb", None, "ok", ["4 ranks on 2 hosts"]),
        ("aabb", (2, 4), "wrong", ["num_nodes=2 x ranks_per_node=4", "set cluster.num_nodes=2", "ranks_per_node=2"]),
        ("aabb", (1, 4), "wrong", ["2 on each"]),
        ("aabb", (4, 1), "warning", ["2 on each", "set cluster.ranks_per_node=2"]),
        ("aaab", (2, 2), "wrong", ["a: 3, b: 1"]),
        ("abab", (2, 2), "wrong", ["do not follow one another"]),
    ],
)
def test_ranks_are_those_of_the_config(
    hosts: str, asked: tuple[int, int] | None, status: str, words: list[str]
) -> None:
    expect(judge.judge_shape(facts_of(*hosts), cluster(*asked) if asked else None), status, *words)


def test_without_torchrun_one_node_stands_for_all() -> None:
    alone = [f.model_copy(update={"network": network(rendezvous=None)}) for f in facts_of("a", "a")]
    expect(judge.judge_shape(alone, cluster(2, 2)), "ok", "one node's")


@pytest.mark.parametrize(
    ("changes", "status", "words"),
    [
        ({}, "ok", ["CPU, 2 cores, over gloo"]),
        ({"device": "CPU, 1 cores"}, "warning", ["CPU, 2 cores on a; CPU, 1 cores on b"]),
        ({"backend": "nccl", "device": "H100"}, "wrong", ["nvidia-smi"]),
    ],
)
def test_devices_are_of_one_sort(changes: dict[str, Any], status: str, words: list[str]) -> None:
    expect(judge.judge_devices(facts_of("a", "b", **changes), None), status, *words)


def test_gpus() -> None:
    gpu = {"backend": "nccl", "device": "H100", "device_index": 0, "num_gpus": 8, "memory_bytes": 80 * 10**9}
    facts = [f.model_copy(update=gpu) for f in facts_of("a", "b")]
    expect(judge.judge_devices(facts, cluster(2, 1, memory_bytes=80e9)), "ok", "H100, over nccl")
    expect(judge.judge_devices(facts, cluster(2, 1, memory_bytes=81e9)), "wrong", "at most 80000000000")
    same = [f.model_copy(update=gpu) for f in facts_of("a", "a")]
    expect(judge.judge_devices(same, None), "wrong", "several ranks of a use GPU 0")
    idle = [f.model_copy(update={"num_gpus": 8}) for f in facts_of("a", "a")]
    expect(judge.judge_devices(idle, None), "warning", "a has 8 GPUs", "--nproc-per-node 8")


@pytest.mark.parametrize(
    ("found", "status", "words"),
    [
        (NETWORK, "ok", ["ranks meet at head:29500", "gloo on eth0"]),
        (network(gloo_interface="eth0"), "ok", ["gloo on eth0"]),
        (network(gloo_interface="ib0"), "wrong", ["b: GLOO_SOCKET_IFNAME=ib0", "lo 127.0.0.1, eth0 10.0.0.1"]),
        (network(own_name_address="127.0.1.1"), "wrong", ["127.0.1.1", "set GLOO_SOCKET_IFNAME"]),
        (network(own_name_address=None), "wrong", ["resolves to, nothing"]),
        (network(own_name_address="127.0.1.1", gloo_interface="eth0"), "ok", []),
        (network(rendezvous_address="127.0.0.1"), "wrong", ["meet at head:29500, 127.0.0.1: each host", "--rdzv"]),
    ],
)
def test_hosts_reach_one_another(found: Network, status: str, words: list[str]) -> None:
    expect(judge.judge_network(facts_of("a", "b", network=found)), status, *words)


@pytest.mark.parametrize(
    ("chosen", "status"),
    [("eth", "ok"), ("=eth0", "ok"), ("=eth", "wrong"), ("ib,eth", "ok"), ("^lo", "ok"), ("^lo,eth", "wrong")],
)
def test_nccl_takes_prefixes_and_exclusions(chosen: str, status: str) -> None:
    found = judge.judge_network(facts_of("a", "b", backend="nccl", network=network(nccl_interface=chosen)))
    assert found.status == status


def test_one_host_needs_no_interface() -> None:
    assert judge.judge_network(facts_of("a", "a", network=network(own_name_address="127.0.1.1"))).status == "ok"


@pytest.mark.parametrize(
    ("offset_s", "error_s", "status", "words"),
    [
        (0.1, 0.01, "ok", ["b is 100.0 ms ahead of a, give or take 10.0 ms"]),
        (-0.6, 0.01, "warning", ["b is 600.0 ms behind a"]),
        (-0.6, 0.2, "ok", []),  # it may be less than allowed
        (16.0, 0.01, "wrong", ["torchrun drops hosts whose clocks are 15 s apart"]),
    ],
)
def test_clocks(offset_s: float, error_s: float, status: str, words: list[str]) -> None:
    offsets = [ClockOffset(offset_s=0, error_s=error_s), ClockOffset(offset_s=offset_s, error_s=error_s)]
    check = judge.judge_clocks(facts_of("a", "b"), offsets)
    expect(check, status, *words)


def test_a_host_is_judged_by_its_best_rank_and_not_against_itself() -> None:
    """Ranks of a busy host measure badly; one of rank 0's own host tells nothing of clocks."""
    seconds = [(0.0, 0.0), (0.9, 1.0), (0.8, 1.0), (0.002, 0.001)]
    offsets = [ClockOffset(offset_s=offset_s, error_s=error_s) for offset_s, error_s in seconds]
    check = judge.judge_clocks(facts_of("a", "a", "b", "b"), offsets)
    expect(check, "ok", "b is 2.0 ms ahead of a, give or take 1.0 ms")


def test_offsets_of_clocks_are_found_again() -> None:
    ahead_ns = [0, 3_000_000_000, -40_000_000_000]

    def on_rank(world: World) -> list[ClockOffset]:
        return measure_offsets(world, lambda: time.time_ns() + ahead_ns[world.rank])

    for offsets in LocalWorld(3, 1).run(on_rank):
        for offset, expected_ns in zip(offsets, ahead_ns, strict=True):
            assert abs(offset.offset_s - expected_ns / 1e9) <= offset.error_s < 1


def test_texts_of_any_size_reach_all_ranks() -> None:
    texts = ["", "a" * 8, "größer\0"]
    assert LocalWorld(3, 1).run(lambda world: gather_texts(world, texts[world.rank])) == [texts] * 3
    assert LocalWorld(2, 1).run(lambda world: gather_texts(world, "")) == [["", ""]] * 2


def test_the_same_folder_is_seen_by_all_and_left_as_it_was(tmp_path: Path) -> None:
    def on_rank(world: World) -> list[FolderFacts]:
        return look_at_folder(world, tmp_path / "not" / "yet")

    for found in LocalWorld(3, 1).run(on_rank):
        assert [(f.path, f.sees_token, f.error) for f in found] == [(str(tmp_path), True, None)] * 3
        assert found[0].free_bytes > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_another_host_is_not_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read_text = Path.read_text

    def on_rank(world: World) -> list[FolderFacts]:
        threading.current_thread().name = f"rank {world.rank}"
        return look_at_folder(world, tmp_path, patience_s=0.2)

    def elsewhere(path: Path, *args: Any, **options: Any) -> str:
        if threading.current_thread().name == "rank 1":
            raise FileNotFoundError
        return read_text(path, *args, **options)

    monkeypatch.setattr(Path, "read_text", elsewhere)
    for found in LocalWorld(2, 1).run(on_rank):
        assert [f.sees_token for f in found] == [True, False]


def folders_of(*seen: bool, error: str | None = None, free_bytes: int = 100) -> list[FolderFacts]:
    """One rank each; the last one cannot write for `error`."""
    found = [FolderFacts(path="/runs", sees_token=s, error=None, free_bytes=free_bytes) for s in seen]
    return [*found[:-1], found[-1].model_copy(update={"error": error})]


@pytest.mark.parametrize(
    ("folders", "shared", "status", "words"),
    [
        (folders_of(True, True), True, "ok", ["/runs: on all hosts the same one, writable, 100 B free"]),
        (folders_of(True, False), True, "wrong", ["b does not see what a writes there"]),
        (folders_of(True, False), False, "warning", ["b does not see", "share it to resume"]),
        (folders_of(True, True, error="Read-only file system"), True, "wrong", ["b cannot write there: Read-only"]),
        (folders_of(True, True, error="Read-only file system"), False, "ok", []),
        (folders_of(True, True, free_bytes=59), True, "wrong", ["59 B free, of 60 B", "checkpoint.keep"]),
    ],
)
def test_folders(folders: list[FolderFacts], shared: bool, status: str, words: list[str]) -> None:
    check = judge.judge_folder("--out", facts_of("a", "b"), folders, needed_bytes=60, must_be_shared=shared)
    expect(check, status, *words)


def test_data_is_looked_at_on_every_host(tmp_path: Path) -> None:
    expect(judge.judge_data(facts_of("a", "b")), "ok", "3 files", "each of 2 hosts")
    expect(judge.judge_data(facts_of("a", "b", data=DataFacts(num_files=2))), "wrong", "a has 3 files, b has 2 files")
    expect(judge.judge_data(facts_of("a", "b", data=DataFacts(error="no such file"))), "wrong", "b: no such file")


def test_links_are_compared_with_the_cluster_spec() -> None:
    rate = LinkRate(latency_s=1e-3, bytes_per_s=5e9)
    expect(judge_link("link", rate, None), "ok", "5 GB/s per rank, 1.0 ms per message")
    expect(judge_link("link", rate, 9e9), "ok", "the cluster spec says 9 GB/s")
    expect(judge_link("link", rate, 11e9), "warning", "more than a factor of 2", "layerwise calibrate")


def test_a_process_knows_itself() -> None:
    facts = rank_facts(torch.device("cpu"), 0, 1, None)
    assert facts.versions["torch"] == torch.__version__
    assert facts.network.interfaces["lo"] == "127.0.0.1"
    assert facts.backend == "gloo"
    assert facts.data is None


@pytest.mark.ranks
def test_the_command_on_real_ranks(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2]}\n')
    options = ["--config", DEMO, "--out", tmp_path / "run", "--ranks-per-node", "2", "--json", tmp_path / "found.json"]
    good = [f"data.source={tmp_path / 'rows.jsonl'}", "data.overlong=error", "checkpoint.every_steps=1"]
    done = run("doctor", *options, *(word for setting in good for word in ("--set", setting)))
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["name"]: check for check in json.loads((tmp_path / "found.json").read_text())["checks"]}
    assert set(found) == {
        *("versions", "ranks", "devices", "network", "clocks", "link inside a node", "link between nodes"),
        *("--out", "checkpoints", "data", "attention"),
    }
    assert {check["status"] for check in found.values()} <= {"ok", "warning"}  # a busy machine has no clear links
    assert not (tmp_path / "run").exists()

    (tmp_path / "rows.jsonl").write_text("no json\n")
    bad = run("doctor", *options, *(word for setting in good for word in ("--set", setting)))
    assert bad.returncode == 1
    assert "rows.jsonl" in bad.stdout
    assert bad.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "num_steps=1"], "--set has no effect without --config"),
        (["--device", "tpu"], "--device 'tpu': legal values are auto, cpu and cuda"),
        (["--json", "none/found.json"], "--json none/found.json: no such folder 'none'"),
    ],
)
def test_bad_options(arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["layerwise", "doctor", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    assert message in capsys.readouterr().err


@pytest.mark.ranks
def test_ranks_that_do_not_meet_are_a_finding(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        "RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
    }
    for key, value in (environment | {"MASTER_PORT": str(port)}).items():
        monkeypatch.setenv(key, value)
    monkeypatch.setattr("sys.argv", ["layerwise", "doctor", "--timeout-s", "1"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert "wrong" in out
    assert "ranks" in out
