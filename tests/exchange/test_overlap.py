"""Parts of an attention site: the same numbers and bytes as without, and rows that travel while attention computes."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise import LocalWorld
from layerwise.errors import PlanError, PlanMismatchError
from layerwise.groups import World
from layerwise.parts import split_tiles
from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.runtime import agree, routes
from layerwise.spec import AttentionSpec
from layerwise.traffic import exchange_blocks
from layerwise.train.launch import launch
from tests.exchange.sites import assert_close, run_rank, run_sites
from tests.random_plans import random_step
from tests.runtime.test_strategies import STRATEGIES, planner_for, tiny_model


@pytest.mark.parametrize("heads", [(12, 6), (8, 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_results_are_the_same_to_the_bit_and_bytes_too(strategy: str, heads: tuple[int, int]) -> None:
    spec, lengths = tiny_model(*heads), [90, 5, 17, 1, 33, 20]
    plan = planner_for(strategy, 4, spec, lengths)(tuple(lengths))
    for rank, (before, after) in enumerate(zip(run_sites(plan, 1), run_sites(plan, 3), strict=True)):
        assert_close(before, after, rtol=0, atol=0)
        for kind in plan.attention:
            one, many = before[kind].count, after[kind].count
            assert (many.fast_bytes, many.slow_bytes) == (one.fast_bytes, one.slow_bytes)
            in_block = any(rank in range(b.lo, b.hi) for b in exchange_blocks(plan.microbatches[0], kind, 4, 2))
            assert (one.calls, many.calls) == ((4, 12) if in_block else (0, 0))


@pytest.mark.parametrize("seed", range(3))
def test_arbitrary_plans_agree_up_to_the_order_of_sums(seed: int) -> None:
    specs = {"full_attention": AttentionSpec(num_heads=12, num_kv_heads=4, head_dim=4, v_head_dim=2)}
    plan = random_step(np.random.default_rng(seed), [17, 1, 9, 30], specs, 6, 3)
    for before, after in zip(run_sites(plan, 1), run_sites(plan, 3), strict=True):
        assert_close(before, after)


@dataclass
class Watcher:
    """A comm that notes when each all-to-all begins and when somebody waits for it."""

    comm: Any
    events: list[str]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.comm, name)

    def start_all_to_all(self, *args: Any) -> Any:
        number = sum(event.startswith("start") for event in self.events)
        self.events.append(f"start {number}")
        return Watched(self.comm.start_all_to_all(*args), lambda: self.events.append(f"wait {number}"))


@dataclass
class Watched:
    """A pending collective that says when somebody waits for it."""

    pending: Any
    say: Callable[[], None]

    def wait(self) -> None:
        self.say()
        self.pending.wait()


def test_one_part_travels_while_another_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=4, v_head_dim=4)
    plan = StepPlan(
        strategy="two parts of two heads each",
        num_ranks=2,
        ranks_per_node=2,
        max_tokens_per_rank=20,
        lengths=(40,),
        attention={"full_attention": spec},
        microbatches=(
            MicrobatchPlan(
                shards=shard_table([Shard(0, 0, 0, 20), Shard(0, 1, 20, 40)]),
                tiles={
                    "full_attention": tile_table([Tile(0, rank, 0, 40, 0, 4 * rank, 4 * rank + 4) for rank in (0, 1)])
                },
            ),
        ),
    )
    events: dict[int, list[str]] = defaultdict(list)  # by thread, and a thread is a rank

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, events: list[str], out: Tensor) -> Tensor:
            ctx.events = events
            events.append("kernel")
            return out.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
            ctx.events.append("kernel")
            return None, grad

    attend = routes.attend
    monkeypatch.setattr(routes, "attend", lambda *args: Kernel.apply(events[get_ident()], attend(*args)))
    run_sites(plan, 2, lambda comm: Watcher(comm, events[get_ident()]))
    forward = ["start 0", "start 1", "wait 0", "kernel", "start 2", "wait 1", "kernel", "start 3", "wait 2", "wait 3"]
    backward = ["start 4", "start 5", "wait 4", "kernel", "start 6", "wait 5", "kernel", "start 7", "wait 6", "wait 7"]
    assert list(events.values()) == [forward + backward] * 2


def compare_on_rank(world: World, device: torch.device) -> None:
    spec, lengths = tiny_model(12, 6), [90, 5, 17, 1, 33, 20]
    plan = planner_for("dynamic", 2, spec, lengths)(tuple(lengths))
    whole, parts = (run_rank(plan, num_parts, world) for num_parts in (1, 3))
    assert_close(whole, parts, rtol=0, atol=0)
    assert parts["full_attention"].count.calls == 12


@pytest.mark.ranks
def test_parts_over_gloo() -> None:
    launch(compare_on_rank, num_ranks=2, ranks_per_node=1, device="cpu", timeout_s=60)


def test_what_split_tiles_makes() -> None:
    spec = AttentionSpec(num_heads=8, num_kv_heads=4, head_dim=4, v_head_dim=4)
    # Sample 0 has two KV heads per tile, samples 1..3 one.
    tiles = [Tile(0, rank, 0, 50, 0, 4 * rank, 4 * rank + 4) for rank in (0, 1)]
    tiles += [Tile(sample, 2, 0, length, 0, 2, 4) for sample, length in ((1, 10), (2, 9), (3, 3))]
    first, second = split_tiles(tile_table(tiles), spec, 2)
    assert list(first) == [Tile(0, 0, 0, 50, 0, 0, 2), Tile(0, 1, 0, 50, 0, 4, 6), Tile(1, 2, 0, 10, 0, 2, 4)]
    assert [t[:2] + t[-2:] for t in second] == [(0, 0, 2, 4), (0, 1, 6, 8), (2, 2, 2, 4), (3, 2, 2, 4)]
    assert Counter(len(table) for table in split_tiles(tile_table(tiles[:2]), spec, 3)) == Counter({2: 2, 0: 1})


@pytest.mark.parametrize("num_parts", [0, -1, 17, 1.5, "2", None])
def test_no_number_of_parts_is_refused(num_parts: Any) -> None:
    plan = replace(random_step(np.random.default_rng(0), [6], {}, 1, 1), overlap_parts=num_parts)
    message = f"overlap_parts={num_parts!r} must be a whole number, 1 (no overlap) to 16"
    with pytest.raises(PlanError, match=re.escape(message)):
        plan.validate()


def test_ranks_with_other_parts_do_not_agree() -> None:
    """They would wait for all-to-alls that the others never begin."""
    plan = random_step(np.random.default_rng(0), [6, 5], {}, 2, 1)
    with pytest.raises(
        PlanMismatchError, match=r"overlap_parts is [12] on rank 0, but overlap_parts is [12] on rank 1;"
    ):
        LocalWorld(2, 1).run(
            lambda world: agree(replace(plan, overlap_parts=1 + world.rank), world, num_valid_tokens=11)
        )
