"""FSDP2, HSDP and expert parallelism, together with parents and children: five AdamW steps equal one process's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from layerwise import ClusterSpec, LocalWorld, PlannedLoader, plan_step
from layerwise.errors import SpecError
from layerwise.exchange import Meter
from layerwise.groups import ProcessWorld, World
from layerwise.model import HybridLM, ModelOptions
from layerwise.model.moe import EXPERTS, Experts
from layerwise.runtime import build_routes, use_routes
from layerwise.traffic import Block
from layerwise.train.config import TrainConfig
from layerwise.train.launch import launch
from layerwise.train.loop import accumulate_gradients, build_model, build_optimizer, update
from layerwise.train.sharding import shard_model
from tests.planners.builders import tiny_wide_planner
from tests.reference import Sample, reference_loss
from tests.runtime.test_strategies import make_samples, tiny_model

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]
LENGTHS = [150, 3, 21, 44, 1, 9, 80, 13, 2, 30]
# The third step leaves most ranks without any token, the fourth is one sample alone.
STEPS: list[Sequence[int]] = [range(10), [6, 1, 2], [8], [0], range(2, 10)]
CLIP = 0.5


def make_config(num_ranks: int, **settings: Any) -> TrainConfig:
    cluster = {"num_nodes": 2, "ranks_per_node": num_ranks // 2}
    optimizer = {"learning_rate": 1e-2, "warmup_steps": 2, "clip_grad_norm": CLIP}
    base = {"model": tiny_model(8, 2), "cluster": cluster, "optimizer": optimizer, "dtype": "float64"}
    return TrainConfig.model_validate(base | {"tokens_per_step": 1, "max_tokens_per_rank": 1} | settings)


def one_process(config: TrainConfig, samples: list[Sample]) -> tuple[list[Any], dict[str, Tensor]]:
    """(loss, norm, gradients by name) of each step, and the weights after the last; torch's own clipping and AdamW."""
    options = ModelOptions(dtype=torch.float64, rope_theta=config.rope_theta, seed=config.seed)
    model, opt = HybridLM(config.model, options), config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=opt.learning_rate, betas=opt.betas, weight_decay=opt.weight_decay
    )
    steps = []
    for index, ids in enumerate(STEPS):
        loss = reference_loss(model, [samples[i] for i in ids], config.balance_coef)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.param_groups[0]["lr"] = opt.learning_rate * min(1, (index + 1) / (opt.warmup_steps + 1))
        optimizer.step()
        optimizer.zero_grad()
        steps.append((float(loss.detach()), float(norm), grads))
    return steps, {name: p.detach() for name, p in model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def on_rank(config: TrainConfig, samples: list[Sample], microbatches: int, world: ProcessWorld) -> Any:
    """The same of a sharded model; every rank has the same result."""
    model = build_model(config, world, torch.device("cpu"))
    optimizer = build_optimizer(config, model)
    planner = tiny_wide_planner(
        config.strategy, world.num_ranks, config.model, [len(s.input_ids) for s in samples], microbatches=microbatches
    )
    data = [{"input_ids": s.input_ids.numpy(), "labels": s.labels.numpy()} for s in samples]
    steps, most = [], 0
    for step in PlannedLoader(dataset=data, planner=planner, world=world, steps=STEPS):
        losses = accumulate_gradients(model, step, config)
        total = losses["loss"] + config.balance_coef * losses["balance_loss"]
        world.all_reduce(total)
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        steps.append((float(total), update(model, optimizer, step.index, config, world), grads))
        most = max(most, len(step.microbatches))
    assert (most > 1) == (microbatches > 1)
    return steps, {name: whole(p) for name, p in model.named_parameters()}


def assert_equal(ours: Any, expected: Any) -> None:
    (steps, weights), (expected_steps, expected_weights) = ours, expected
    for (loss, norm, grads), (other_loss, other_norm, other_grads) in zip(steps, expected_steps, strict=True):
        assert abs(loss - other_loss) <= 1e-10 * abs(other_loss)
        assert abs(norm - other_norm) <= 1e-10 * other_norm
        for name, grad in other_grads.items():
            assert (grads[name] - grad).norm() <= 1e-10 * grad.norm(), name
    for name, weight in expected_weights.items():
        assert (weights[name] - weight).norm() <= 1e-9 * weight.norm(), name


def check(tmp_path: Path, num_ranks: int, microbatches: int, **settings: Any) -> None:
    config = make_config(num_ranks, **settings)
    samples = make_samples(LENGTHS, 31, masked=lambda s, t: (s + t) % 3 == 0)

    def main(world: ProcessWorld, device: torch.device) -> None:
        result = on_rank(config, samples, microbatches, world)
        if world.rank == num_ranks - 1:
            torch.save(result, tmp_path / "result")

    launch(main, num_ranks=num_ranks, ranks_per_node=num_ranks // 2, device="cpu", timeout_s=60)
    assert_equal(torch.load(tmp_path / "result"), one_process(config, samples))


def test_all_of_it_on_four_ranks(tmp_path: Path) -> None:
    check(tmp_path, 4, 2, sharding="hsdp", expert_parallel=2, activation_checkpointing=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "sharding", "experts"), [("repack+parents", "hsdp", 2), ("joint", "fsdp", 4), ("dynamic", "fsdp", 1)]
)
def test_all_of_it_on_sixteen_ranks(tmp_path: Path, strategy: str, sharding: str, experts: int) -> None:
    check(tmp_path, 16, 4, strategy=strategy, sharding=sharding, expert_parallel=experts)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["fsdp", "hsdp"])
def test_dense_models_and_untied_heads(tmp_path: Path, sharding: str) -> None:
    dense = dict.fromkeys(("num_experts", "experts_per_token", "moe_intermediate_size", "shared_intermediate_size"), 0)
    model = tiny_model(6, 3, **dense, intermediate_size=12, tie_embeddings=False)
    check(tmp_path, 4, 1, model=model, sharding=sharding)


