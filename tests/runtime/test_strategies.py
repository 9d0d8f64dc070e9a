"""Loss and every gradient of every strategy equal the same samples one at a time on one process, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from layerwise import LocalWorld, ModelSpec, PlannedLoader, balance_loss, token_loss
from layerwise.groups import World
from layerwise.model import HybridLM, ModelOptions
from layerwise.plan import StepPlan
from tests.planners.builders import tiny_wide_planner
from tests.reference import Sample, reference_loss

MAIN_STRATEGIES = ("static", "dynamic", "repack", "repack+parents")
# Tested in fewer worlds, to save time; their plans differ from the others' in tiles and in moves only.
RIVALS = ("halo", "redistribute", "joint")
STRATEGIES = (*MAIN_STRATEGIES, *RIVALS)
# Of 16 and 32 ranks, which take long, `make test` has these; the others are slow tests.
FAST = (("dynamic", 16), ("repack+parents", 16), ("joint", 16))
HEADS = ((8, 2), (7, 7), (20, 20), (6, 3), (40, 8), (4, 1))
BALANCE_COEF = 0.1
LENGTHS = {
    "three": [37, 51, 40],
    "ones": [1, 1, 5, 1],
    "thirteen": [13],
    "three tokens": [3],
    "sevens": [7] * 8,
    "one long": [1000, *np.random.default_rng(0).integers(10, 51, 40).tolist()],
}


def tiny_model(num_heads: int, num_kv_heads: int, **changes: object) -> ModelSpec:
    settings = {
        "num_layers": 3,
        "layer_types": ("full_attention", "sliding_attention", "chunked_attention"),
        "hidden_size": 16,
        "vocab_size": 31,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": 4,
        "sliding_window": 9,
        "attention_chunk_size": 8,
        "num_experts": 4,
        "experts_per_token": 2,
        "moe_intermediate_size": 8,
        "shared_intermediate_size": 8,
    }
    return ModelSpec.model_validate(settings | changes)


def planner_for(
    strategy: str, num_ranks: int, spec: ModelSpec, lengths: Sequence[int], *, microbatches: int = 1
) -> Callable[[Sequence[int]], StepPlan]:
    """A planner with room for the lengths in about so many micro-batches; each step is planned once."""
    planner = tiny_wide_planner(strategy, num_ranks, spec, lengths, microbatches=microbatches)
    return cache(lambda sizes: planner(list(sizes)))


def make_samples(
    lengths: Sequence[int], vocab_size: int, masked: Callable[[int, int], bool] = lambda s, t: False
) -> list[Sample]:
    rng = np.random.default_rng(sum(lengths))
    samples = []
    for s, length in enumerate(lengths):
        ids = rng.integers(0, vocab_size, length)
        labels = np.array([-100 if masked(s, t) else token for t, token in enumerate(ids)])
        samples.append(Sample(input_ids=torch.from_numpy(ids), labels=torch.from_numpy(labels)))
    return samples


def distributed_step(
    model: HybridLM, samples: list[Sample], planner: Callable[[tuple[int, ...]], StepPlan], num_ranks: int
) -> tuple[Tensor, list[Tensor], StepPlan]:
    """(loss, gradients, plan) of one step over threads as ranks, through the planned loader."""
    params = list(model.parameters())
    planner(tuple(len(s.input_ids) for s in samples))  # once, before all threads ask for it
    dataset = [{"input_ids": s.input_ids.numpy(), "labels": s.labels.numpy()} for s in samples]

    def on_rank(world: World) -> tuple[Tensor, list[Tensor], StepPlan]:
        loader = PlannedLoader(
            dataset=dataset,
            planner=lambda sizes: planner(tuple(sizes)),
            world=world,
            steps=[range(len(dataset))],
        )
        (step,) = loader
        total, grads = torch.zeros((), dtype=torch.float64), [torch.zeros_like(p) for p in params]
        for microbatch in step.microbatches:
            with microbatch.routes():
                output = model(microbatch.input_ids, microbatch.position_ids)
                loss = token_loss(output.logits, microbatch.shift_labels, step.num_valid_tokens)
                if output.router is not None:
                    counts, sums = output.router.counts, output.router.prob_sums
                    topk = model.spec.experts_per_token
                    loss = loss + BALANCE_COEF * balance_loss(
                        counts, sums, experts_per_token=topk, num_tokens=step.num_tokens
                    )
            # autograd.grad, since the threads share the parameters; outside the context, as a training loop would.
            for total_grad, grad in zip(grads, torch.autograd.grad(loss, params), strict=True):
                total_grad += grad
            total = total + loss.detach()
        return total, grads, step.plan

    results = LocalWorld(num_ranks, max(1, num_ranks // 2)).run(on_rank)
    loss = sum(r[0] for r in results)
    return loss, [sum(r[1][i] for r in results) for i in range(len(params))], results[0][2]


REFERENCES: dict[tuple[int, bytes], tuple[Tensor, list[Tensor]]] = {}


def reference(model: HybridLM, samples: list[Sample]) -> tuple[Tensor, list[Tensor]]:
    """(loss, gradients) of the samples one at a time; computed once for all strategies and world sizes."""
    key = (id(model), b"".join(torch.cat([s.input_ids, s.labels]).numpy().tobytes() for s in samples))
    if key not in REFERENCES:
        loss = reference_loss(model, samples, BALANCE_COEF)
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
        REFERENCES[key] = loss.detach(), list(grads)
    return REFERENCES[key]


def assert_equals_reference(
    model: HybridLM, samples: list[Sample], planner: Callable[..., StepPlan], num_ranks: int
) -> StepPlan:
    loss, grads, plan = distributed_step(model, samples, planner, num_ranks)
    expected, expected_grads = reference(model, samples)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=0)
    for (name, _), grad, wanted in zip(model.named_parameters(), grads, expected_grads, strict=True):
        error = (grad - wanted).norm() / wanted.norm().clamp(min=1e-30) if wanted.norm() else grad.norm()
        assert error <= 1e-10, f"{name}: relative error {error:.1e}"
    return plan


@cache
def model_for(heads: tuple[int, int], activation_checkpointing: bool = False) -> HybridLM:
    options = ModelOptions(dtype=torch.float64, seed=1, activation_checkpointing=activation_checkpointing)
    return HybridLM(tiny_model(*heads), options)


@pytest.mark.parametrize(
    ("strategy", "num_ranks"),
    [
        *product(MAIN_STRATEGIES, (1, 2, 4, 8)),
        *product(RIVALS, (4,)),
        *FAST,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in product(STRATEGIES, (16,)) if case not in FAST),
        *(pytest.param(name, 32, marks=pytest.mark.slow) for name in MAIN_STRATEGIES),
    ],
)
def test_strategy_equals_one_process(strategy: str, num_ranks: int) -> None:
    for index, lengths in enumerate(LENGTHS.values()):
        # Every head count meets every strategy and world size as the lengths go by.
        model = model_for(HEADS[(index + num_ranks.bit_length()) % len(HEADS)])
        samples = make_samples(lengths, model.spec.vocab_size)
        planner = planner_for(strategy, num_ranks, model.spec, lengths)
        assert_equals_reference(model, samples, planner, num_ranks)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("strategy", MAIN_STRATEGIES)
def test_head_counts(strategy: str, heads: tuple[int, int]) -> None:
    model = model_for(heads)
    lengths = [90, 5, 17, 1, 33]
    assert_equals_reference(model, make_samples(lengths, 31), planner_for(strategy, 16, model.spec, lengths), 16)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_several_microbatches_with_changing_groups(strategy: str) -> None:
    model = model_for((8, 2))
    lengths = [200, 150, 90, *[20] * 12, 3, 1]
    plan = assert_equals_reference(
        model, make_samples(lengths, 31), planner_for(strategy, 8, model.spec, lengths, microbatches=3), 8
    )
    assert len(plan.microbatches) >= 2


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    strategy=st.sampled_from(STRATEGIES),
    num_ranks=st.sampled_from([2, 4, 6, 8]),
    heads=st.sampled_from(HEADS),
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=10),
)
def test_any_lengths(strategy: str, num_ranks: int, heads: tuple[int, int], lengths: list[int]) -> None:
    model = model_for(heads)
    planner = planner_for(strategy, num_ranks, model.spec, lengths)
    assert_equals_reference(model, make_samples(lengths, 31), planner, num_ranks)


@pytest.mark.parametrize(
    "masked",
    [lambda s, t: s == 0, lambda s, t: True, lambda s, t: t % 7 != 0],
    ids=["one sample", "all", "most"],
)
def test_masked_labels(masked: Callable[[int, int], bool]) -> None:
    model = model_for((8, 2))
    lengths = [40, 12, 6, 5]
    samples = make_samples(lengths, 31, masked)
    assert_equals_reference(model, samples, planner_for("repack+parents", 4, model.spec, lengths), 4)


def test_activation_checkpointing_replays_its_own_microbatch() -> None:
    model = model_for((8, 2), activation_checkpointing=True)
    spec = model.spec
    lengths = [200, 150, 90, *[20] * 12]
    assert_equals_reference(
        model, make_samples(lengths, 31), planner_for("repack", 8, spec, lengths, microbatches=3), 8
    )


@pytest.mark.parametrize("num_ranks", [4, 8, 16, 32])
@pytest.mark.parametrize("strategy", ["redistribute", "repack", "repack+parents"])
def test_the_cases_above_do_repack(strategy: str, num_ranks: int) -> None:
    """They would prove little if every parent were narrow or left wide."""
    model = model_for((8, 2))
    repacked = 0
    for lengths in LENGTHS.values():
        plan = planner_for(strategy, num_ranks, model.spec, lengths)(tuple(lengths))
        wide = [p for m in plan.microbatches for p in m.parents if p.sp_degree > plan.ranks_per_node]
        assert all(parent.repacked for parent in wide)
        for microbatch in plan.microbatches:
            moves = strategy == "redistribute" and any(parent in wide for parent in microbatch.parents)
            assert bool(microbatch.shards_by_kind) == moves
        repacked += len(wide)
    assert repacked >= 3


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {
            "num_experts": 0,
            "experts_per_token": 0,
            "moe_intermediate_size": 0,
            "shared_intermediate_size": 0,
            "intermediate_size": 24,
        },
    ],
    ids=["moe", "dense"],
)
def test_a_sample_does_not_see_the_others(changes: dict[str, object]) -> None:
    """Changing one sample leaves the others' logits as they were: to the bit without MoE, to rounding with it."""
    spec = tiny_model(8, 2, **changes)
    model = HybridLM(spec, ModelOptions(dtype=torch.float64, seed=1))
    lengths = [120, 30, 17, 9, 40]
    planner = planner_for("repack+parents", 8, spec, lengths)
    before = make_samples(lengths, 31)
    after = [Sample(input_ids=(s.input_ids + 1) % 31, labels=s.labels) if i == 1 else s for i, s in enumerate(before)]
    for sample, (a, b) in enumerate(
        zip(logits(model, before, planner, 8), logits(model, after, planner, 8), strict=True)
    ):
        if sample == 1:
            assert not torch.allclose(a, b)
        elif changes:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


