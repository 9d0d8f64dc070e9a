"""The rivals of repacking: sliding layers that fetch halos, and hidden states redistributed between layers."""

from dataclasses import replace

import numpy as np
import pytest

from layerwise.cost import predict
from layerwise.errors import SpecError
from layerwise.plan import StepPlan, Tile
from layerwise.planners import plan_step
from layerwise.spec import FULL, SLIDING
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, long_tailed, make_model, wide_plan

LENGTHS = [12000, 5000, *long_tailed(1, 60, cap=2000, log_mean=5.0)]


def seconds(plan: StepPlan) -> float:
    return predict(plan, WIDE_CLUSTER, WIDE_MODEL).seconds


def test_sliding_tiles_are_a_rank_s_own_queries_and_the_window_before_them() -> None:
    plan = wide_plan("halo", [16000], fallback=False)
    (microbatch,) = plan.microbatches
    assert list(microbatch.tiles[SLIDING]) == [
        Tile(0, rank, 1000 * rank, 1000 * rank + 1000, max(1000 * rank - 255, 0), 0, 8) for rank in range(16)
    ]
    # 255 keys cross each of 15 cuts, one of them between nodes: K and V rows of 4 heads x 16, forward and backward.
    kind = predict(plan, WIDE_CLUSTER, WIDE_MODEL).kinds[SLIDING]
    cut_bytes = 255 * 4 * 2 * 16 * WIDE_CLUSTER.element_bytes
    assert (kind.slow_bytes, kind.fast_bytes) == (3 * 2 * cut_bytes, 3 * 2 * 14 * cut_bytes)


def test_halos_are_used_where_they_are_faster() -> None:
    dynamic, halo = wide_plan("dynamic", [16000]), wide_plan("halo", [16000])
    assert halo.notes == {"parents": 1, "halo": 1, "fallbacks": 0}
    assert seconds(halo) < seconds(dynamic)
    assert halo.microbatches[0].tiles[FULL] == dynamic.microbatches[0].tiles[FULL]


def test_halos_fall_back_where_they_are_slower() -> None:
    """A window wider than the sample: as many keys to fetch, and the last rank has most of the work."""
    model = WIDE_MODEL.model_copy(update={"sliding_window": 50_000})
    settings = {"cluster": WIDE_CLUSTER, "model": model, "max_tokens_per_rank": 2560}
    plans = {name: plan_step([16000], strategy=name, **settings) for name in ("dynamic", "halo")}
    forced = plan_step([16000], strategy="halo", fallback=False, **settings)
    assert plans["halo"].notes == {"parents": 1, "halo": 0, "fallbacks": 1}
    assert plans["halo"].microbatches == plans["dynamic"].microbatches
    assert predict(forced, WIDE_CLUSTER, model).seconds > predict(plans["halo"], WIDE_CLUSTER, model).seconds


def test_each_sample_decides_for_itself() -> None:
    """Of one group, some samples have halos and some not; so all is faster than halos everywhere and nowhere."""
    model = WIDE_MODEL.model_copy(update={"sliding_window": 500})
    settings = {"cluster": WIDE_CLUSTER, "model": model, "max_tokens_per_rank": 2560}
    lengths = [11000, *long_tailed(3, 30, cap=4000, log_mean=6.0)]
    halo, forced, dynamic = (
        plan_step(lengths, strategy=name, **settings, **options)
        for name, options in (("halo", {}), ("halo", {"fallback": False}), ("dynamic", {}))
    )
    tiles = [tile for microbatch in halo.microbatches for tile in microbatch.tiles[SLIDING]]
    with_halo = {tile.sample for tile in tiles if tile.k0 > 0}
    groups = [set(p.samples) for microbatch in halo.microbatches for p in microbatch.parents if p.sp_degree > 1]
    assert any(group & with_halo and group - with_halo for group in groups)
    assert halo.notes["halo"] == sum(bool(group & with_halo) for group in groups)
    assert predict(halo, WIDE_CLUSTER, model).seconds < predict(forced, WIDE_CLUSTER, model).seconds
    assert predict(halo, WIDE_CLUSTER, model).seconds < predict(dynamic, WIDE_CLUSTER, model).seconds


