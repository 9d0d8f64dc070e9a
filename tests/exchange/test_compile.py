"""torch.compile around the exchange: plans that change do not recompile, and numbers stay as they are."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from layerwise import token_loss
from layerwise.groups import World
from layerwise.model import HybridLM, ModelOptions
from layerwise.plan import StepPlan
from layerwise.runtime import agree, build_routes, use_routes
from layerwise.train.launch import launch
from tests.runtime.test_strategies import planner_for, tiny_model

DENSE = {"num_experts": 0, "experts_per_token": 0, "moe_intermediate_size": 0, "shared_intermediate_size": 0}
SPEC = tiny_model(4, 2, **DENSE, intermediate_size=24)
# Of several lengths and sample counts; the first two may compile, for fixed and for changing shapes.
STEPS = [[11, 9, 14], [5, 40], [7, 8, 9, 20], [64], [3, 3, 50]]
WARM_UP = 2


def plan_of(step: int) -> StepPlan:
    """Both ranks have tokens: torch compiles once more for none."""
    return planner_for("dynamic", 2, SPEC, STEPS[step])(tuple(STEPS[step]))


def sharded_model(compiled: bool) -> HybridLM:
    from torch.distributed.fsdp import fully_shard

    model = HybridLM(SPEC, ModelOptions(dtype=torch.float64, seed=1))
    for layer in model.layers:
        if compiled:
            layer.compile(backend="aot_eager")
        fully_shard(layer)
    fully_shard(model)
    return model


def run_step(model: HybridLM, step: int, world: World) -> list[Tensor]:
    """The loss, and every gradient in full."""
    plan = plan_of(step)
    agree(plan, world, num_valid_tokens=0)
    with use_routes(build_routes(plan, 0, world)) as routes:
        assert all(route.block for route in routes.by_kind.values())
        # Any tokens do: they are the same for both models.
        ids = (routes.position_ids * 7 + step) % SPEC.vocab_size
        loss = token_loss(model(ids, routes.position_ids).logits, ids, sum(STEPS[step]))
        loss.backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    model.zero_grad()
    return [loss.detach(), *grads]


def compare_on_rank(world: World, device: torch.device) -> None:
    import torch._dynamo
    from torch._dynamo.utils import counters

    plain, compiled = sharded_model(compiled=False), sharded_model(compiled=True)
    for step in range(len(STEPS)):
        if step == WARM_UP:
            graphs = counters["stats"]["unique_graphs"]
            torch._dynamo.config.error_on_recompile = True
        for a, b in zip(run_step(plain, step, world), run_step(compiled, step, world), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-13)
    assert graphs > 0
    assert counters["stats"]["unique_graphs"] == graphs


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore::UserWarning:torch")  # of torch about itself, while it compiles
def test_compiled_blocks_under_fsdp_follow_changing_plans_without_recompiling() -> None:
    launch(compare_on_rank, num_ranks=2, ranks_per_node=1, device="cpu", timeout_s=100)


def test_nothing_of_the_compiler_is_imported_without_it() -> None:
    code = "import sys, layerwise.runtime.routes; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
