"""static and dynamic: which groups they form, and what they refuse."""

import numpy as np
import pytest

from layerwise.cost import CostModel, predict
from layerwise.errors import DataError, InfeasibleError, SpecError
from layerwise.plan import Parent
from layerwise.planners import STRATEGIES, Planner, plan_step
from layerwise.planners.dynamic import ROUNDING, group_step, least_s
from layerwise.planners.estimate import GroupClass
from layerwise.planners.grouping import group_samples, least_fluid_s, make_tasks
from layerwise.planners.halo import halo_class
from layerwise.planners.layout import lay_out
from layerwise.planners.partitions import partitions, tile_cluster, widths_allowed
from layerwise.planners.problem import GroupOptions, StepProblem, degree_ladder
from tests.planners.builders import (
    WIDE_CLUSTER,
    WIDE_MODEL,
    WORLDS,
    long_tailed,
    make_cluster,
    make_model,
    wide_plan,
)


def _degrees(plan: object) -> list[list[int]]:
    return [sorted(p.sp_degree for p in m.parents) for m in plan.microbatches]  # type: ignore[attr-defined]


@pytest.mark.parametrize("num_ranks", [1, 4, 6, 16])
def test_uniform_short_samples_stay_on_single_ranks(num_ranks: int) -> None:
    plan = plan_step(
        [7] * (3 * num_ranks + 1),
        cluster=make_cluster(num_ranks),
        model=make_model(),
        strategy="dynamic",
        max_tokens_per_rank=1000,
    )
    assert _degrees(plan) == [[1] * num_ranks]
    tokens = plan.microbatches[0].tokens_per_rank(num_ranks)
    assert tokens.max() - tokens.min() <= 7  # within one sample


def test_fewer_samples_than_ranks_leave_ranks_empty() -> None:
    plan = plan_step([5, 3], cluster=make_cluster(16), model=make_model(), strategy="dynamic", max_tokens_per_rank=9)
    assert _degrees(plan) == [[1, 1]]


def test_a_sample_twice_as_long_has_more_attention_than_two_halves() -> None:
    """[1024, 512, 512] on two nodes of two ranks: the long one gets a node of its own, and nothing wider."""
    cluster = make_cluster(4, message_latency_s=0.0, peak_flops_per_s=2e9, slow_bytes_per_s=1e3)
    model = make_model(layer_types=("full_attention",), sliding_window=None)
    plan = plan_step([1024, 512, 512], cluster=cluster, model=model, strategy="dynamic", max_tokens_per_rank=1024)
    (microbatch,) = plan.microbatches
    ranks = {
        sample: set(range(p.first_rank, p.first_rank + p.sp_degree)) for p in microbatch.parents for sample in p.samples
    }
    assert len(ranks[0]) == 2
    assert not ranks[0] & (ranks[1] | ranks[2])
    narrow = plan_step(
        [1024, 512, 512],
        cluster=cluster,
        model=model,
        strategy="static",
        sp_degree=1,
        max_tokens_per_rank=1024,
    )
    assert predict(plan, cluster, model).seconds < predict(narrow, cluster, model).seconds


def test_long_samples_span_nodes_where_attention_dominates() -> None:
    plan = wide_plan("dynamic", [13000, 600, 500, 400])
    assert max(_degrees(plan)[0]) == 16


@pytest.mark.parametrize("seed", range(4))
def test_dynamic_beats_every_static(seed: int) -> None:
    lengths = [9000, 7000, *long_tailed(seed, 25, cap=2000, log_mean=5.5)]
    dynamic = predict(wide_plan("dynamic", lengths), WIDE_CLUSTER, WIDE_MODEL).seconds
    for degree in (4, 8, 16):
        static = wide_plan("static", lengths, sp_degree=degree)
        assert dynamic <= predict(static, WIDE_CLUSTER, WIDE_MODEL).seconds


def test_more_tokens_than_the_budget_make_more_microbatches() -> None:
    plan = wide_plan("dynamic", [2000] * 32, budget=2048)
    assert len(plan.microbatches) == 2
    assert sorted(s for m in plan.microbatches for s in m.samples.tolist()) == list(range(32))


def test_a_step_that_fills_the_budget_exactly() -> None:
    plan = plan_step(
        [13] * 4 + [12],
        cluster=make_cluster(4),
        model=make_model(),
        strategy="dynamic",
        max_tokens_per_rank=16,
    )
    assert sum(int(m.tokens_per_rank(4).sum()) for m in plan.microbatches) == 64


def test_max_sp_degree_caps_the_groups() -> None:
    lengths = [13000, 600, 500, 400]
    assert max(_degrees(wide_plan("dynamic", lengths, max_sp_degree=8))[0]) == 8
    with pytest.raises(
        InfeasibleError, match=r"sample 0 has 13000 tokens.*4 ranks x max_tokens_per_rank=2560.*max_sp_degree"
    ):
        wide_plan("dynamic", lengths, max_sp_degree=4)


