"""HybridLM through the real runtime, on arbitrary plans, against one sample at a time on one process."""

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.groups import LocalWorld, World
from layerwise.loss import balance_loss, token_loss
from layerwise.model import HybridLM, ModelOptions
from layerwise.plan import StepPlan
from layerwise.runtime import agree, build_routes, use_routes
from layerwise.spec import ModelSpec
from tests.random_plans import random_step
from tests.reference import Sample, reference_loss

LENGTHS = [37, 51, 1, 13]
BALANCE_COEF = 0.1


def build_spec(num_heads: int, num_kv_heads: int, **changes: object) -> ModelSpec:
    return ModelSpec(
        **{
            "num_layers": 3,
            "layer_types": ("full_attention", "sliding_attention", "chunked_attention"),
            "hidden_size": 16,
            "vocab_size": 11,
            "num_heads": num_heads,
            "num_kv_heads": num_kv_heads,
            "head_dim": 4,
            "v_head_dim": 6,
            "sliding_window": 5,
            "attention_chunk_size": 4,
            "num_experts": 5,
            "experts_per_token": 2,
            "moe_intermediate_size": 6,
            "shared_intermediate_size": 4,
            **changes,
        }
    )


def local_rows(plan: StepPlan, rank: int, per_sample: list[Tensor]) -> Tensor:
    mine = [shard for shard in plan.microbatches[0].shards if shard.rank == rank]
    return torch.cat([per_sample[0][:0], *(per_sample[s.sample][s.lo : s.hi] for s in mine)])


def run_rank(
    world: World, plan: StepPlan, spec: ModelSpec, options: ModelOptions, samples: list[Sample]
) -> tuple[Tensor, list[Tensor]]:
    """This rank's loss and gradients."""
    model = HybridLM(spec, options)
    labels = [torch.cat([s.targets, torch.tensor([-100])]) for s in samples]
    agree(plan, world, num_valid_tokens=0)
    with use_routes(build_routes(plan, 0, world)) as routes:
        out = model(local_rows(plan, world.rank, [s.input_ids for s in samples]), routes.position_ids)
        num_valid = sum(len(s.targets) for s in samples)
        loss = token_loss(out.logits, local_rows(plan, world.rank, labels), num_valid)
        if out.router is not None:
            loss = loss + BALANCE_COEF * balance_loss(
                out.router.counts,
                out.router.prob_sums,
                experts_per_token=spec.experts_per_token,
                num_tokens=plan.num_tokens,
            )
    loss.backward()
    return loss.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("moving_kinds", [(), ("full_attention",), ("chunked_attention", "sliding_attention")])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("spec", "num_ranks"),
    [
        (build_spec(8, 2), 4),
        (build_spec(7, 7, tie_embeddings=False), 8),
        (build_spec(4, 1, kv_heads_by_kind={"sliding_attention": 2}), 8),
        (
            build_spec(
                6,
                3,
                num_experts=0,
                experts_per_token=0,
                moe_intermediate_size=0,
                shared_intermediate_size=0,
                intermediate_size=8,
            ),
            4,
        ),
    ],
    ids=["8:2", "7:7", "4:1", "6:3-dense"],
)
def test_any_plan_gives_the_loss_and_gradients_of_one_process(
    spec: ModelSpec, num_ranks: int, checkpointing: bool, moving_kinds: tuple[str, ...]
) -> None:
    attention = {kind: spec.attention(kind) for kind in spec.kinds}
    plan = random_step(np.random.default_rng(num_ranks), LENGTHS, attention, num_ranks, 4, moving_kinds)
    generator = torch.Generator().manual_seed(0)
    samples = [Sample(torch.randint(0, 11, (n,), generator=generator)) for n in LENGTHS]
    options = ModelOptions(dtype=torch.float64, init_std=0.3, activation_checkpointing=checkpointing)

    whole = HybridLM(spec, options)
    expected = reference_loss(whole, samples, BALANCE_COEF)
    expected_grads = torch.autograd.grad(expected, list(whole.parameters()))
    ranks = LocalWorld(num_ranks, 4).run(lambda world: run_rank(world, plan, spec, options, samples))

    torch.testing.assert_close(sum(loss for loss, _ in ranks), expected.detach(), rtol=1e-12, atol=0)
    for index, (name, _) in enumerate(whole.named_parameters()):
        grad = sum(grads[index] for _, grads in ranks)
        error = (grad - expected_grads[index]).norm() / expected_grads[index].norm()
        assert error <= 1e-10, f"{name}: relative error {error}"


def test_bfloat16_autocast_stays_near_float32() -> None:
    spec = build_spec(8, 2)
    plan = random_step(np.random.default_rng(0), LENGTHS, {k: spec.attention(k) for k in spec.kinds}, 4, 4)
    generator = torch.Generator().manual_seed(0)
    samples = [Sample(torch.randint(0, 11, (n,), generator=generator)) for n in LENGTHS]

    def run(world: World, enabled: bool) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            return run_rank(world, plan, spec, ModelOptions(init_std=0.1), samples)[0]

    low, full = (sum(LocalWorld(4, 4).run(lambda world, on=on: run(world, on))) for on in (True, False))
    assert low != full
    torch.testing.assert_close(low, full, rtol=0.01, atol=0)
