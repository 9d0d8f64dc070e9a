"""LAYERWISE_CHECK_CALLS=1: ranks that are not at the same exchange are told before rows are mixed up."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from layerwise import LocalWorld
from layerwise.errors import PlanMismatchError
from layerwise.exchange import collective
from layerwise.groups import World
from layerwise.plan import StepPlan
from layerwise.planners import Planner
from layerwise.runtime import attention, build_routes, plan_blocks, use_routes
from layerwise.spec import ClusterSpec, ModelSpec

KIND = "full_attention"
MODEL = ModelSpec(
    num_layers=1,
    layer_types=(KIND,),
    hidden_size=8,
    vocab_size=8,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    intermediate_size=8,
)
CLUSTER = ClusterSpec(num_nodes=2, ranks_per_node=2)


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> StepPlan:
    """Two micro-batches of the same shape on all four ranks, with checks."""
    monkeypatch.setattr(collective, "CHECKS_CALLS", True)
    options = {"sp_degree": 4}
    plan = Planner(strategy="static", cluster=CLUSTER, model=MODEL, max_tokens_per_rank=10, options=options)([40, 40])
    assert len(plan.microbatches) == 2
    return plan


def run_step(plan: StepPlan, world: World, order: tuple[int, int] = (0, 1), dtype: torch.dtype = torch.float64) -> None:
    """Forward and backward of one layer in each micro-batch."""
    world.prepare(plan_blocks(plan))
    spec = plan.attention[KIND]
    for index in order:
        routes = build_routes(plan, index, world)
        num_tokens = len(routes.position_ids)
        shapes = [
            (num_tokens, heads, spec.head_dim) for heads in (spec.num_heads, spec.num_kv_heads, spec.num_kv_heads)
        ]
        rows: list[Tensor] = [torch.ones(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        with use_routes(routes):
            attention(*rows, kind=KIND).sum().backward()


def test_ranks_that_are_at_the_same_place_pass(plan: StepPlan) -> None:
    LocalWorld(4, 2).run(lambda world: run_step(plan, world))


def test_micro_batches_in_another_order(plan: StepPlan) -> None:
    with pytest.raises(PlanMismatchError) as caught:
        LocalWorld(4, 2).run(lambda world: run_step(plan, world, (1, 0) if world.rank == 1 else (0, 1)))
    ends = [f"micro-batch {index}, layer 0, forward, exchange_in of {KIND}, float64" for index in (0, 1)]
    assert all(end in str(caught.value) for end in ends), caught.value


def test_a_model_of_another_dtype(plan: StepPlan) -> None:
    with pytest.raises(PlanMismatchError, match=r"float(32|64), but rank \d is at .*float(32|64): all ranks must"):
        LocalWorld(4, 2).run(
            lambda world: run_step(plan, world, dtype=torch.float32 if world.rank == 2 else torch.float64)
        )


def test_another_plan(plan: StepPlan) -> None:
    """As many samples, but another length."""
    other = Planner(strategy="static", cluster=CLUSTER, model=MODEL, max_tokens_per_rank=20, options={"sp_degree": 4})
    with pytest.raises(PlanMismatchError, match=r"sends rank \d \d+ elements at .*, where \d+ are expected"):
        LocalWorld(4, 2).run(lambda world: run_step(other([80]) if world.rank == 3 else plan, world, (0, 0)))
