"""No plan gets below a bound, and each bound is reached where a plan can reach it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from layerwise.cost import CostModel, GapRow, bound_step, fewest_microbatches, gap_rows
from layerwise.errors import InfeasibleError
from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.planners import STRATEGIES, plan_step
from layerwise.spec import CHUNKED, FULL, LINEAR, SLIDING, ClusterSpec, EfficiencyTable, ModelSpec
from tests.planners.builders import make_cluster, make_model
from tests.random_plans import random_step

# A table that is best in its middle: neither the longest tile nor the one with most heads is the fastest.
HUMPED = EfficiencyTable(
    lengths=(16, 128, 2048), heads=(1, 4, 8), efficiency=((0.2, 0.3, 0.25), (0.5, 0.9, 0.6), (0.3, 0.5, 0.4))
)
PATTERNS: tuple[dict[str, Any], ...] = (
    {},
    {"layer_types": (FULL,), "sliding_window": None},
    {"layer_types": (LINEAR, FULL), "sliding_window": None},
    {"layer_types": (CHUNKED, SLIDING), "attention_chunk_size": 32},
)


def assert_bounded(cost: CostModel, plan: StepPlan) -> None:
    bounds = bound_step(plan.lengths, cost, plan.max_tokens_per_rank)
    assert len(plan.microbatches) >= fewest_microbatches(
        np.array(plan.lengths), plan.num_ranks * plan.max_tokens_per_rank
    )
    for row in gap_rows(cost.predict(plan), bounds):
        assert row.reached >= row.bound * (1 - 1e-12), f"{row} of {plan.strategy} on {plan.lengths}"


def random_cluster(rng: np.random.Generator, num_ranks: int) -> ClusterSpec:
    # Links from slow to fast beside compute, so that each of compute, exchange and parameters may decide.
    fast = 10 ** rng.uniform(6, 9)
    return make_cluster(
        num_ranks,
        fast_bytes_per_s=fast,
        slow_bytes_per_s=fast / 7,
        message_latency_s=float(rng.choice([0.0, 1e-4])),
        peak_flops_per_s=2e9,
        attention_efficiency=(0.8, HUMPED)[int(rng.integers(2))],
        window_efficiency=(None, 0.5, HUMPED)[int(rng.integers(3))],
        sharded_params=bool(rng.integers(2)),
        overlap=float(rng.choice([0.0, 0.5, 1.0])),
        recompute=bool(rng.integers(2)),
        sync=("layer", "step")[int(rng.integers(2))],
        overlap_parts=int(rng.integers(1, 4)),
    )


def random_model(rng: np.random.Generator) -> ModelSpec:
    heads = ((8, 2), (7, 7), (4, 1))[int(rng.integers(3))]
    return make_model(*heads, **PATTERNS[int(rng.integers(len(PATTERNS)))])


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_strategy_gets_below_a_bound(strategy: str) -> None:
    planned = 0
    for seed in range(20):
        rng = np.random.default_rng(seed)
        num_ranks = int(rng.choice([1, 4, 8, 12, 16]))
        cluster, model = random_cluster(rng, num_ranks), random_model(rng)
        lengths = np.exp(rng.normal(4.5, 1.2, int(rng.integers(1, 25)))).astype(int) + 1
        # From room for everything at once to several micro-batches, with samples that fit into no node.
        budget = int(np.ceil(lengths.sum() / num_ranks / rng.uniform(0.3, 4)))
        options = {"sp_degree": num_ranks} if strategy == "static" else {}
        try:
            plan = plan_step(
                lengths, cluster=cluster, model=model, strategy=strategy, max_tokens_per_rank=budget, **options
            )
        except InfeasibleError:
            continue
        assert_bounded(CostModel(cluster=cluster, model=model), plan)
        planned += 1
    assert planned >= 10


def test_no_legal_plan_gets_below_a_bound() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        cluster, model = random_cluster(rng, 8), random_model(rng)
        cost = CostModel(cluster=cluster, model=model)
        moving = tuple(model.kinds[:1]) if seed % 3 == 0 else ()
        lengths = (np.exp(rng.normal(3.5, 1.2, int(rng.integers(1, 6)))).astype(int) + 1).tolist()
        plan = random_step(rng, lengths, cost.attention, 8, cluster.ranks_per_node, moving)
        (microbatch,) = plan.microbatches
        # The smallest budget under which the plan is legal gives the highest bounds.
        fullest = max(int(microbatch.tokens_per_rank(8, place).max()) for place in microbatch.places)
        assert_bounded(cost, StepPlan(**{**vars(plan), "max_tokens_per_rank": fullest}))


def test_tokens_are_reached_by_equal_parts() -> None:
    cluster, model = make_cluster(4), make_model()
    plan = plan_step([13], cluster=cluster, model=model, strategy="static", max_tokens_per_rank=4, sp_degree=4)
    cost = CostModel(cluster=cluster, model=model)
    assert bound_step([13], cost, 4).tokens == 4  # 13 over 4 ranks: 4, 3, 3, 3
    assert gap_rows(cost.predict(plan), bound_step([13], cost, 4))[0] == GapRow(name="tokens", reached=4, bound=4)


def test_attention_is_reached_by_equal_heads() -> None:
    cluster, model = make_cluster(2), make_model(2, 2)
    plan = plan_step([10], cluster=cluster, model=model, strategy="static", max_tokens_per_rank=5, sp_degree=2)
    cost = CostModel(cluster=cluster, model=model)
    bounds = bound_step([10], cost, 5)
    # One of two heads, 55 causal pairs (the window of 16 cuts none), 2 FLOPs for each of 8 + 8 products.
    assert bounds.attention_flops == {FULL: 55 * 16 * 2, SLIDING: 55 * 16 * 2}
    assert [row.gap_pct for row in gap_rows(cost.predict(plan), bounds)[1:3]] == [0.0, 0.0]


def test_slow_bytes_are_reached_by_sending_keys_of_the_smaller_side() -> None:
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=1)
    model = make_model(2, 1, layer_types=(FULL,), sliding_window=None, num_layers=3)
    cost = CostModel(cluster=cluster, model=model)
    microbatch = MicrobatchPlan(
        shards=shard_table([Shard(0, 0, 0, 2), Shard(0, 1, 2, 8)]),
        tiles={FULL: tile_table([Tile(0, 0, 0, 2, 0, 0, 2), Tile(0, 1, 2, 8, 0, 0, 2)])},
    )
    plan = StepPlan(
        strategy="by hand",
        num_ranks=2,
        ranks_per_node=1,
        max_tokens_per_rank=6,
        lengths=(8,),
        attention=cost.attention,
        microbatches=(microbatch,),
    )
    plan.validate()
    # Two keys and values of one KV head, 8 + 8 elements of 2 bytes, forward and backward, in three layers.
    assert bound_step([8], cost, 6).slow_bytes == 2 * 16 * 2 * 2 * 3
    assert cost.predict(plan).microbatches[0].slow_bytes == 2 * 16 * 2 * 2 * 3


def test_samples_that_fit_into_a_node_need_not_leave_it() -> None:
    cost = CostModel(cluster=make_cluster(16), model=make_model())
    assert bound_step([800, 800, 3], cost, 100).slow_bytes == 0 < bound_step([801], cost, 100).slow_bytes


def test_layers_with_a_local_mask_may_stay_in_their_nodes() -> None:
    model = make_model(layer_types=(CHUNKED,), sliding_window=None, attention_chunk_size=4)
    assert bound_step([801], CostModel(cluster=make_cluster(16), model=model), 100).slow_bytes == 0


@pytest.mark.parametrize("sync", ["layer", "step"])
def test_seconds_are_reached_by_level_ranks(sync: str) -> None:
    # Parameters take far longer than compute, and half of compute hides them: two micro-batches fetch them twice.
    rates = {"fast_bytes_per_s": 1e6, "slow_bytes_per_s": 1e6}
    cluster = make_cluster(2, sharded_params=True, overlap=0.5, sync=sync, **rates)
    cost = CostModel(cluster=cluster, model=make_model())
    lengths = [50] * 4
    plan = plan_step(lengths, cluster=cluster, model=cost.model, strategy="static", max_tokens_per_rank=50, sp_degree=1)
    params_s = sum(layer.num_layers * layer.params_s for layer in cost.layers)
    head_s = cost.head_token_s * 100
    by_hand = head_s + 0.5 * (cost.ideal_s(lengths) - head_s) + 2 * params_s
    assert bound_step(lengths, cost, 50).seconds == pytest.approx(by_hand)
    assert cost.predict(plan).seconds == pytest.approx(by_hand)
    assert by_hand > 10 * cost.ideal_s(lengths)


def test_bytes_between_nodes_take_no_time_where_attention_may_hide_them() -> None:
    """32 heads on two nodes, one in each of 16 parts of a rank: all but one part in 16 of the rows are hidden."""
    model = make_model(32, 32, layer_types=("full_attention",), sliding_window=None)
    seconds = []
    for num_parts in (1, 16):
        cluster = ClusterSpec(num_nodes=2, ranks_per_node=1, peak_flops_per_s=1e12, overlap_parts=num_parts)
        plan = plan_step([8000], cluster=cluster, model=model, strategy="static", max_tokens_per_rank=4000, sp_degree=2)
        cost = CostModel(cluster=cluster, model=model)
        assert_bounded(cost, plan)
        seconds.append((bound_step(plan.lengths, cost, 4000).seconds, cost.predict(plan).seconds))
    (bound_s, _), (bound_in_parts_s, in_parts_s) = seconds
    assert bound_in_parts_s < in_parts_s < bound_s


def test_the_best_entry_of_a_table_counts() -> None:
    cluster = make_cluster(1, attention_efficiency=HUMPED)
    model = make_model(layer_types=(FULL,), sliding_window=None)
    (layer,) = CostModel(cluster=cluster, model=model).layers
    at_best = CostModel(cluster=make_cluster(1, attention_efficiency=0.9), model=model)
    assert bound_step([4000], CostModel(cluster=cluster, model=model), 4000).seconds == pytest.approx(
        at_best.ideal_s([4000])
    )
    assert float(layer.sample_s(np.array([4000]))[0]) > float(at_best.layers[0].sample_s(np.array([4000]))[0])


def test_two_samples_over_half_of_a_micro_batch_need_two() -> None:
    assert fewest_microbatches(np.array([60, 60, 60]), 100) == 3
    assert fewest_microbatches(np.array([50, 50, 50]), 100) == 2


def test_a_gap_above_nothing_has_no_percentage() -> None:
    assert GapRow(name="", reached=5, bound=0).gap_pct is None
    assert GapRow(name="", reached=0, bound=0).gap_pct == 0
    assert GapRow(name="", reached=5, bound=4).gap_pct == 25
