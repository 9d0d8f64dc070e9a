"""Pieces of rows, staging buffers that are used again, and what a profiler sees."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerwise import LocalWorld
from layerwise.errors import CollectiveError, PlanMismatchError
from layerwise.exchange import STAGING, Progress, waiting
from layerwise.groups import World
from layerwise.kernels.pieces import Pieces
from layerwise.plan import StepPlan
from layerwise.route import Runs, build_route, cut, runs
from layerwise.runtime import attention, build_routes, plan_blocks
from layerwise.spec import AttentionSpec
from layerwise.traffic import Block, exchange_blocks
from tests.exchange.sites import assert_close, run_rank, run_sites
from tests.exchange.test_rows import units_of
from tests.random_plans import random_step
from tests.runtime.test_attention_site import run_site

SPECS = {
    "full_attention": AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=4, v_head_dim=3),
    "sliding_attention": AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=4, v_head_dim=3, window=5),
}


def plan_of(seed: int) -> StepPlan:
    return random_step(np.random.default_rng(seed), [37, 1, 9, 30, 2], SPECS, 6, 3)


@pytest.mark.parametrize("long_run_tokens", [1, 3])
def test_blocks_and_indices_together_equal_the_dense_computation(
    monkeypatch: pytest.MonkeyPatch, long_run_tokens: int
) -> None:
    monkeypatch.setattr(runs, "LONG_RUN_TOKENS", long_run_tokens)
    run_site(plan_of(0), seed=0, with_sinks=False)


def test_runs_are_joined_and_cut() -> None:
    """Tokens of one head out of four: 0-1 and 2-69 join, 80 and 85 share an index, 3 goes back, 7 has another peer."""
    tokens, lengths, peers = [0, 2, 80, 85, 3, 7], [2, 68, 1, 2, 1, 1], [0, 0, 0, 0, 0, 1]
    columns = [np.array(column) for column in (peers, peers, [4 * t + 1 for t in tokens], [4] * 6, [1] * 6, lengths)]
    (found,) = cut(Runs(*columns))
    assert found.peer.tolist() == [0, 0, 0, 1]
    pieces = Pieces(found.table, torch.from_numpy(found.listed))
    assert units_of(pieces) == [[4 * t + 1 for t in range(70)], [321, 341, 345], [13], [29]]
    assert [block.tokens is None for block in pieces.blocks] == [True, False, True, True]


@pytest.mark.parametrize("seed", range(3))
def test_tiles_get_each_row_once_and_rows_that_stay_match(seed: int) -> None:
    plan = plan_of(seed)
    for kind, spec in plan.attention.items():
        blocks = exchange_blocks(plan.microbatches[0], kind, 6, 3)
        for rank in range(6):
            route = build_route(plan.microbatches[0], kind, spec, rank, blocks)
            me = 0 if route.block is None else rank - route.block.lo
            for row_map in route.to_tiles:
                arriving = [row for rows in units_of(row_map.dst.pieces) for row in rows]
                assert sorted(arriving) == list(range(row_map.dst.num_rows))
                own = [side.pieces.table[side.peer == me] for side in (row_map.src, row_map.dst)]
                assert own[0][:, 2:4].tolist() == own[1][:, 2:4].tolist()  # width, num_tokens


def test_buffers_with_old_contents_change_nothing() -> None:
    plan = plan_of(1)
    clean = run_sites(plan, 1)
    buffers = [STAGING.take(4096, torch.zeros(0, dtype=torch.float64)).fill_(torch.nan) for _ in range(12)]
    STAGING.give(*buffers)
    for before, after in zip(clean, run_sites(plan, 2), strict=True):
        assert_close(before, after)


def test_second_derivatives_are_refused() -> None:
    """Backward moves rows by calls that autograd does not see."""
    plan = plan_of(0)
    kind, spec = "full_attention", SPECS["full_attention"]

    def on_rank(world: World) -> None:
        world.prepare(plan_blocks(plan))
        routes = build_routes(plan, 0, world)
        heads = ((8, 4), (2, 4), (2, spec.v_head_dim))
        rows = [torch.ones(len(routes.position_ids), *size, requires_grad=True) for size in heads]
        (grad, *_) = torch.autograd.grad(
            attention(*rows, kind=kind, routes=routes).square().sum(), rows, create_graph=True
        )
        grad.square().sum().backward()

    with pytest.raises(RuntimeError, match="once_differentiable"):
        LocalWorld(6, 3).run(on_rank)


def test_a_profiler_sees_where_a_step_goes() -> None:
    plan = random_step(np.random.default_rng(3), [12, 20, 5], SPECS, 2, 1)

    def on_rank(world: World) -> set[str]:
        if world.rank == 0:
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                run_rank(plan, 1, world)
            return {event.name for event in profile.events()}
        run_rank(plan, 1, world)
        return set()

    names, _ = LocalWorld(2, 1).run(on_rank)
    for kind in SPECS:
        ways = [f"layerwise.exchange_{way}.{kind}" for way in ("in", "out")]
        assert {f"layerwise.attention.{kind}", *ways, *(f"{way}.backward" for way in ways)} <= names


@pytest.mark.parametrize("fault", [torch.OutOfMemoryError, torch.AcceleratorError, PlanMismatchError])
def test_a_rank_whose_own_fault_ends_a_wait_accuses_nobody(fault: type[Exception]) -> None:
    with pytest.raises(fault, match="mine"), waiting(Progress(), 0, Block(0, 2)):
        raise fault("mine")
    with (
        pytest.raises(CollectiveError, match=r"rank 0: waited .* for rank 1: theirs"),
        waiting(Progress(), 0, Block(0, 2)),
    ):
        raise RuntimeError("theirs")