def test_static_groups_fill_the_ranks() -> None:
    plan = wide_plan("static", [100] * 8, sp_degree=4)
    assert _degrees(plan) == [[4, 4, 4, 4]]
    assert [p.first_rank for p in plan.microbatches[0].parents] == [0, 4, 8, 12]


@pytest.mark.parametrize(
    ("num_ranks", "ladder"),
    [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (12, [1, 2, 4, 8, 12]), (64, [1, 2, 4, 8, 16, 32, 64])],
)
def test_ladder_of_group_sizes(num_ranks: int, ladder: list[int]) -> None:
    assert degree_ladder(make_cluster(num_ranks)) == ladder


def _groups(degrees: list[int], num_ranks: int) -> list[tuple[int, int]]:
    partition = tile_cluster(tuple(degrees), num_ranks, make_cluster(num_ranks).ranks_per_node)
    return list(zip(partition.first.tolist(), partition.size.tolist(), strict=True))


def test_groups_align_with_nodes() -> None:
    """Three nodes of 4: a group of two nodes, then the third node; blocks never straddle a node's end."""
    assert _groups([8, 8], 12) == [(0, 8), (8, 4)]
    assert _groups([4, 4], 6) == [(0, 4), (4, 2)]
    assert _groups([2], 4) == [(0, 2), (2, 1), (3, 1)]
    assert _groups([8, 2, 2, 1], 16) == [(0, 8), (8, 2), (10, 2), *((rank, 1) for rank in range(12, 16))]


@pytest.mark.parametrize("num_ranks", WORLDS)
def test_blocks_cover_all_ranks_once(num_ranks: int) -> None:
    cluster = make_cluster(num_ranks)
    for degree in degree_ladder(cluster):
        groups = _groups([degree] * num_ranks, num_ranks)
        assert [rank for first, size in groups for rank in range(first, first + size)] == list(range(num_ranks))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "at least one sample length"),
        ([5, 0, 3], "sample 1 has 0 tokens"),
        ([5, -2], "sample 1 has -2 tokens"),
        ([5.5], "whole numbers"),
    ],
)
def test_bad_lengths(strategy: str, lengths: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        wide_plan(strategy, lengths)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_sample_that_fits_nowhere(strategy: str) -> None:
    with pytest.raises(
        InfeasibleError,
        match=r"sample 2 has 99999 tokens.*max_tokens_per_rank=2560.*raise max_tokens_per_rank to at least",
    ):
        wide_plan(strategy, [10, 20, 99999])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"strategy": "quick"}, "strategy='quick' is unknown; legal values: static, dynamic, halo, "),
        ({"max_tokens_per_rank": 0}, "max_tokens_per_rank=0"),
        (
            {"options": {"sp_degree": 3}, "strategy": "static"},
            r"sp_degree=3 must divide the 16 ranks.*legal values: \[1, 2, 4, 8, 16\]",
        ),
        ({"options": {"sp_degree": 4}}, "unknown option 'sp_degree'; legal here: max_sp_degree"),
        ({"options": {"max_sp_degree": 3}}, r"max_sp_degree=3.*\[1, 2, 4, 8, 16\]"),
        ({"options": {"max_sp_degree": 32}, "strategy": "repack"}, r"max_sp_degree=32.*\[1, 2, 4, 8, 16\]"),
        (
            {"options": {"fallbak": True}, "strategy": "repack+parents"},
            "unknown option 'fallbak'; legal here: fallback",
        ),
    ],
)
def test_bad_settings_fail_before_any_step(settings: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "strategy": "dynamic",
        "cluster": WIDE_CLUSTER,
        "model": WIDE_MODEL,
        "max_tokens_per_rank": 100,
    }
    with pytest.raises(SpecError, match=message):
        Planner(**{**good, **settings})  # type: ignore[arg-type]


def test_static_degrees_align_with_nodes() -> None:
    """6 divides 12, but a group of 6 would straddle nodes of 4."""
    with pytest.raises(SpecError, match=r"legal values: \[1, 2, 4, 12\]"):
        plan_step(
            [5],
            cluster=make_cluster(12),
            model=make_model(),
            strategy="static",
            max_tokens_per_rank=9,
            sp_degree=6,
        )


