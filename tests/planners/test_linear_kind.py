"""Linear mixers: planned with heads split and samples whole, refused where something would have to run them."""

from typing import Any

import numpy as np
import pytest

from layerwise.cost import attention_flops, dense_weights, linear_flops_per_token
from layerwise.errors import SpecError
from layerwise.groups import solo_world
from layerwise.model.transformer import HybridLM
from layerwise.plan import Parent
from layerwise.planners import STRATEGIES, plan_step
from layerwise.planners.layout import batched, lay_out, place, tile_rows
from layerwise.runtime import build_routes
from layerwise.spec import AttentionSpec, Mixer
from layerwise.traffic import elements, match
from tests.planners.builders import long_tailed, make_cluster, make_model

KINDS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
HEADS = {"linear_attention": 4}
LINEAR = make_model(
    layer_types=KINDS,
    sliding_window=None,
    num_heads_by_kind=HEADS,
    kv_heads_by_kind=HEADS,
    v_head_dim_by_kind={"linear_attention": 16},
)
MOE = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_strategy_keeps_the_samples_of_linear_layers_whole(strategy: str) -> None:
    lengths = [*long_tailed(1, 40, 400), 3000]
    plan = plan_step(lengths, cluster=make_cluster(16), model=LINEAR, strategy=strategy, max_tokens_per_rank=600)
    for microbatch in plan.microbatches:
        for tile in microbatch.tiles["linear_attention"]:
            assert (tile.q0, tile.k0, tile.q1) == (0, 0, lengths[tile.sample])


def test_ranks_beyond_the_heads_take_turns() -> None:
    """4 heads on 6 ranks: two ranks idle for each sample, and over three samples all ranks have equal work."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=4, v_head_dim=4, linear=True)
    rows = tile_rows(
        batched(place([Parent(first_rank=0, sp_degree=6, samples=(0, 1, 2))]), np.array([10, 10, 10])), spec
    )
    assert len(rows) == 12
    assert np.bincount(rows[:, 1]).tolist() == [2] * 6


def test_there_is_no_kernel_yet() -> None:
    plan = plan_step([5], cluster=make_cluster(1), model=LINEAR, strategy="static", max_tokens_per_rank=10)
    with pytest.raises(SpecError, match=r"linear_attention: .* no kernel yet"):
        build_routes(plan, 0, solo_world())


def test_the_reference_model_refuses_what_it_lacks() -> None:
    full = {"layer_types": ("full_attention",), "sliding_window": None}
    for model, message in (
        (LINEAR, "linear_attention can be planned, but"),
        (make_model(**full, output_gate=True), "output_gate=True can be planned, but"),
        (make_model(**full, **MOE, num_dense_layers=1), "num_dense_layers=1 can be planned, but"),
    ):
        with pytest.raises(SpecError, match=message):
            HybridLM(model)


WHOLE = make_model(
    layer_types=KINDS, sliding_window=None, linear_mixer=Mixer(num_weights=32 * 96, state_flops=4096), num_kv_heads=2
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_mixer_in_one_piece_runs_each_sample_on_one_rank(strategy: str) -> None:
    lengths = [*long_tailed(1, 40, 400), 3000]
    plan = plan_step(lengths, cluster=make_cluster(16), model=WHOLE, strategy=strategy, max_tokens_per_rank=600)
    tiles = np.concatenate([microbatch.tiles["linear_attention"].rows for microbatch in plan.microbatches])
    sample, _, q0, q1, k0, h0, h1 = tiles[np.argsort(tiles[:, 0])].T
    assert sample.tolist() == list(range(len(lengths)))
    assert q1.tolist() == lengths
    assert {(*row,) for row in np.stack([q0, k0, h0, h1], axis=1).tolist()} == {(0, 0, 0, 1)}


def test_a_mixer_in_one_piece_moves_hidden_states_and_is_counted_once() -> None:
    """Elements of one sample on 4 ranks, and FLOPs of its layer: from projections and state, at the tile only."""
    spec = WHOLE.attention("linear_attention")
    microbatch = lay_out(np.array([40]), {"linear_attention": spec}, [Parent(first_rank=0, sp_degree=4, samples=(0,))])
    tiles = microbatch.tiles["linear_attention"]
    moved = elements(match(microbatch.shards, tiles), tiles, spec)
    assert moved.to_tiles.tolist() == moved.from_tiles.tolist() == [10 * 32] * 4
    token_flops = 2 * 32 * 96 + 4096
    assert attention_flops(tiles, spec).sum() == pytest.approx(40 * token_flops, rel=0.02)  # rounded up to whole pairs
    mlp = 2 * 3 * 32 * 64
    assert linear_flops_per_token(WHOLE, "linear_attention") == mlp
    assert dense_weights(WHOLE, "linear_attention") == 32 * 96 + mlp / 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layer_types": ("full_attention",)}, "linear_mixer has no effect"),
        ({"num_heads_by_kind": HEADS}, "num_heads_by_kind has no effect on linear_attention layers"),
    ],
)
def test_a_mixer_that_would_have_no_effect_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_model(**{"layer_types": KINDS, "sliding_window": None, "linear_mixer": WHOLE.linear_mixer} | settings)
