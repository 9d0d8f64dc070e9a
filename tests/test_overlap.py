"""Attention sites in parts, as the cost model sees them: what is hidden, and what stays as it is without parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerwise.cost import CostModel, predict
from layerwise.cost.overlap import hidden_s, pipeline_waits
from layerwise.errors import SpecError
from layerwise.exchange import Count
from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.planners import STRATEGIES, Planner, plan_step
from layerwise.planners.dynamic import group_step, least_s
from layerwise.planners.problem import StepProblem
from layerwise.planners.repack import RepackOptions, repack_microbatch, try_grouping
from layerwise.spec import ClusterSpec, Mixer
from layerwise.train.config import load_config
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, long_tailed, tiny_wide_planner, wide_plan
from tests.random_plans import random_step
from tests.runtime.test_moves import metered_step
from tests.runtime.test_strategies import LENGTHS, model_for
from tests.test_cost import CLUSTER, LINEAR_FLOPS, MODEL, PAIR_FLOPS
from tests.train.small import small_config, train_small, write_samples


def overlapped(cluster: ClusterSpec, num_parts: int = 2) -> ClusterSpec:
    return cluster.model_copy(update={"overlap_parts": num_parts})


@pytest.mark.parametrize(
    ("in_s", "compute_s", "out_s", "idle_s", "after_s"),
    [
        # Compute bound. Arrived at 2 and 4, computed at 5 and 8; the first leaves 5 to 6, the second 8 to 9.
        ([2, 2], [3, 3], [1, 1], 8 - 6, 9 - 8),
        # Link bound. Arrived at 4 and 8, computed at 5 and 9; the link is free at 8, so they leave until 11 and 14.
        ([4, 4], [1, 1], [3, 3], 9 - 2, 14 - 9),
        # The first part is all the rank's own: computed at 2, it has nothing to send; the second arrives at 5.
        ([0, 5], [2, 1], [0, 2], 6 - 3, 8 - 6),
        # Arrived at 1, 2 and 3, computed at 6, 6 and 7; they leave 6 to 8, 8 to 10 and 10 to 12.
        ([1, 1, 1], [5, 0, 1], [2, 2, 2], 7 - 6, 12 - 7),
        # All hidden: the first part needs no rows, and computes until 9 while the second arrives; no outputs leave.
        ([0, 4], [9, 1], [0, 0], 0, 0),
        # One part is not hidden at all.
        ([3], [4], [2], 3, 2),
    ],
)
def test_parts_follow_one_another_on_link_and_kernel(
    in_s: list[int], compute_s: list[int], out_s: list[int], idle_s: int, after_s: int
) -> None:
    columns = (np.array([part, [0] * len(part)], dtype=float).T for part in (in_s, compute_s, out_s))
    assert pipeline_waits(*columns).tolist() == [[idle_s, 0], [after_s, 0]]


@pytest.mark.parametrize("forwards", [1, 2])
def test_backward_runs_the_parts_from_the_end(forwards: int) -> None:
    """One second of attention per part forward, 2.5 backward.

    Forward: arrived at 3 and 7, computed at 4 and 8, left at 9 and 14: idle for 6 of 7, and 6 of 7 after.
    Backward, from the second part: arrived at 5 and 7, computed at 7.5 and 10, left at 11.5 and 14.5: idle for 5 of the
    7 that come from the tiles, and 4.5 of the 7 to them after.
    """
    to_tiles, attention, from_tiles = ([np.array([x]) for x in pair] for pair in ((3.0, 4.0), (1.0, 1.0), (2.0, 5.0)))
    found = hidden_s(to_tiles, [(forwards + 2.5) * part for part in attention], from_tiles, forwards)
    again = forwards - 1  # what is recomputed is hidden as in forward
    np.testing.assert_allclose(found[..., 0], [[1, 1], [2.5 + again, 2 + again]])


def two_samples() -> StepPlan:
    """Two samples of six tokens over ranks 1 and 2, on two nodes: one query head each, and both need the KV head."""
    shards = [Shard(sample, 1 + half, 3 * half, 3 * half + 3) for sample in (0, 1) for half in (0, 1)]
    tiles = [Tile(sample, 1 + head, 0, 6, 0, head, head + 1) for sample in (0, 1) for head in (0, 1)]
    plan = StepPlan(
        strategy="by hand",
        num_ranks=4,
        ranks_per_node=2,
        max_tokens_per_rank=6,
        lengths=(6, 6),
        attention={"full_attention": MODEL.attention("full_attention")},
        microbatches=(MicrobatchPlan(shards=shard_table(shards), tiles={"full_attention": tile_table(tiles)}),),
    )
    plan.validate()
    return plan


def test_seconds_and_calls_of_a_site_in_two_parts() -> None:
    """Each sample is a part: 84 bytes to the tiles and 36 back at 10 bytes/s, and a message of 1/4 s each way.

    Attention takes less than a part's rows, so the link decides: it is busy until the last output has left.
    """
    to_tiles_s, from_tiles_s = 84 / 10 + 0.25, 36 / 10 + 0.25
    prediction = predict(two_samples(), overlapped(CLUSTER), MODEL)
    kind, linear_s = prediction.kinds["full_attention"], 3 * 6 * LINEAR_FLOPS / 1000
    assert kind.seconds == pytest.approx(2 * (linear_s + 2 * 2 * (to_tiles_s + from_tiles_s)))  # layers, passes, parts
    assert kind.calls.tolist() == [16] * 4  # 2 layers x 2 passes x 2 exchanges x 2 parts
    (times,) = prediction.microbatches[0].times.values()
    attention_s = 3.5 * 2 * 21 * PAIR_FLOPS / 1000
    np.testing.assert_allclose(times.attention_s, [0, attention_s, attention_s, 0])
    np.testing.assert_allclose(times.to_tiles_s[1], 2 * 2 * to_tiles_s)
    np.testing.assert_allclose(times.from_tiles_s[1], 2 * 2 * from_tiles_s)
    np.testing.assert_allclose(times.hidden_s.sum(axis=(0, 1)), [0, attention_s, attention_s, 0])
    # Forward, the second part is computed while the first one's outputs wait for the second one's rows.
    np.testing.assert_allclose(times.hidden_s[0, :, 1], [attention_s / 7] * 2)


def test_one_part_hides_nothing() -> None:
    for strategy in ("dynamic", "joint"):
        plan = wide_plan(strategy, [16000, *[300] * 20])
        for times in CostModel(cluster=WIDE_CLUSTER, model=WIDE_MODEL).layer_times(plan.microbatches[0]).values():
            assert not times.hidden_s.any()
            np.testing.assert_array_equal(times.exchange_s, times.to_tiles_s + times.from_tiles_s)


@pytest.mark.parametrize("seed", range(5))
def test_parts_send_the_same_bytes_and_hide_no_more_than_the_lesser(seed: int) -> None:
    attention = {kind: WIDE_MODEL.attention(kind) for kind in WIDE_MODEL.kinds}
    plan = random_step(np.random.default_rng(seed), [60, 17, 1, 9, 30, 44], attention, 16, 8)
    one, many = (predict(plan, overlapped(WIDE_CLUSTER, num_parts), WIDE_MODEL) for num_parts in (1, 3))
    for kind in WIDE_MODEL.kinds:
        before, after = one.kinds[kind], many.kinds[kind]
        np.testing.assert_array_equal(before.rank_fast_bytes, after.rank_fast_bytes)
        np.testing.assert_array_equal(before.rank_slow_bytes, after.rank_slow_bytes)
        np.testing.assert_array_equal(3 * before.calls, after.calls)
        np.testing.assert_allclose(before.attention_flops, after.attention_flops)
        times = many.microbatches[0].times[kind]
        hidden = times.hidden_s.sum(axis=(0, 1))
        assert (times.hidden_s >= 0).all()
        assert (hidden <= (1 + 1e-9) * np.minimum(times.attention_s, times.to_tiles_s + times.from_tiles_s)).all()
        assert hidden.any()
        assert one.microbatches[0].times[kind].slow_bytes == times.slow_bytes


def test_a_mixer_in_one_piece_is_not_cut() -> None:
    mixer = Mixer(num_weights=1000, state_flops=10)
    layers = ("linear_attention", "full_attention")
    model = MODEL.model_copy(update={"layer_types": layers, "linear_mixer": mixer})
    plan = plan_step([40, 40], cluster=CLUSTER, model=model, strategy="static", max_tokens_per_rank=40, sp_degree=2)
    one, many = (predict(plan, overlapped(CLUSTER, num_parts), model).kinds for num_parts in (1, 2))
    assert many["linear_attention"].calls.tolist() == one["linear_attention"].calls.tolist() == [4] * 4
    assert many["full_attention"].calls.tolist() == [8] * 4


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", ["dynamic", "repack", "halo", "joint"])
def test_every_rank_makes_the_calls_that_are_predicted(strategy: str, recompute: bool) -> None:
    """The plan takes the parts from its planner's cluster."""
    model, lengths = model_for((8, 2), activation_checkpointing=recompute), LENGTHS["one long"]
    planner = tiny_wide_planner(strategy, 4, model.spec, lengths)
    cluster = overlapped(planner.cluster.model_copy(update={"recompute": recompute}), 3)
    plan, counted = metered_step(model, lengths, Planner(**{**vars(planner), "cluster": cluster}), 4)
    prediction = predict(plan, cluster, model.spec, element_bytes=8)
    for kind, expected in prediction.kinds.items():
        counts = [of_rank.get(kind, Count()) for of_rank in counted]
        assert [count.calls for count in counts] == expected.calls.tolist()
        assert [count.fast_bytes for count in counts] == expected.rank_fast_bytes.tolist()
        assert [count.slow_bytes for count in counts] == expected.rank_slow_bytes.tolist()
    assert any(kind.calls.any() for kind in prediction.kinds.values())


