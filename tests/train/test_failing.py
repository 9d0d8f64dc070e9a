"""What a run says when one of its ranks, or the link between them, fails: who, where, for how long, and what to do."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest
import torch

from benchmarks.two_hosts.hosts import DEVICE, Host, check_tools, make_hosts
from layerwise.errors import UnsupportedError
from layerwise.exchange import Progress, collective, waiting
from layerwise.groups import LocalWorld, World
from layerwise.model import HybridLM, ModelOptions
from layerwise.planners import Planner
from layerwise.runtime import agree, build_routes, use_routes
from layerwise.spec import ClusterSpec
from layerwise.traffic import Block
from layerwise.train.checkpoint import step_folders
from tests.runtime.test_strategies import tiny_model
from tests.train.cli import environment, metrics
from tests.train.small import small_config, write_samples

ranks = pytest.mark.ranks
pytestmark = pytest.mark.timeout(300)
TIMEOUT_S = 4
# Beyond the timeout: some seconds to hear one another's last words; a busy machine makes more of them.
GRACE_S = 20
SP4, SP2, SP1 = (("strategy=static", f"strategy_options.sp_degree={degree}") for degree in (4, 2, 1))


def num_steps(out: Path) -> int:
    return len(metrics(out)) if (out / "metrics.jsonl").exists() else 0


class Run:
    """Four ranks on two nodes that meet a fault in their third step."""

    def __init__(self, folder: Path, fault: str, *settings: str, torchrun: bool = False) -> None:
        self.out = folder / "run"
        limits = (f"timeout_s={TIMEOUT_S}", "num_steps=6")
        (folder / "config.yaml").write_text(small_config(write_samples(folder), 2, 2, *limits, *settings).to_yaml())
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"] if torchrun else []
        command = [sys.executable, *launcher, "-m", "tests.train.faults", fault, "train"]
        command += ["--config", str(folder / "config.yaml"), "--out", str(self.out)]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment())
        try:
            while process.poll() is None and num_steps(self.out) < 2:
                time.sleep(0.02)
            begun = time.monotonic()
            _, self.said = process.communicate(timeout=100)
        finally:
            process.kill()
        self.took_s = time.monotonic() - begun
        self.status = process.returncode

    def assert_said(self, pattern: str) -> None:
        assert re.search(pattern, self.said, re.M), self.said

    def assert_ended(self, within_s: float) -> None:
        """With an error, in time, and with nothing of the step that failed in the results."""
        assert self.status == 1, self.said
        assert self.took_s < within_s, self.said
        assert [row["step"] for row in metrics(self.out)] == [0, 1]


@ranks
def test_a_rank_that_dies_inside_an_exchange(tmp_path: Path) -> None:
    run = Run(tmp_path, "die:3:2:0:1", *SP4)
    run.assert_ended(within_s=GRACE_S)
    run.assert_said("^layerwise: rank 3: was killed by SIGKILL$")
    # What they waited for in this layer may be rows of rank 3, or those of a rank that waits for it.
    where = r"^ranks? (.+), step 2, micro-batch 0, layer 1, forward, exchange_\w+ of sliding_attention: waited in vain$"
    spans = [span.partition("-") for span in re.split(", ", ", ".join(re.findall(where, run.said, re.M)))]
    waited = {rank for lo, _, hi in spans for rank in range(int(lo), int(hi or lo) + 1)}
    assert waited == {0, 1, 2}, run.said


@ranks
@pytest.mark.slow
@pytest.mark.hosts
def test_under_torchrun_the_living_say_where_they_were(tmp_path: Path) -> None:
    run = Run(tmp_path, "die:3:2:0:1", *SP4, torchrun=True)
    run.assert_ended(within_s=2 * GRACE_S)
    for rank in (0, 1, 2):
        run.assert_said(
            f"^layerwise: rank {rank}, step 2, micro-batch 0, layer 1, forward, exchange_.+ of sliding_attention: "
        )


@ranks
@pytest.mark.slow
@pytest.mark.hosts
def test_a_rank_that_stops_inside_an_exchange(tmp_path: Path) -> None:
    """Its partner names it, and so do the ranks that wait for both somewhere else."""
    run = Run(tmp_path, "stop:3:2:0:0", *SP2)
    run.assert_ended(within_s=TIMEOUT_S + GRACE_S)
    no_word = r"\n  rank 3: no word; .* timeout_s=4 .* raise timeout_s"
    run.assert_said(
        r"rank 2, step 2, micro-batch 0, layer 0, forward, exchange_\w+ of full_attention: waited 4.\d s for rank 3: "
        r"Timed out waiting 4000ms for \w+ operation to complete" + no_word
    )
    run.assert_said(r"rank [01], step 2, the sums of gradients and losses: waited \d.\d s for ranks .*" + no_word)
    assert run.said.endswith("rank 3: gave no reason in time, and was ended\n")


@ranks
@pytest.mark.slow
@pytest.mark.hosts
def test_groups_that_torch_makes_wait_no_longer_than_ours(tmp_path: Path) -> None:
    run = Run(tmp_path, "stop:3:2:0:0", *SP1, "sharding=hsdp", "expert_parallel=2")
    run.assert_ended(within_s=TIMEOUT_S + GRACE_S)
    run.assert_said("rank 2, step 2, micro-batch 0, layer 0, forward, exchange of experts: waited 4.. s for rank 3: ")
    run.assert_said(r"rank 0, after step 2, micro-batch 0, layer \d, \w+, .*: a collective failed: ")


@ranks
@pytest.mark.slow
@pytest.mark.hosts
def test_a_slow_rank_says_itself_where_it_was(tmp_path: Path) -> None:
    run = Run(tmp_path, "sleep:1:2:0:1", *SP4, torchrun=True)
    run.assert_ended(within_s=TIMEOUT_S + 2 * GRACE_S)
    where = r"step 2, micro-batch 0, layer 1, forward, exchange_\w+ of sliding_attention"
    for rank in (0, 2, 3):
        run.assert_said(rf"^layerwise: rank {rank}, {where}: waited 4.\d s for ranks .*\n  rank 1: no word; ")
    run.assert_said(rf"^layerwise: rank 1, {where}: was told to end \(SIGTERM\)")


@ranks
@pytest.mark.parametrize("sharding", ["replicate", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_a_number_that_is_not_finite_is_traced_to_its_rank_and_layer(tmp_path: Path, sharding: str) -> None:
    run = Run(tmp_path, "nan:1:2:0:1", *SP4, f"sharding={sharding}", "checkpoint.every_steps=1", "checkpoint.keep=6")
    run.assert_ended(within_s=GRACE_S)
    run.assert_said("^layerwise: rank 0, step 2, .*: the (loss|gradient norm) is nan, so the weights were not changed")
    run.assert_said(r"^  first not finite: rank 1, micro-batch 0, layer 1 \(sliding_attention\): output of attention$")
    run.assert_said("^  the same: ranks 1-3$")
    assert set(step_folders(run.out / "checkpoints")) <= {1, 2}


@ranks
def test_another_plan_on_one_rank_is_an_error_on_all(tmp_path: Path) -> None:
    run = Run(tmp_path, "plan:2:2:0:0", *SP4)
    run.assert_ended(within_s=GRACE_S)
    run.assert_said(
        "^layerwise: rank 0, step 2, agreement on the plan: PlanMismatchError: rank 0 holds plan .* and rank 2 holds "
        r".*: micro-batch 0, the tiles of sliding_attention layers is \d+ rows, hash \w+ on rank 0, but .* on rank 2; "
        ".*\n  the same: ranks 1-3$"
    )


@ranks
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_gradient_that_is_not_finite_is_traced_too(tmp_path: Path, recompute: bool) -> None:
    run = Run(tmp_path, "nan_back:1:2:0:1", *SP4, f"activation_checkpointing={recompute}")
    run.assert_ended(within_s=GRACE_S)
    run.assert_said("^layerwise: rank 0, step 2, .*: the gradient norm is nan, so the weights were not changed")
    run.assert_said(
        r"^  first not finite: rank 1, micro-batch 0, layer 1 \(sliding_attention\): gradient of the output of "
        "attention$"
    )


@ranks
@pytest.mark.parametrize(
    ("fault", "where"),
    [
        ("nan_weight", r"first not finite: rank 1, micro-batch 0, gradient of the weight (.+)"),
        (
            "huge_weight",
            r"run again, .* \(the largest is about 1e19\d, of (.+) on rank 1\), or the hardware made an error",
        ),
    ],
)
def test_a_bad_gradient_of_a_weight_is_traced_to_its_rank(tmp_path: Path, fault: str, where: str) -> None:
    run = Run(tmp_path, f"{fault}:1:2:0:0", *SP4)
    run.assert_ended(within_s=GRACE_S)
    run.assert_said(rf"^  {where}$")
    assert re.findall(where, run.said) == ["layers.1.attention.o_proj.weight"]


@ranks
@pytest.mark.parametrize(
    ("fault", "why"),
    [("leave", "rank 2: ended with exit status 0 before the end of the run"), ("exit", "rank 2, .* step: Traceback")],
)
def test_a_rank_that_ends_by_itself_is_at_fault_alone(tmp_path: Path, fault: str, why: str) -> None:
    run = Run(tmp_path, f"{fault}:2:2:0:0", *SP4)
    run.assert_ended(within_s=2 * GRACE_S)
    run.assert_said(f"^(layerwise: )?{why}")
    assert "no reason" not in run.said, run.said
    assert "raise timeout_s" not in run.said, run.said


@ranks
def test_other_settings_on_one_rank_are_an_error_on_all(tmp_path: Path) -> None:
    run = Run(tmp_path, "settings:2:0:0:0", *SP4)
    assert run.status == 1
    run.assert_said(
        "^layerwise: rank 0, agreement on the settings: SpecError: seed is 0 on rank 0, but seed is 7 on rank 2: all "
        "ranks .*\n  the same: ranks 1-3$"
    )


@ranks
@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.parametrize(("rank", "who"), [(1, "rank 1: "), (-1, "")])
def test_under_torchrun_a_wrong_setting_is_said_once(tmp_path: Path, rank: int, who: str) -> None:
    run = Run(tmp_path, f"argument:{rank}:0:0:0", *SP4, torchrun=True)
    assert run.status == 1
    run.assert_said(f"^layerwise: {who}.*nonsense")
    assert run.said.count("layerwise: ") == 1, run.said


@ranks
@pytest.mark.slow
@pytest.mark.hosts
def test_a_rank_that_hangs_before_the_first_step(tmp_path: Path) -> None:
    run = Run(tmp_path, "build:2:0:0:0", *SP4, "checkpoint.every_steps=2")
    assert run.status == 1
    assert run.took_s < TIMEOUT_S + GRACE_S
    run.assert_said("rank 2: no word; .* timeout_s=4 .* raise timeout_s")


@ranks
@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.parametrize("torchrun", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_stops_in_a_save(tmp_path: Path, asynchronous: bool, torchrun: bool) -> None:
    """Every rank ends, also where a thread that saves is left waiting."""
    limit_s = 600 if asynchronous else 6  # a save beside the training delays nobody who has failed
    save = ("checkpoint.every_steps=2", f"checkpoint.asynchronous={asynchronous}", f"checkpoint.timeout_s={limit_s}")
    run = Run(tmp_path, "save:2:0:0:0", *SP4, *save, torchrun=torchrun)
    assert run.status == 1
    assert run.took_s < 6 + TIMEOUT_S + 2 * GRACE_S, run.said
    run.assert_said("the checkpoint after step 2|rank 2: no word")


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_exchanges_know_their_layer_and_microbatch(
    monkeypatch: pytest.MonkeyPatch, activation_checkpointing: bool
) -> None:
    """Backward passes of two micro-batches after both forward passes, recomputes among them."""
    seen: dict[int, list[str]] = {0: [], 1: []}

    @contextmanager
    def spying(progress: Progress, rank: int, block: Block) -> Iterator[None]:
        seen[rank].append(progress.where())
        with waiting(progress, rank, block):
            yield

    monkeypatch.setattr(collective, "waiting", spying)
    model = HybridLM(tiny_model(8, 2), ModelOptions(activation_checkpointing=activation_checkpointing))
    cluster = ClusterSpec(num_nodes=1, ranks_per_node=2, peak_flops_per_s=1e9)
    settings = {"strategy": "static", "options": {"sp_degree": 2}, "max_tokens_per_rank": 20}
    plan = Planner(cluster=cluster, model=model.spec, **settings)([40, 30])
    assert len(plan.microbatches) == 2

    def on_rank(world: World) -> None:
        world.progress.step = 7
        agree(plan, world, num_valid_tokens=1)
        losses = []
        for index in range(2):
            routes = build_routes(plan, index, world)
            with use_routes(routes):
                tokens = torch.zeros_like(routes.position_ids)
                losses.append(model(tokens, routes.position_ids).logits.sum())
        torch.autograd.backward(losses)

    LocalWorld(2, 2).run(on_rank)
    kinds = model.spec.all_layer_types
    layers, parts = range(len(kinds)), ("exchange_in", "exchange_out")
    again = 1 + activation_checkpointing
    expected = [
        f"step 7, micro-batch {m}, layer {layer}, {direction}, {part} of {kinds[layer]}"
        for m, layer, part in product((0, 1), layers, parts)
        for direction in ["forward"] * again + ["backward"]
    ]
    assert sorted(seen[0]) == sorted(seen[1]) == sorted(expected)


@pytest.fixture(scope="module")
def can_make_hosts() -> None:
    try:
        check_tools()
        with make_hosts(1):
            pass
    except UnsupportedError as error:
        pytest.skip(str(error))


class Ranks:
    """Two ranks on each of two hosts, as torchrun would start them; rank 0's process holds the store."""

    def __init__(self, folder: Path, hosts: list[Host], *settings: str) -> None:
        self.out = folder / "run"
        (folder / "config.yaml").write_text(small_config(write_samples(folder), 2, 2, *SP4, *settings).to_yaml())
        command = [sys.executable, "-m", "layerwise", "train", "--config", str(folder / "config.yaml")]
        names = {
            "WORLD_SIZE": "4",
            "MASTER_ADDR": hosts[0].address,
            "MASTER_PORT": "29500",
            "GLOO_SOCKET_IFNAME": DEVICE,
        }
        self.processes = [
            subprocess.Popen(
                hosts[rank // 2].command(*command, "--out", str(self.out)),
                env=environment() | names | {"RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(4)
        ]

    def wait_for_steps(self, wanted: int) -> None:
        deadline = time.monotonic() + 100
        while num_steps(self.out) < wanted:
            assert time.monotonic() < deadline, "too slow"
            ended = [process for process in self.processes if process.poll() is not None]
            assert not ended, ended[0].communicate()[1]
            time.sleep(0.02)

    def said(self, within_s: float) -> list[str]:
        """What each rank said, when all have ended by themselves."""
        until = time.monotonic() + within_s
        try:
            return [process.communicate(timeout=max(0.1, until - time.monotonic()))[1] for process in self.processes]
        finally:
            for process in self.processes:
                process.kill()
                process.communicate()


def set_link(host: Host, state: str) -> None:
    subprocess.run(["ip", "-n", host.namespace, "link", "set", DEVICE, state], check=True)


@ranks
@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.usefixtures("can_make_hosts")
def test_a_link_that_stays_down_ends_every_rank_with_a_message(tmp_path: Path) -> None:
    with make_hosts(2) as hosts:
        run = Ranks(tmp_path, hosts, f"timeout_s={TIMEOUT_S}", "num_steps=100000")
        run.wait_for_steps(3)
        set_link(hosts[1], "down")
        said = run.said(within_s=TIMEOUT_S + GRACE_S)
    assert [process.returncode for process in run.processes] == [1] * 4
    for rank, text in enumerate(said):
        assert re.search(rf"layerwise: rank {rank}, step \d+, .*: waited 4.\d s for ranks? .*: ", text), text
    for text in said[:2]:
        assert re.search(r"\n  ranks 2-3: no word; ", text), text
    for text in said[2:]:
        assert "the store in which all ranks met does not answer either" in text, text


@ranks
@pytest.mark.slow
@pytest.mark.hosts
@pytest.mark.usefixtures("can_make_hosts")
def test_a_link_that_returns_in_time_changes_nothing(tmp_path: Path) -> None:
    losses = []
    for is_cut in (False, True):
        (folder := tmp_path / str(is_cut)).mkdir()
        with make_hosts(2) as hosts:
            run = Ranks(folder, hosts, "timeout_s=60", "num_steps=40")
            run.wait_for_steps(5)
            if is_cut:
                set_link(hosts[1], "down")
                time.sleep(1)
                before = num_steps(run.out)
                time.sleep(2)
                assert num_steps(run.out) == before < 40, "nothing goes on without the link"
                set_link(hosts[1], "up")
            said = run.said(within_s=60)
        assert [process.returncode for process in run.processes] == [0] * 4, said
        losses.append([row["loss"] for row in metrics(run.out)])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 40