def test_weights_start_alike_however_they_are_sharded(tmp_path: Path) -> None:
    """And a caller's own mesh will do, whatever else it is used for."""
    config = make_config(4)
    expected = HybridLM(config.model, ModelOptions(dtype=torch.float64, rope_theta=config.rope_theta))

    def main(world: ProcessWorld, device: torch.device) -> None:
        larger = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("pipeline", "replicate", "shard"))
        experts_apart = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "ep"))
        for mesh, copies in ((experts_apart, 1), (larger["replicate", "shard"], 2)):
            model = HybridLM(config.model, expected.options, device="meta")
            shard_model(model, mesh)
            model.materialize(device)
            sizes = [sum(p.to_local().numel() for p in model.parameters())]
            total = sum(p.numel() for p in model.parameters())
            assert sum(row[0] for row in world.gather_ints(sizes)) == copies * total, "each weight once per copy"
            assert {p.device_mesh.size() for p in model.parameters()} == {4}, "copies know one another"
            for (name, p), other in zip(model.named_parameters(), expected.parameters(), strict=True):
                assert torch.equal(whole(p), other), name
        shifted = DeviceMesh("cpu", torch.tensor([[0, 2], [1, 3]]), mesh_dim_names=("shard", "ep"))
        with pytest.raises(SpecError, match=r"ranks \[[0-9], [0-9]\] along mesh dimension 'ep' are not consecutive"):
            shard_model(HybridLM(config.model, device="meta"), shifted)
        with pytest.raises(SpecError, match=r"the mesh has dimensions \('dp', 'tp'\); expected .*'shard' is a must"):
            shard_model(
                HybridLM(config.model, device="meta"), init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            )
        (tmp_path / str(world.rank)).touch()

    launch(main, num_ranks=4, ranks_per_node=2, device="cpu", timeout_s=60)
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.slow
def test_bfloat16_gathers_half_and_sums_gradients_in_float32(tmp_path: Path) -> None:
    samples = make_samples(LENGTHS, 31)

    def main(world: ProcessWorld, device: torch.device) -> None:
        results = []
        for dtype in ("float32", "bfloat16"):
            config = make_config(2, dtype=dtype, sharding="fsdp", expert_parallel=2)
            steps, weights = on_rank(config, samples, 1, world)
            assert {w.dtype for w in weights.values()} == {g.dtype for _, _, grads in steps for g in grads.values()}
            assert {w.dtype for w in weights.values()} == {torch.float32}
            results.append(torch.tensor([loss for loss, _, _ in steps]))
        full, low = results
        assert not torch.equal(full, low)
        torch.testing.assert_close(low, full, rtol=2e-2, atol=0)
        (tmp_path / str(world.rank)).touch()

    launch(main, num_ranks=2, ranks_per_node=1, device="cpu", timeout_s=60)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sharding": "replicate", "expert_parallel": 2}, "needs sharding=fsdp or sharding=hsdp"),
        (
            {"sharding": "fsdp", "expert_parallel": 3},
            r"must divide the 4 experts and the 8 ranks .* values: \[1, 2, 4\]",
        ),
        ({"sharding": "hsdp", "expert_parallel": 8}, r"the 4 experts and the 4 ranks"),
        ({"sharding": "zero"}, "'replicate', 'fsdp' or 'hsdp'"),
    ],
)
def test_what_cannot_be_sharded_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(8, **settings)


@pytest.mark.parametrize("counts", [[[5, 0, 2, 1], [0, 0, 0, 0]], [[0, 0, 0, 3], [4, 4, 4, 4]], [[0] * 4, [0] * 4]])
def test_rows_find_their_experts_and_come_back(counts: list[list[int]]) -> None:
    """Whatever each of two ranks has for each of four experts, nothing included."""
    spec = tiny_model(8, 2)
    experts = Experts(spec, torch.float64)
    generator = torch.Generator().manual_seed(0)
    for p in experts.parameters():
        torch.nn.init.normal_(p, generator=generator)
    rows = [torch.randn(sum(c), 16, dtype=torch.float64, generator=generator) for c in counts]
    expected = [experts(x.requires_grad_(), torch.tensor(c)) for x, c in zip(rows, counts, strict=True)]
    total = sum((out * out).sum() for out in expected)
    grads = torch.autograd.grad(total, [*rows, *experts.parameters()])

    cluster = ClusterSpec(num_nodes=2, ranks_per_node=1)
    plan = plan_step([8], cluster=cluster, model=spec, strategy="static", max_tokens_per_rank=8)

    def main(world: World) -> Any:
        block = Block(0, 2)
        world.prepare([block])
        mine = Experts(spec, torch.float64)
        for name, p in experts.named_parameters():
            setattr(mine, name, torch.nn.Parameter(p.detach()[2 * world.rank : 2 * world.rank + 2].clone()))
        mine.comm = world.comm(block)
        x = rows[world.rank].detach().requires_grad_()
        meter = Meter(1)
        with use_routes(build_routes(plan, 0, world, meter=meter)):
            out = mine(x, torch.tensor(counts[world.rank]))
        assert meter.counts[EXPERTS].calls == 2
        return out.detach(), *torch.autograd.grad((out * out).sum(), [x, *mine.parameters()])

    ours = LocalWorld(2, 1).run(main)
    for rank, (out, grad, *_) in enumerate(ours):
        torch.testing.assert_close(out, expected[rank].detach())
        torch.testing.assert_close(grad, grads[rank])
    for index in range(2):
        torch.testing.assert_close(torch.cat([result[2 + index] for result in ours]), grads[2 + index])
