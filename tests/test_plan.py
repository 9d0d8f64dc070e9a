"""A plan accepts only what computes every score once; it survives JSON, and its digest sees every change."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from layerwise.errors import PlanError
from layerwise.plan import MicrobatchPlan, Parent, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.planners import plan_step
from layerwise.spec import AttentionSpec
from tests.planners.builders import make_cluster, make_model, wide_plan

FULL = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=4, v_head_dim=4)
SLIDING = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=4, v_head_dim=4, window=3)

SHARDS = [Shard(0, 0, 0, 5), Shard(0, 1, 5, 10), Shard(1, 2, 0, 4)]
FULL_TILES = [
    Tile(0, 0, 0, 10, 0, 0, 4),
    Tile(0, 1, 0, 10, 0, 4, 6),
    Tile(0, 3, 0, 6, 0, 6, 8),
    Tile(0, 2, 6, 10, 0, 6, 8),
    Tile(1, 2, 0, 4, 0, 0, 8),
]
MOVED = [Shard(0, 2, 0, 5), Shard(0, 3, 5, 10), Shard(1, 0, 0, 4)]
SLIDING_TILES = [Tile(0, 0, 0, 5, 0, 0, 8), Tile(0, 1, 5, 10, 3, 0, 8), Tile(1, 2, 0, 4, 0, 0, 8)]


def _plan(
    shards: list[Shard] = SHARDS,
    full: list[Tile] = FULL_TILES,
    sliding: list[Tile] = SLIDING_TILES,
    own: dict[str, list[Shard]] | None = None,
    **changes: Any,
) -> StepPlan:
    microbatch = MicrobatchPlan(
        shards=shard_table(shards),
        tiles={"full_attention": tile_table(full), "sliding_attention": tile_table(sliding)},
        parents=(Parent(first_rank=0, sp_degree=4, samples=(0, 1), repacked=True),),
        shards_by_kind={kind: shard_table(rows) for kind, rows in (own or {}).items()},
    )
    base: dict[str, Any] = {
        "strategy": "by hand",
        "num_ranks": 4,
        "ranks_per_node": 2,
        "max_tokens_per_rank": 5,
        "lengths": (10, 4),
        "attention": {"full_attention": FULL, "sliding_attention": SLIDING},
        "microbatches": (microbatch,),
        "notes": {"moved": 1},
    }
    return StepPlan(**{**base, **changes})


def _swap(rows: list[Any], index: int, *new: Any) -> list[Any]:
    return [*rows[:index], *new, *rows[index + 1 :]]


def test_a_good_plan_is_accepted() -> None:
    plan = _plan()
    plan.validate()
    assert plan.num_tokens == 14
    assert plan.microbatches[0].tokens_per_rank(4).tolist() == [5, 5, 4, 0]


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        (_swap(SHARDS, 1, Shard(0, 1, 6, 10)), "should start at 5"),  # gap
        (_swap(SHARDS, 1, Shard(0, 1, 4, 10)), "should start at 5"),  # overlap
        (_swap(SHARDS, 1, Shard(0, 1, 5, 9)), "does not continue its sample"),  # too short
        (_swap(SHARDS, 1, Shard(0, 1, 5, 11)), "does not continue its sample"),  # too long
        (_swap(SHARDS, 1, Shard(0, 1, 5, 10), Shard(0, 3, 5, 5)), "not be empty"),
        (_swap(SHARDS, 0, Shard(0, 0, 1, 5)), "should start at 0"),
        (_swap(SHARDS, 0, Shard(0, 1, 0, 5)), "rank 1 holds 10 tokens, max_tokens_per_rank=5"),
        (_swap(SHARDS, 0, Shard(0, 4, 0, 5)), r"rank 4 is not in \[0, 4\)"),
        (_swap(SHARDS, 0, Shard(0, -1, 0, 5)), r"rank -1 is not in \[0, 4\)"),
        (SHARDS[:2], r"missing \[1\]"),
        ([*SHARDS, Shard(2, 3, 0, 1)], "2 samples, each in exactly one micro-batch"),
    ],
)
def test_broken_shards(shards: list[Shard], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _plan(shards=shards).validate()


@pytest.mark.parametrize(
    ("tiles", "message"),
    [
        (_swap(FULL_TILES, 1, Tile(0, 1, 0, 10, 0, 4, 5)), "not covered exactly once"),  # a head too few
        (_swap(FULL_TILES, 1, Tile(0, 1, 0, 10, 0, 4, 7)), "not covered exactly once"),  # a head twice
        ([*FULL_TILES, FULL_TILES[4]], "not covered exactly once"),  # a whole tile twice
        (FULL_TILES[:4], "tiles for samples other than those of the shards"),
        (_swap(FULL_TILES, 3, Tile(0, 2, 7, 10, 0, 6, 8)), "sample 0 is not covered exactly once near query"),
        (_swap(FULL_TILES, 3, Tile(0, 2, 5, 10, 0, 6, 8)), "sample 0 is not covered exactly once near query"),
        (_swap(FULL_TILES, 3, Tile(0, 2, 6, 11, 0, 6, 8)), "not covered exactly once"),
        ([*_swap(FULL_TILES, 0, Tile(0, 0, 0, 10, 0, 0, 3), Tile(0, 0, 0, 10, 0, 3, 6))], "tears a KV group"),
        (_swap(FULL_TILES, 3, Tile(0, 2, 6, 10, 1, 6, 8)), "first key needed: 0"),
        (_swap(FULL_TILES, 4, Tile(1, 2, 0, 4, 0, 0, 9)), "heads outside"),
        ([*FULL_TILES, Tile(1, 2, 4, 4, 0, 0, 8)], "has no queries"),
        (_swap(FULL_TILES, 4, Tile(1, 7, 0, 4, 0, 0, 8)), r"rank 7 is not in \[0, 4\)"),
    ],
)
def test_broken_tiles(tiles: list[Tile], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _plan(full=tiles).validate()


@pytest.mark.parametrize("k0", [0, 2, 4])
def test_keys_must_be_those_that_the_window_needs(k0: int) -> None:
    with pytest.raises(PlanError, match=r"sliding_attention.*first key needed: 3"):
        _plan(sliding=_swap(SLIDING_TILES, 1, Tile(0, 1, 5, 10, k0, 0, 8))).validate()


def test_a_kind_may_keep_hidden_states_on_other_shards() -> None:
    plan = _plan(own={"full_attention": MOVED})
    plan.validate()
    (microbatch,) = plan.microbatches
    assert microbatch.tokens_per_rank(4).tolist() == [5, 5, 4, 0]
    assert microbatch.tokens_per_rank(4, "full_attention").tolist() == [4, 0, 5, 5]
    assert microbatch.shards_at("sliding_attention") is microbatch.shards


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"linear_attention": MOVED}, "shards of layer kind 'linear_attention', but the model has"),
        ({"full_attention": MOVED[:2]}, "shards of full_attention: samples other than those of the home"),
        ({"full_attention": _swap(MOVED, 1, Shard(0, 3, 6, 10))}, r"shards of full_attention: .* should start at 5"),
        ({"full_attention": _swap(MOVED, 2, Shard(1, 3, 0, 4))}, "shards of full_attention: rank 3 holds 9 tokens"),
        ({"full_attention": _swap(MOVED, 2, Shard(1, 4, 0, 4))}, r"rank 4 is not in \[0, 4\)"),
    ],
)
def test_broken_shards_of_a_kind(own: dict[str, list[Shard]], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        _plan(own=own).validate()


def test_a_sample_in_two_microbatches() -> None:
    plan = _plan()
    with pytest.raises(PlanError, match="each in exactly one micro-batch"):
        replace(plan, microbatches=plan.microbatches * 2).validate()


def test_a_layer_kind_without_tiles() -> None:
    plan = _plan()
    (microbatch,) = plan.microbatches
    partial = replace(microbatch, tiles={"full_attention": microbatch.tiles["full_attention"]})
    with pytest.raises(PlanError, match="but the model has"):
        replace(plan, microbatches=(partial,)).validate()


def test_row_order_does_not_matter() -> None:
    assert _plan() == _plan(SHARDS[::-1], FULL_TILES[::-1], SLIDING_TILES[::-1])
    assert _plan().digest() == _plan(SHARDS[::-1], FULL_TILES[::-1], SLIDING_TILES[::-1]).digest()


@pytest.mark.parametrize("strategy", ["static", "dynamic", "redistribute", "repack+parents"])
def test_json_round_trip(strategy: str) -> None:
    for plan in (_plan(own={"full_attention": MOVED}), wide_plan(strategy, [15000, 900, 40, 1])):
        again = StepPlan.from_json(plan.to_json())
        assert again == plan
        assert again.digest() == plan.digest()


def test_bad_plan_files() -> None:
    text = _plan().to_json()
    data = json.loads(text)
    data["microbatches"][0]["shards"][0][3] = 4
    whole = json.loads(text)
    lacking = [json.dumps({key: whole[key] for key in whole if key != missing}) for missing in whole]
    assert len(lacking) > 10
    for broken in (
        *lacking,
        json.dumps({**whole, "surplus": 1}),
        text[: len(text) // 2],
        "[]",
        "{}",
        text.replace("layerwise-plan-1", "x"),
        json.dumps(data),
    ):
        with pytest.raises(PlanError):
            StepPlan.from_json(broken)


def test_the_digest_sees_every_change() -> None:
    plans = [
        _plan(),
        _plan(strategy="other"),
        _plan(ranks_per_node=4),
        _plan(max_tokens_per_rank=6),
        _plan(overlap_parts=2),
        _plan(shards=_swap(SHARDS, 2, Shard(1, 3, 0, 4))),
        _plan(layer_types=("full_attention", "sliding_attention")),
        _plan(layer_types=("sliding_attention", "full_attention")),
        _plan(own={"full_attention": MOVED}),
        _plan(own={"sliding_attention": MOVED}),
        _plan(full=_swap(FULL_TILES, 4, Tile(1, 3, 0, 4, 0, 0, 8))),
        _plan(sliding=_swap(SLIDING_TILES, 2, Tile(1, 3, 0, 4, 0, 0, 8))),
        _plan(attention={"full_attention": FULL, "sliding_attention": SLIDING.model_copy(update={"window": 4})}),
    ]
    digests = [plan.digest() for plan in plans]
    assert len(set(digests)) == len(plans)
    assert all(0 <= digest < 2**63 for digest in digests)
    assert _plan(notes={}).digest() == digests[0]  # ranks need not agree on counters


def test_tables_are_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        _plan().microbatches[0].shards.rows[0, 0] = 9


@pytest.mark.slow
def test_ten_thousand_lengths_plan_and_validate() -> None:
    lengths = np.minimum(np.exp(np.random.default_rng(0).normal(6, 1.4, 10_000)).astype(int) + 1, 60_000)
    plan = plan_step(
        lengths,
        cluster=make_cluster(64),
        model=make_model(),
        strategy="repack+parents",
        max_tokens_per_rank=32768,
    )
    assert plan.num_tokens == int(lengths.sum())


@pytest.mark.parametrize("reach", [3, 1 << 40, 1 << 61])
def test_rows_of_a_table_are_sorted_by_every_column(reach: int) -> None:
    """Also where the columns take more bits than one number has, and where the first ones do not tell rows apart."""
    rows = np.random.default_rng(0).integers(-reach, reach, (200, 7))
    rows[:, [0, 2, 3, 5, 6]] %= 2
    order = [0, 5, 6, 2, 3, 1, 4]  # sample, h0, h1, q0, q1, rank, k0
    assert tile_table(rows).rows.tolist() == sorted(rows.tolist(), key=lambda row: [row[i] for i in order])
    assert len(tile_table([])) == 0
