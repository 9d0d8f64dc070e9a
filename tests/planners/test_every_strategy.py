"""Every strategy makes valid plans for every world, head count and shape of step."""

import dataclasses
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.cost import predict
from layerwise.errors import SpecError
from layerwise.planners import STRATEGIES, Planner, plan_step
from layerwise.spec import ClusterSpec, load_cluster, load_model
from tests.planners.builders import (
    WIDE_CLUSTER,
    WIDE_MODEL,
    WORLDS,
    long_tailed,
    make_cluster,
    make_model,
    wide_plan,
)

STEPS = {
    "three": [37, 51, 40],
    "ones": [1, 1, 5, 1],
    "thirteen": [13],
    "tiny": [3],
    "equal": [7] * 8,
    "one long": [1000, *(10 + i % 41 for i in range(40))],
    "long-tailed": long_tailed(0, 150, cap=3000),
}


def _budget(lengths: list[int], num_ranks: int) -> int:
    """Room for the longest sample on one node, and for most steps in two micro-batches."""
    return max(-(-max(lengths) // WORLDS[num_ranks][1]), -(-sum(lengths) // num_ranks) * 2 // 3, 1)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_ranks", WORLDS)
@pytest.mark.parametrize("step", STEPS)
def test_plans_are_valid(strategy: str, num_ranks: int, step: str) -> None:
    lengths = STEPS[step]
    plan = plan_step(
        lengths,
        cluster=make_cluster(num_ranks),
        model=make_model(),
        strategy=strategy,
        max_tokens_per_rank=_budget(lengths, num_ranks),
    )
    plan.validate()
    assert plan.lengths == tuple(lengths)
    for microbatch in plan.microbatches:
        grouped = sorted(sample for parent in microbatch.parents for sample in parent.samples)
        assert grouped == microbatch.samples.tolist()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("heads", [(8, 2), (7, 7), (20, 20), (6, 3), (40, 8), (4, 1)])
@pytest.mark.parametrize("num_ranks", [4, 12, 32])
def test_any_heads_divide_over_any_group(strategy: str, heads: tuple[int, int], num_ranks: int) -> None:
    lengths = [700, 13, 3, 90, 1]
    options = {"sp_degree": num_ranks} if strategy == "static" else {}
    plan = plan_step(
        lengths,
        cluster=make_cluster(num_ranks),
        model=make_model(*heads),
        strategy=strategy,
        max_tokens_per_rank=-(-sum(lengths) // num_ranks),
        **options,
    )
    plan.validate()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    "kinds", [("full_attention",), ("sliding_attention",), ("chunked_attention", "full_attention")]
)
@pytest.mark.parametrize("sync", ["layer", "step"])
def test_any_pattern_of_layers(strategy: str, kinds: tuple[str, ...], sync: str) -> None:
    model = make_model(
        layer_types=kinds,
        sliding_window=16 if "sliding_attention" in kinds else None,
        attention_chunk_size=32 if "chunked_attention" in kinds else None,
    )
    plan = plan_step(
        [900, 300, 40, 40, 7, 1],
        cluster=make_cluster(16, sync=sync),
        model=model,
        strategy=strategy,
        max_tokens_per_rank=130,
    )
    assert set(plan.attention) == set(kinds)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_layer_kinds_may_differ_in_kv_heads_and_head_dim(strategy: str) -> None:
    model = make_model(kv_heads_by_kind={"sliding_attention": 8}, head_dim_by_kind={"full_attention": 24}, v_head_dim=4)
    plan_step([500, 60, 5], cluster=make_cluster(16), model=model, strategy=strategy, max_tokens_per_rank=70)


@pytest.mark.parametrize("strategy", STRATEGIES)
@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.integers(1, 40), st.integers(1, 900)), min_size=1, max_size=30),
    num_ranks=st.sampled_from(list(WORLDS)),
    heads=st.sampled_from([(8, 2), (7, 7), (6, 3), (4, 1)]),
    slack=st.integers(0, 50),
    sync=st.sampled_from(["layer", "step"]),
)
def test_random_steps_are_valid(
    strategy: str, lengths: list[int], num_ranks: int, heads: tuple[int, int], slack: int, sync: str
) -> None:
    plan = plan_step(
        lengths,
        cluster=make_cluster(num_ranks, sync=sync),
        model=make_model(*heads),
        strategy=strategy,
        max_tokens_per_rank=-(-max(lengths) // WORLDS[num_ranks][1]) + slack,
    )
    for microbatch in plan.microbatches:
        assert int(microbatch.tokens_per_rank(num_ranks).max()) <= plan.max_tokens_per_rank


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_step_gives_the_same_plan(strategy: str) -> None:
    lengths = [12000, 5000, *long_tailed(1, 60, cap=2000, log_mean=5.0)]
    plans = [wide_plan(strategy, lengths) for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0].digest() == plans[1].digest()


def test_no_strategy_beats_the_ideal_and_none_loses_to_the_one_before() -> None:
    for seed in range(6):
        for sync in ("layer", "step"):
            lengths = [13000 - 1500 * seed, *long_tailed(seed, 25, cap=4000, log_mean=6.0)]
            cluster = WIDE_CLUSTER.model_copy(update={"sync": sync})
            seconds = []
            for strategy in ("dynamic", "halo", "redistribute", "repack", "repack+parents"):
                plan = plan_step(
                    lengths, cluster=cluster, model=WIDE_MODEL, strategy=strategy, max_tokens_per_rank=2560
                )
                prediction = predict(plan, cluster, WIDE_MODEL)
                assert prediction.seconds >= prediction.ideal_s
                seconds.append(prediction.seconds)
            dynamic, halo, redistribute, repack, parents = seconds
            assert max(halo, redistribute) <= dynamic
            assert parents <= repack <= dynamic


@pytest.mark.parametrize("lengths", [[7] * 13, long_tailed(0, 40, cap=400)], ids=["tiny", "long-tailed"])
def test_joint_is_not_slower_than_dynamic_where_its_estimate_leaves_out_much(lengths: list[int]) -> None:
    """Whole samples send nothing; one spread over all ranks levels tokens, and sends messages in every layer."""
    cluster = ClusterSpec(num_nodes=1, ranks_per_node=8)
    model = make_model(16, 4, hidden_size=2048, head_dim=128, intermediate_size=8192)
    seconds = []
    for strategy in ("dynamic", "joint"):
        plan = plan_step(lengths, cluster=cluster, model=model, strategy=strategy, max_tokens_per_rank=2048)
        seconds.append(predict(plan, cluster, model).seconds)
    assert seconds[1] <= seconds[0]


def test_a_planner_is_plan_step_with_its_settings_kept() -> None:
    settings_: dict[str, Any] = {
        "cluster": WIDE_CLUSTER,
        "model": WIDE_MODEL,
        "strategy": "static",
        "max_tokens_per_rank": 999,
    }
    planner = Planner(**settings_, options={"sp_degree": 4})
    assert planner([50, 60]) == plan_step([50, 60], **settings_, sp_degree=4)
    with pytest.raises(dataclasses.FrozenInstanceError):
        planner.strategy = "dynamic"  # type: ignore[misc]
    with pytest.raises(SpecError, match="= 400,000 ranks, but a step is planned for at most 16,384"):
        Planner(**settings_ | {"cluster": WIDE_CLUSTER.model_copy(update={"num_nodes": 50_000, "ranks_per_node": 8})})


def test_lengths_may_be_an_array() -> None:
    lengths = [40, 3, 77]
    assert wide_plan("dynamic", np.array(lengths, dtype=np.int32)) == wide_plan("dynamic", lengths)  # type: ignore[arg-type]


@pytest.mark.parametrize("cluster", ["demo", "paper", "h100-8x8"])
@pytest.mark.parametrize("model", ["demo", "paper-1f3s", "olmo3-7b", "llama4-scout", "gpt-oss-120b"])
def test_presets_plan(cluster: str, model: str) -> None:
    spec, decoder = load_cluster(cluster), load_model(model)
    lengths = [60000, *long_tailed(0, 40, cap=20000, log_mean=7.0)]
    plan = plan_step(lengths, cluster=spec, model=decoder, strategy="repack+parents", max_tokens_per_rank=16384)
    assert 0 < predict(plan, spec, decoder).mfu < 1


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("num_short", [3, 40])
def test_a_planned_step_is_freed_at_once(strategy: str, num_short: int) -> None:
    """What is remembered of a step must not hold on to it: arrays in circles wait until many objects are made."""
    options = {"static": {"sp_degree": 16}}.get(strategy, {})
    planner = Planner(
        strategy=strategy, cluster=WIDE_CLUSTER, model=WIDE_MODEL, max_tokens_per_rank=2560, options=options
    )
    gc.disable()
    try:
        problem = planner.pose([15_000, 9000, *long_tailed(1, num_short, cap=2000)])
        planner.plan(problem)
        step = weakref.ref(problem)
        del problem
        assert step() is None
    finally:
        gc.enable()