@pytest.mark.parametrize("sync", ["layer", "step"])
@pytest.mark.parametrize("seed", [1, 2])
def test_no_repacking_strategy_is_slower_than_dynamic(seed: int, sync: str) -> None:
    """On links of which attention hides so much that a plan made as if it hid nothing would be slower."""
    lengths = [13000 - 1500 * seed, *long_tailed(seed, 25, cap=4000, log_mean=6.0)]
    links = {"fast_bytes_per_s": 600e6, "slow_bytes_per_s": 600e6 / 7}
    whole = WIDE_CLUSTER.model_copy(update={"sync": sync, **links})
    cluster = overlapped(whole, 4)

    def seconds(strategy: str, planned_for: ClusterSpec) -> float:
        plan = plan_step(lengths, cluster=planned_for, model=WIDE_MODEL, strategy=strategy, max_tokens_per_rank=2560)
        prediction = predict(plan, cluster, WIDE_MODEL)
        assert prediction.seconds >= prediction.ideal_s
        return prediction.seconds

    rivals = [strategy for strategy in STRATEGIES if strategy not in ("static", "dynamic")]
    dynamic_s = seconds("dynamic", cluster)
    assert max(seconds(strategy, cluster) for strategy in rivals) <= dynamic_s
    if sync == "layer":
        assert max(seconds(strategy, whole) for strategy in rivals) > 1.005 * dynamic_s


