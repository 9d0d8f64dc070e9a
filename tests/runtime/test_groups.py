"""Agreement on plans, the strict local world, and how many process groups a run makes."""

import threading
import time

import numpy as np
import pytest
import torch

from layerwise.errors import PlanMismatchError, SpecError
from layerwise.exchange import all_to_all
from layerwise.groups import LocalWorld, ProcessWorld, World, solo_world
from layerwise.runtime import agree, attention, build_routes, plan_blocks
from layerwise.spec import AttentionSpec
from layerwise.traffic import Block, covering_block
from tests.random_plans import random_step

SPECS = {"full_attention": AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, v_head_dim=4)}


def plan_of(seed: int, num_ranks: int = 4, lengths: tuple[int, ...] = (9, 5, 6)):
    return random_step(np.random.default_rng(seed), list(lengths), SPECS, num_ranks, num_ranks // 2)


def test_a_rank_with_another_plan_is_an_error_on_every_rank() -> None:
    caught = []

    def on_rank(world):
        with pytest.raises(PlanMismatchError, match=r"rank 0 holds .* rank 2 holds"):
            agree(plan_of(1 if world.rank == 2 else 0), world, num_valid_tokens=0)
        caught.append(world.rank)

    LocalWorld(4, 2).run(on_rank)
    assert sorted(caught) == [0, 1, 2, 3]


def test_equal_plans_for_other_samples_are_a_mismatch() -> None:
    def on_rank(world):
        with pytest.raises(PlanMismatchError):
            agree(plan_of(0), world, num_valid_tokens=0, content=world.rank)

    LocalWorld(4, 2).run(on_rank)


def test_valid_tokens_are_counted_over_all_ranks() -> None:
    assert LocalWorld(4, 2).run(lambda world: agree(plan_of(0), world, num_valid_tokens=world.rank)) == [6] * 4


def test_different_splits_are_refused_by_the_local_world() -> None:
    def on_rank(world):
        comm = world.comm(Block(0, 2))
        send = [0, 3] if world.rank == 0 else [2, 0]
        receive = [0, 2] if world.rank == 0 else [4, 0]
        all_to_all(comm, torch.zeros(sum(send)), send, receive)

    with pytest.raises(PlanMismatchError, match="sends 3 elements to rank 1, which expects 4"):
        LocalWorld(2, 2).run(on_rank)


def test_the_first_failure_ends_all_threads() -> None:
    def on_rank(world):
        if world.rank == 1:
            raise SpecError("rank 1 has a problem")
        world.gather_ints([1])

    with pytest.raises(SpecError, match="rank 1 has a problem"):
        LocalWorld(4, 2).run(on_rank)


def test_plan_for_another_world_is_refused() -> None:
    with pytest.raises(SpecError, match="4 ranks, 2 per node, but the run has 2"):
        LocalWorld(2, 1).run(lambda world: build_routes(plan_of(0), 0, world))


def test_attention_without_routes_says_what_to_do() -> None:
    rows = torch.zeros(3, 4, 4)
    with pytest.raises(SpecError, match=r"microbatch\.routes"):
        attention(rows, rows, rows, kind="full_attention")


@pytest.mark.parametrize(
    ("lo", "hi", "expected"),
    [
        (3, 3, (3, 4)),
        (2, 3, (2, 4)),
        (1, 2, (0, 4)),
        (3, 4, (0, 8)),
        (7, 8, (0, 16)),
        (9, 12, (8, 16)),
        (17, 40, (0, 48)),
    ],
)
def test_covering_blocks(lo: int, hi: int, expected: tuple[int, int]) -> None:
    assert covering_block(lo, hi, num_ranks=48, ranks_per_node=8) == Block(*expected)


def test_blocks_of_nodes_that_are_no_power_of_two_stay_in_their_node() -> None:
    assert covering_block(8, 11, num_ranks=24, ranks_per_node=12) == Block(8, 12)
    assert covering_block(12, 13, num_ranks=24, ranks_per_node=12) == Block(12, 14)
    assert covering_block(7, 8, num_ranks=24, ranks_per_node=12) == Block(0, 12)


def test_each_rank_set_becomes_one_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 16)
    monkeypatch.setattr("torch.distributed.get_backend", lambda: "gloo")
    monkeypatch.setattr("torch.distributed.new_group", lambda ranks: made.append(ranks))
    world = ProcessWorld(ranks_per_node=8)
    plans = [plan_of(seed, num_ranks=16, lengths=(40, 3, 3, 3, 2, 2, 30)) for seed in range(6)]
    for plan in plans * 48:
        world.prepare(plan_blocks(plan))
    assert len(made) == len({tuple(ranks) for ranks in made})
    assert len(made) <= 15
    with pytest.raises(SpecError, match=r"no group of ranks 3 to 4 yet: every rank calls agree"):
        world.comm(Block(3, 5))


def test_a_world_is_where_its_backend_sends_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank's GPU by its number, since "cuda" is GPU 0 on a thread that was never told."""
    for name, value in {"is_initialized": True, "get_rank": 0, "get_world_size": 2, "get_backend": "nccl"}.items():
        monkeypatch.setattr(f"torch.distributed.{name}", lambda value=value: value)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 3)
    assert ProcessWorld(ranks_per_node=2).device == torch.device("cuda", 3)
    assert ProcessWorld(ranks_per_node=2, device=torch.device("cpu")).device == torch.device("cpu")
    assert solo_world(torch.device("cuda")).device == torch.device("cuda", 3)


def test_who_comes_to_a_failed_world_later_fails_at_once_and_the_next_run_is_well() -> None:
    local, late = LocalWorld(3, 3), threading.Event()

    def fail(world: World) -> None:
        if world.rank == 0:
            late.set()
            raise ValueError("broken")
        late.wait()
        time.sleep(0.1)
        if world.rank == 1:
            world.comm(Block(1, 3)).all_reduce(torch.ones(1))  # type: ignore[union-attr]

    started = time.monotonic()
    with pytest.raises(ValueError, match="broken"):
        local.run(fail)
    assert time.monotonic() - started < 30  # a meeting waits for 60 s
    assert local.run(lambda world: world.gather_ints([world.rank])) == [[[0], [1], [2]]] * 3