def logits(model: HybridLM, samples: list[Sample], planner: Callable[..., StepPlan], num_ranks: int) -> list[Tensor]:
    """Each whole sample's logits, put together from the ranks."""
    dataset = [s.input_ids.numpy() for s in samples]

    def on_rank(world: World) -> list[tuple[StepPlan, int, Tensor]]:
        loader = PlannedLoader(
            dataset=dataset,
            planner=lambda sizes: planner(tuple(sizes)),
            world=world,
            steps=[range(len(dataset))],
        )
        (step,) = loader
        outs = []
        for index, microbatch in enumerate(step.microbatches):
            with microbatch.routes(), torch.no_grad():
                outs.append((step.plan, index, model(microbatch.input_ids, microbatch.position_ids).logits))
        return outs

    whole = [torch.full((len(s.input_ids), model.spec.vocab_size), torch.nan, dtype=torch.float64) for s in samples]
    for rank, outs in enumerate(LocalWorld(num_ranks, max(1, num_ranks // 2)).run(on_rank)):
        for plan, index, rows in outs:
            offset = 0
            for shard in plan.microbatches[index].shards:
                if shard.rank == rank:
                    whole[shard.sample][shard.lo : shard.hi] = rows[offset : offset + shard.hi - shard.lo]
                    offset += shard.hi - shard.lo
    assert not any(rows.isnan().any() for rows in whole)
    return whole