def test_a_step_that_got_slower_stays_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever samples decide, the whole step is compared too."""
    monkeypatch.setattr(
        "layerwise.planners.halo.prefers_halo", lambda _, layer, lengths, __: np.full(len(lengths), layer.spec.is_local)
    )
    model = WIDE_MODEL.model_copy(update={"sliding_window": 50_000})
    settings = {"cluster": WIDE_CLUSTER, "model": model, "max_tokens_per_rank": 2560}
    halo, dynamic = (plan_step([16000], strategy=name, **settings) for name in ("halo", "dynamic"))
    assert halo.microbatches == dynamic.microbatches
    assert halo.notes["fallbacks"] == 1


def test_a_model_without_local_layers_has_no_halos() -> None:
    model = make_model(layer_types=(FULL,), sliding_window=None)
    settings = {"cluster": WIDE_CLUSTER, "model": model, "max_tokens_per_rank": 2560}
    halo, dynamic = (plan_step(LENGTHS, strategy=name, **settings) for name in ("halo", "dynamic"))
    assert halo.microbatches == dynamic.microbatches
    assert halo.notes["halo"] == 0


@pytest.mark.parametrize("seed", [1, 3])
@pytest.mark.parametrize("sync", ["layer", "step"])
def test_halos_are_never_slower_than_dynamic(seed: int, sync: str) -> None:
    cluster = WIDE_CLUSTER.model_copy(update={"sync": sync})
    lengths = [13000 - 2000 * seed, *long_tailed(seed, 40, cap=4000, log_mean=6.0)]
    model = WIDE_MODEL.model_copy(update={"sliding_window": 16 * 8**seed})
    dynamic, halo = (
        plan_step(lengths, cluster=cluster, model=model, strategy=name, max_tokens_per_rank=2560)
        for name in ("dynamic", "halo")
    )
    assert predict(halo, cluster, model).seconds <= predict(dynamic, cluster, model).seconds


def test_redistribute_is_dynamic_in_full_layers_and_repack_in_sparse_ones() -> None:
    redistribute, repack, dynamic = (
        wide_plan(name, LENGTHS, **({} if name == "dynamic" else {"fallback": False}))
        for name in ("redistribute", "repack", "dynamic")
    )
    assert redistribute.notes["repacked"] > 0
    for moved, packed, wide in zip(redistribute.microbatches, repack.microbatches, dynamic.microbatches, strict=True):
        assert moved.shards_by_kind == {FULL: wide.shards}
        assert moved.tiles[FULL] == wide.tiles[FULL]
        assert (moved.shards, moved.tiles[SLIDING]) == (packed.shards, packed.tiles[SLIDING])


def test_redistribute_pays_for_its_passes() -> None:
    """What it does not win with the wide exchange, it loses between layers: two moves for one full layer."""
    plan = wide_plan("redistribute", [12000], fallback=False)
    (microbatch,) = plan.microbatches
    moves = predict(plan, WIDE_CLUSTER, WIDE_MODEL).moves
    wide, home = (
        np.repeat(t.column("rank"), t.column("hi") - t.column("lo"))
        for t in (microbatch.shards_at(FULL), microbatch.shards)
    )
    token_bytes = WIDE_MODEL.hidden_size * WIDE_CLUSTER.element_bytes
    # There and back, forward and backward: every token whose owner differs travels four times.
    assert moves.fast_bytes + moves.slow_bytes == 4 * token_bytes * int((wide != home).sum())
    assert moves.slow_bytes == 4 * token_bytes * int((wide // 8 != home // 8).sum())
    assert moves.seconds > 0


def test_redistribute_falls_back_where_passes_cost_more_than_they_save() -> None:
    slow_link = WIDE_CLUSTER.model_copy(update={"slow_bytes_per_s": 1e3, "fast_bytes_per_s": 1e3, "sync": "layer"})
    model = WIDE_MODEL.model_copy(update={"layer_types": (FULL, SLIDING), "num_layers": 2, "hidden_size": 4096})
    settings = {"cluster": slow_link, "model": model, "strategy": "redistribute", "max_tokens_per_rank": 1500}
    plan = plan_step([16000], **settings)
    assert plan.notes["fallbacks"] == plan.notes["parents"] == 1
    assert not plan.microbatches[0].shards_by_kind


def test_a_model_without_full_attention_moves_nothing() -> None:
    model = make_model(layer_types=(SLIDING,))
    plan = plan_step([12000, 40], cluster=WIDE_CLUSTER, model=model, strategy="redistribute", max_tokens_per_rank=1500)
    assert all(not microbatch.shards_by_kind for microbatch in plan.microbatches)


@pytest.mark.parametrize("strategy", ["halo", "redistribute"])
def test_options_are_checked(strategy: str) -> None:
    with pytest.raises(SpecError, match="unknown option 'window'"):
        wide_plan(strategy, [100], window=4)
    with pytest.raises(SpecError, match="max_sp_degree=3"):
        wide_plan(strategy, [100], max_sp_degree=3)
    narrow = wide_plan(strategy, [6000], max_sp_degree=4)
    assert max(parent.sp_degree for parent in narrow.microbatches[0].parents) <= 4
    assert replace(narrow, notes={}) == replace(wide_plan(strategy, [6000], max_sp_degree=4), notes={})