@pytest.mark.parametrize("sync", ["layer", "step"])
@pytest.mark.parametrize("params", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_estimates_are_predictions_but_for_rounding(seed: int, params: bool, sync: str) -> None:
    """Also where traffic of sharded parameters outlasts compute on some ranks, and is hidden on others."""
    settings = {"sync": sync, "sharded_params": params, "message_latency_s": 0.0}
    model = WIDE_MODEL.model_copy(update={"num_experts": 256, "experts_per_token": 1, "moe_intermediate_size": 64})
    cost = CostModel(cluster=WIDE_CLUSTER.model_copy(update=settings), model=model)
    problem = StepProblem(lengths=np.array([*long_tailed(seed, 60, 900), 3000]), cost=cost, max_tokens_per_rank=100_000)
    (groupings,) = group_step(problem, GroupOptions(max_sp_degree=8))
    assert len(groupings) > 1
    assert least_s(problem, [groupings]) == groupings[0].estimate_s
    for found in groupings:
        predicted = cost.time_microbatch(lay_out(problem.lengths, cost.attention, found.parents()))
        exposed_s = np.stack([layer.exposed_s for layer in predicted.times.values()])
        assert (exposed_s > 0).any() == params
        assert (exposed_s == 0).any()
        assert found.estimate_s == pytest.approx(predicted.seconds, rel=2e-3)
        assert found.estimate_s <= (1 + ROUNDING) * predicted.seconds


@pytest.mark.parametrize("length", [1, 7, 1001])
def test_no_least_seconds_are_known_where_heads_do_not_divide(length: int) -> None:
    """3 KV heads on 2 ranks: where the rank with the larger share owns the odd token, less travels than estimated."""
    rates = {"fast_bytes_per_s": 1e6, "slow_bytes_per_s": 1e6, "message_latency_s": 0.0}
    cluster = make_cluster(2, **rates)
    model = make_model(24, 3, layer_types=("sliding_attention",), num_layers=1, sliding_window=8192, head_dim=128)
    cost = CostModel(cluster=cluster, model=model)
    problem = StepProblem(lengths=np.array([length] * 14), cost=cost, max_tokens_per_rank=100_000)
    (found,) = group_samples(problem, np.arange(14), [tile_cluster((2,), 2, 2)], GroupClass)
    predicted = cost.time_microbatch(lay_out(problem.lengths, cost.attention, found.parents()))
    assert found.estimate_s > (1 + ROUNDING) * predicted.seconds
    assert least_s(problem, [[found]]) == 0


def test_groups_without_samples_send_nothing() -> None:
    """Their messages are no part of the estimate, whatever latency a message has."""
    cost = CostModel(cluster=make_cluster(16, message_latency_s=1.0), model=make_model())
    problem = StepProblem(lengths=np.array([5] * 8), cost=cost, max_tokens_per_rank=100)
    partition = tile_cluster((8, *(1,) * 8), 16, 8)
    (task,) = make_tasks(problem, np.arange(8), [partition], GroupClass)
    bin_of = np.arange(1, 9)
    predicted = cost.time_microbatch(
        lay_out(
            problem.lengths,
            cost.attention,
            tuple(Parent(first_rank=int(partition.first[i]), sp_degree=1, samples=(i - 1,)) for i in bin_of.tolist()),
        )
    )
    assert task.seconds(bin_of) == pytest.approx(predicted.seconds, rel=1e-9)


def test_no_least_seconds_are_known_of_groups_that_cut_queries() -> None:
    """8 heads on 16 ranks: a rank with half of the queries gets half of the keys, which the estimate does not see."""
    cost = CostModel(cluster=WIDE_CLUSTER, model=WIDE_MODEL)
    problem = StepProblem(lengths=np.array([16_000] + [20] * 20), cost=cost, max_tokens_per_rank=1100)
    division = group_step(problem, GroupOptions())
    assert division[0][0].partition.size.max() == 16
    assert least_s(problem, division) == 0


@pytest.mark.parametrize("sync", ["layer", "step"])
@pytest.mark.parametrize("params", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_no_grouping_is_faster_than_a_fluid(seed: int, params: bool, sync: str) -> None:
    """Of all partitions of 16 ranks, however packed; a group that is too small for a sample does not count."""
    settings = {"sync": sync, "sharded_params": params}
    cost = CostModel(cluster=WIDE_CLUSTER.model_copy(update=settings), model=WIDE_MODEL)
    lengths = np.array([*long_tailed(seed, 30, 900), 4000])
    problem, samples = StepProblem(lengths=lengths, cost=cost, max_tokens_per_rank=1100), np.arange(31)
    ladder = widths_allowed(problem, None)
    for class_of in (GroupClass, halo_class):
        groupings = group_samples(problem, samples, partitions(problem, samples, ladder), class_of, thorough=True)
        assert len(groupings) > 10
        classes = [class_of(degree) for degree in ladder]
        least_s = least_fluid_s(problem, samples, classes, groupings[0].estimate_s)
        assert 0.8 * groupings[0].estimate_s < least_s <= groupings[0].estimate_s
        assert least_fluid_s(problem, samples, classes, np.inf) <= least_s


def test_a_fluid_knows_what_a_sample_needs_room_for() -> None:
    """One sample of 4000 tokens takes four ranks of 1000; where more would suffice, it would not pay to exchange."""
    cost = CostModel(cluster=WIDE_CLUSTER.model_copy(update={"fast_bytes_per_s": 1e6}), model=WIDE_MODEL)
    lengths, samples = np.array([4000] * 4), np.arange(4)
    classes = [GroupClass(degree) for degree in (1, 2, 4, 8, 16)]
    bounds = [
        least_fluid_s(StepProblem(lengths=lengths, cost=cost, max_tokens_per_rank=budget), samples, classes, np.inf)
        for budget in (4000, 1000)
    ]
    assert bounds[1] > 2 * bounds[0]