@pytest.mark.parametrize("num_parts", [1, 2])
def test_estimates_rule_no_grouping_out_where_attention_may_hide_exchanges(num_parts: int) -> None:
    problem = StepProblem(
        lengths=np.array([*long_tailed(0, 60, 900), 3000]),
        cost=CostModel(cluster=overlapped(WIDE_CLUSTER, num_parts), model=WIDE_MODEL),
        max_tokens_per_rank=100_000,
    )
    options = RepackOptions(max_sp_degree=8)
    division = group_step(problem, options)
    assert (least_s(problem, division) == 0) == (num_parts == 2)
    repacked = [(repack_microbatch(problem, found.parents(), options), found) for found in division[0]]
    (fast, grouping), (slow, _) = (
        pick(repacked, key=lambda pair: pair[0].times(problem).seconds) for pick in (min, max)
    )
    tried = try_grouping(problem, slow, grouping, 2 * slow.times(problem).seconds, options)
    assert tried is (slow if num_parts == 1 else fast)


def test_the_setting_is_the_clusters() -> None:
    demo = ["model=demo", "cluster=demo", "tokens_per_step=100", "max_tokens_per_rank=100"]
    assert load_config(None, [*demo, "cluster.overlap_parts=4"]).cluster.overlap_parts == 4
    with pytest.raises(SpecError, match=r"unknown option 'overlap_parts', but there is 'cluster\.overlap_parts'"):
        load_config(None, [*demo, "overlap_parts=4"])
    for value in (0, 17):
        with pytest.raises(SpecError, match="overlap_parts"):
            load_config(None, [*demo, f"cluster.overlap_parts={value}"])


@pytest.mark.ranks
def test_training_takes_the_parts_of_the_cluster(tmp_path: Path) -> None:
    """On every rank, with forecasts or without; losses stay what they are."""
    samples, rows = write_samples(tmp_path), []
    for num_parts in (1, 2):
        settings = ["num_steps=2", "strategy=static", "strategy_options.sp_degree=2"]
        config = small_config(samples, 2, 1, *settings, f"cluster.overlap_parts={num_parts}")
        rows.append(train_small(config, tmp_path / f"run{num_parts}"))
    for before, after in zip(*rows, strict=True):
        assert after["loss"] == pytest.approx(before["loss"], rel=1e-9)
        calls = [row["exchange"]["full_attention"]["calls"] for row in (before, after)]
        assert calls[1] == 2 * calls[0] > 0
