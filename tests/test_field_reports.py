"""Faults that were public reports against other tools; each test names the kind of fault.

More are covered elsewhere: windows and sinks over random tiles in tests/runtime, labels and losses in tests/data
and tests/runtime, splits and bytes in tests/planners and tests/test_traffic.py.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from layerwise import ClusterSpec, LocalWorld, ModelSpec, PlannedLoader, attention, plan_step, solo_world
from layerwise.errors import PlanMismatchError, SpecError, UnsupportedError
from layerwise.plan import StepPlan
from layerwise.runtime import build_routes, use_routes
from tests.runtime.test_attention_site import run_site

FULL, SLIDING = "full_attention", "sliding_attention"


def model(num_heads: int, num_kv_heads: int, window: int = 5) -> ModelSpec:
    return ModelSpec(
        num_layers=2,
        layer_types=(FULL, SLIDING),
        hidden_size=8,
        vocab_size=16,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        sliding_window=window,
        intermediate_size=8,
    )


def static(lengths: list[int], spec: ModelSpec, num_ranks: int, sp_degree: int) -> StepPlan:
    cluster = ClusterSpec(num_nodes=1, ranks_per_node=num_ranks)
    return plan_step(
        lengths, cluster=cluster, model=spec, strategy="static", max_tokens_per_rank=10_000, sp_degree=sp_degree
    )


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "sp_degree"),
    [(40, 8, 16), (12, 12, 4), (6, 3, 2), (6, 3, 4), (16, 2, 8), (32, 2, 16), (24, 6, 4), (8, 4, 16)],
)
def test_any_degree_over_any_heads(num_heads: int, num_kv_heads: int, sp_degree: int) -> None:
    """Degrees that do not divide heads, KV heads fewer than the degree, KV groups torn, replicas' gradients lost."""
    run_site(static([23, 9], model(num_heads, num_kv_heads), sp_degree, sp_degree), seed=1, with_sinks=True)


def test_two_models_in_one_process_keep_their_own_heads() -> None:
    """A process-wide KV head count broke the second model."""
    for order in ([(12, 12), (6, 3)], [(6, 3), (12, 12)]):
        for heads in order:
            run_site(static([11, 4], model(*heads), 4, 4), seed=2, with_sinks=False)


@pytest.mark.parametrize(("lengths", "sp_degree"), [([7], 2), ([13], 4), ([11], 4), ([3], 4), ([5, 3, 1], 2), ([8], 2)])
def test_lengths_that_do_not_divide(lengths: list[int], sp_degree: int) -> None:
    """Tokens dropped at odd lengths; crashes in backward only; empty parts."""
    plan = static(lengths, model(4, 2), sp_degree, sp_degree)
    sizes = plan.microbatches[0].tokens_per_rank(sp_degree)
    assert sizes.sum() == sum(lengths)
    run_site(plan, seed=3, with_sinks=False)


def test_window_counts_global_positions() -> None:
    """A window larger than the local shard was switched off: w=8, 4 tokens per rank, token 15 must not see token 3."""
    spec = model(4, 4, window=8)
    plan = static([16], spec, 4, 4)
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(16, 4, 4, generator=generator, dtype=torch.float64) for _ in range(3)]

    def last_row(changed_token: int) -> torch.Tensor:
        k, v = (x.clone() for x in rows[1:])
        k[changed_token] += 1
        v[changed_token] += 1

        def on_rank(world):
            part = slice(4 * world.rank, 4 * world.rank + 4)
            with use_routes(build_routes(plan, 0, world)):
                return attention(rows[0][part], k[part], v[part], kind=SLIDING, window=8)[-1]

        return LocalWorld(4, 4).run(on_rank)[-1]

    assert torch.equal(last_row(3), last_row(7))
    assert not torch.equal(last_row(7), last_row(8))


def call(**changes: object) -> torch.Tensor:
    plan = static([6], model(4, 2), 1, 1)
    given = {"q": torch.zeros(6, 4, 4), "k": torch.zeros(6, 2, 4), "v": torch.zeros(6, 2, 4), "kind": SLIDING} | changes
    with use_routes(build_routes(plan, 0, solo_world())):
        return attention(**given)  # type: ignore[arg-type]


def test_what_attention_refuses() -> None:
    """Batch dimensions mixed silently, heads and tokens swapped, KV expanded, a window ignored, sinks not per head."""
    assert call().shape == (6, 4, 4)
    with pytest.raises(SpecError, match=r"q has shape \(2, 3, 4, 4\).*without a batch dimension"):
        call(q=torch.zeros(2, 3, 4, 4))
    with pytest.raises(SpecError, match=r"q has shape \(4, 6, 4\)"):
        call(q=torch.zeros(4, 6, 4))
    with pytest.raises(SpecError, match="KV heads not expanded"):
        call(k=torch.zeros(6, 4, 4))
    with pytest.raises(UnsupportedError, match="window=9, the plan was made for window=5"):
        call(window=9)
    with pytest.raises(UnsupportedError, match="window=5"):
        call(kind=FULL, window=5)
    with pytest.raises(SpecError, match="sinks have shape"):
        call(sinks=torch.zeros(2))
    with pytest.raises(SpecError, match="not planned"):
        call(kind="linear_attention")
    with pytest.raises(SpecError, match="one dtype"):
        call(v=torch.zeros(6, 2, 4, dtype=torch.float64))


def test_a_dataset_that_is_random_by_rank_is_caught() -> None:
    """Ranks of one group drew different tokens of equal lengths: nothing failed, and the training was wrong."""

    def on_rank(world):
        tokens = np.random.default_rng(world.rank).integers(0, 16, 12)
        loader = PlannedLoader(
            dataset=[tokens], planner=lambda n: static(list(n), model(4, 2), 2, 2), world=world, steps=[[0]]
        )
        with pytest.raises(PlanMismatchError, match="seed anything random by step, not by rank"):
            list(loader)

    LocalWorld(2, 2).run(on_rank)


@pytest.mark.parametrize(("num_samples", "num_ranks"), [(5, 4), (3, 4)])
def test_sample_counts_that_do_not_divide(num_samples: int, num_ranks: int) -> None:
    """Counts that do not divide gave crashes, or one rank several samples more."""
    plan = static([10] * num_samples, model(4, 2), num_ranks, 1)
    counts = np.bincount(plan.microbatches[0].shards.column("rank"), minlength=num_ranks)
    assert counts.max() - counts.min() <= 1


def test_uninitialised_memory_never_shows() -> None:
    """Rows beyond what arrives kept stale data: fill every fresh buffer with NaN and look for it."""
    torch.use_deterministic_algorithms(True)  # torch then fills uninitialised memory with NaN
    try:
        assert torch.empty(3).isnan().all()
        run_site(static([23, 9, 1], model(8, 2), 4, 4), seed=4, with_sinks=True)
    finally:
        torch.use_deterministic_algorithms(False)
