"""The cost model by hand: FLOPs, bytes, seconds and calls of small plans."""

from dataclasses import replace

import numpy as np
import pytest

from layerwise.cost import (
    CostModel,
    Sent,
    attention_flops,
    head_flops_per_token,
    linear_flops_per_token,
    model_flops,
    pair_flops,
    predict,
)
from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.planners.estimate import GroupClass, group_base, group_loads
from layerwise.spec import ClusterSpec, EfficiencyTable, ModelSpec
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, wide_plan

# Round rates: 1 FLOP takes 1/1000 s, a byte 1/100 s inside and 1/10 s between nodes, a message 1/4 s.
CLUSTER = ClusterSpec(
    num_nodes=2,
    ranks_per_node=2,
    fast_bytes_per_s=100,
    slow_bytes_per_s=10,
    message_latency_s=0.25,
    peak_flops_per_s=2000,
    attention_efficiency=0.5,
    linear_efficiency=0.5,
    element_bytes=2,
)
MODEL = ModelSpec(
    num_layers=2,
    layer_types=("full_attention",),
    hidden_size=3,
    vocab_size=5,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    v_head_dim=6,
    intermediate_size=7,
)
# Per token: Q 3 x 8, K 3 x 4, V 3 x 6, O 12 x 3, three MLP matrices 3 x 7; two FLOPs each.
LINEAR_FLOPS = 2 * (3 * 8 + 3 * 4 + 3 * 6 + 12 * 3 + 3 * 3 * 7)
HEAD_FLOPS = 2 * 3 * 5
PAIR_FLOPS = 2 * (4 + 6)
# Parameters of a layer: 90 of attention, 36 of the shared expert and 24 of the router; 45 of each of 8 experts.
MOE = MODEL.model_copy(
    update={
        "intermediate_size": 0,
        "num_experts": 8,
        "experts_per_token": 2,
        "moe_intermediate_size": 5,
        "shared_intermediate_size": 4,
    }
)


def _plan(shards: list[Shard], tiles: list[Tile], lengths: tuple[int, ...], cluster: ClusterSpec = CLUSTER) -> StepPlan:
    microbatch = MicrobatchPlan(shards=shard_table(shards), tiles={"full_attention": tile_table(tiles)})
    plan = StepPlan(
        strategy="by hand",
        num_ranks=cluster.num_ranks,
        ranks_per_node=cluster.ranks_per_node,
        max_tokens_per_rank=100,
        lengths=lengths,
        attention={"full_attention": MODEL.attention("full_attention")},
        microbatches=(microbatch,),
    )
    plan.validate()
    return plan


def _local(length: int = 6) -> StepPlan:
    return _plan([Shard(0, 0, 0, length)], [Tile(0, 0, 0, length, 0, 0, 2)], (length,))


def _ulysses(ranks: tuple[int, int]) -> StepPlan:
    """Six tokens over two ranks, one query head each; both need the one KV head."""
    a, b = ranks
    return _plan([Shard(0, a, 0, 3), Shard(0, b, 3, 6)], [Tile(0, a, 0, 6, 0, 0, 1), Tile(0, b, 0, 6, 0, 1, 2)], (6,))


def test_flops_per_token() -> None:
    assert linear_flops_per_token(MODEL, "full_attention") == LINEAR_FLOPS
    assert head_flops_per_token(MODEL) == HEAD_FLOPS
    assert pair_flops(MODEL.attention("full_attention")) == PAIR_FLOPS


def test_only_active_experts_count() -> None:
    mlp_flops = 2 * 3 * 3 * (2 * 5 + 4) + 2 * 3 * 8  # experts and shared expert, router
    assert linear_flops_per_token(MOE, "full_attention") == LINEAR_FLOPS - 2 * 3 * 3 * 7 + mlp_flops


def test_an_output_gate_is_as_wide_as_the_attention_output() -> None:
    gated = MODEL.model_copy(update={"output_gate": True})
    assert linear_flops_per_token(gated, "full_attention") == LINEAR_FLOPS + 2 * 3 * 2 * 6


def test_heads_of_a_kind_make_its_projections() -> None:
    kinds = {"num_heads": {"sliding_attention": 6}, "kv_heads": {"sliding_attention": 2}}
    changes = {f"{key}_by_kind": value for key, value in kinds.items()}
    changes |= {"layer_types": ("full_attention", "sliding_attention"), "sliding_window": 4}
    model = MODEL.model_copy(update=changes)
    assert linear_flops_per_token(model, "full_attention") == LINEAR_FLOPS
    mlp, projections = 3 * 3 * 7, 3 * 6 * 4 + 3 * 2 * 4 + 3 * 2 * 6 + 6 * 6 * 3
    assert linear_flops_per_token(model, "sliding_attention") == 2 * (mlp + projections)


def test_dense_layers_count_by_their_share_of_a_kind() -> None:
    mixed = MOE.model_copy(update={"num_dense_layers": 1, "intermediate_size": 7})
    dense, moe = (linear_flops_per_token(model, "full_attention") for model in (MODEL, MOE))
    assert linear_flops_per_token(mixed, "full_attention") == (dense + moe) / 2


def test_linear_mixers_count_their_tokens() -> None:
    linear = MODEL.model_copy(update={"layer_types": ("linear_attention",)})
    spec = linear.attention("linear_attention")
    flops = model_flops(linear, np.array([6, 5]))
    tokens_flops = 2 * LINEAR_FLOPS + HEAD_FLOPS + 2 * 2 * spec.linear_pairs * PAIR_FLOPS  # 2 layers, 2 heads
    assert flops == 3 * 11 * tokens_flops


def test_attention_flops_count_allowed_pairs() -> None:
    tiles = tile_table([Tile(0, 0, 0, 6, 0, 0, 1), Tile(0, 1, 2, 4, 0, 1, 2)])
    # Causal: queries 0..5 see 1 + ... + 6 keys; queries 2 and 3 see 3 + 4.
    assert attention_flops(tiles, MODEL.attention("full_attention")).tolist() == [
        21 * PAIR_FLOPS,
        7 * PAIR_FLOPS,
    ]


def test_seconds_of_a_plan_without_communication() -> None:
    prediction = predict(_local(), CLUSTER, MODEL)
    layer_s = (3 * 6 * LINEAR_FLOPS + 3.5 * 21 * 2 * PAIR_FLOPS) / 1000
    head_s = 3 * 6 * HEAD_FLOPS / 1000
    assert prediction.kinds["full_attention"].seconds == pytest.approx(2 * layer_s)
    assert prediction.head_s == pytest.approx(head_s)
    assert prediction.seconds == pytest.approx(2 * layer_s + head_s)
    assert prediction.ideal_s == pytest.approx(prediction.seconds / 4)
    model_flops = 2 * (3 * 6 * LINEAR_FLOPS + 3 * 21 * 2 * PAIR_FLOPS) + 3 * 6 * HEAD_FLOPS
    assert prediction.mfu == pytest.approx(model_flops / (4 * 2000 * prediction.seconds))
    assert prediction.kinds["full_attention"].calls.tolist() == [0, 0, 0, 0]
    assert prediction.tokens_per_rank.tolist() == [[6, 0, 0, 0]]


@pytest.mark.parametrize(("ranks", "slow"), [((0, 1), False), ((1, 2), True)])
def test_bytes_and_seconds_of_an_exchange(ranks: tuple[int, int], slow: bool) -> None:
    """Each rank sends 3 tokens x (Q row of 4, K row of 4, V row of 6) x 2 bytes; 3 rows of 6 come back."""
    to_tiles, from_tiles = 3 * (4 + 4 + 6) * 2, 3 * 6 * 2
    prediction = predict(_ulysses(ranks), CLUSTER, MODEL)
    kind = prediction.kinds["full_attention"]
    total = 2 * 2 * 2 * (to_tiles + from_tiles)  # ranks x passes x layers
    assert (kind.slow_bytes, kind.fast_bytes) == ((total, 0) if slow else (0, total))
    rate = 10 if slow else 100
    comm_s = 2 * (to_tiles / rate + 0.25 + from_tiles / rate + 0.25)
    compute_s = (3 * 3 * LINEAR_FLOPS + 3.5 * 21 * PAIR_FLOPS) / 1000
    assert kind.seconds == pytest.approx(2 * (compute_s + comm_s))


def test_calls_are_four_per_layer_in_the_whole_block() -> None:
    """Ranks 1 and 2 are on two nodes: their block is all four ranks; idle ones run the collectives too."""
    assert predict(_ulysses((1, 2)), CLUSTER, MODEL).kinds["full_attention"].calls.tolist() == [8, 8, 8, 8]
    assert predict(_ulysses((0, 1)), CLUSTER, MODEL).kinds["full_attention"].calls.tolist() == [8, 8, 0, 0]


def test_links_overlap_and_the_larger_side_counts() -> None:
    cost = CostModel(cluster=CLUSTER, model=MODEL)
    sent = Sent(np.array([0, 0, 3]), np.array([1, 2, 2]), np.array([300.0, 20.0, 500.0]))
    # Rank 0 sends 3 s inside and 2 s between nodes, two messages; rank 2 receives 5 s and 2 s, two messages.
    assert cost.exchange_s(sent).tolist() == [3.0 + 0.5, 3.0 + 0.25, 5.0 + 0.5, 5.0 + 0.25]


@pytest.mark.parametrize("recompute", [False, True])
def test_moves_of_hidden_states_are_passes_of_their_own(recompute: bool) -> None:
    """Both full layers keep 3 tokens on rank 1 and 3 on rank 2, the home is rank 0: one move there, one back."""
    cluster = CLUSTER.model_copy(update={"recompute": recompute})
    tiles = tile_table([Tile(0, 1, 0, 3, 0, 0, 2), Tile(0, 2, 3, 6, 0, 0, 2)])
    plan = _plan([Shard(0, 0, 0, 6)], list(tiles), (6,), cluster)
    own = {"full_attention": shard_table([Shard(0, 1, 0, 3), Shard(0, 2, 3, 6)])}
    (microbatch,) = plan.microbatches
    moving = replace(plan, microbatches=(replace(microbatch, shards_by_kind=own),))
    moving.validate()
    prediction = predict(moving, cluster, MODEL)
    half = 3 * 3 * 2  # tokens x hidden size x bytes
    # Rank 0 sends halves in the move there, and gradients of halves in the backward of the move back.
    assert prediction.moves.rank_fast_bytes.tolist() == [2 * half, 2 * half, 0, 0]
    assert prediction.moves.rank_slow_bytes.tolist() == [2 * half, 0, 2 * half, 0]
    assert prediction.moves.calls.tolist() == [4, 4, 4, 4]
    assert prediction.moves.seconds == pytest.approx(4 * (half / 10 + 2 * 0.25))
    (part,) = prediction.microbatches
    assert part.slow_bytes == prediction.moves.slow_bytes + prediction.kinds["full_attention"].slow_bytes
    # The slower of the two, rank 2, has 3 tokens, not the home's 6, and queries of 4 to 6 keys; rank 1 sends K and V.
    layer_s = (3 + recompute) * 3 * LINEAR_FLOPS / 1000 + (3.5 + recompute) * (4 + 5 + 6) * 2 * PAIR_FLOPS / 1000
    layer_s += (2 + recompute) * (3 * (4 + 6) * 2 / 10 + 0.25)
    assert prediction.kinds["full_attention"].seconds == pytest.approx(2 * layer_s)
    assert prediction.head_s == pytest.approx(3 * 6 * HEAD_FLOPS / 1000)
    assert prediction.seconds == pytest.approx(prediction.moves.seconds + 2 * layer_s + prediction.head_s)
    assert predict(plan, cluster, MODEL).moves.calls.tolist() == [0, 0, 0, 0]


def test_element_bytes_override() -> None:
    two, eight = (predict(_ulysses((0, 2)), CLUSTER, MODEL, element_bytes=n).kinds["full_attention"] for n in (None, 8))
    assert eight.slow_bytes == 4 * two.slow_bytes


@pytest.mark.parametrize(
    ("nodes", "degree", "params_s"),
    [
        # 8 bytes per parameter: two gathers of 2 bytes, gradients of 4. Dense: 150; each rank of a node fetches half of
        # the half that the other node holds. Experts: 360; degree 2 leaves a rank 180, half of it in the other node.
        (2, 2, 8 * (150 / 2 / 2 + 180 / 2) / 10),
        (2, 1, 8 * (150 / 2 / 2 + 360 / 2 / 2) / 10),
        (2, 4, 8 * (150 / 2 / 2) / 10),  # each expert is on one rank: nothing to fetch
        (1, 2, 8 * (150 * 3 / 4 + 180 / 2) / 100),  # one node of four
    ],
)
def test_sharded_parameters(nodes: int, degree: int, params_s: float) -> None:
    settings = {"num_nodes": nodes, "ranks_per_node": 4 // nodes, "expert_parallel_degree": degree}
    cluster = CLUSTER.model_copy(update=settings | {"sharded_params": True})
    for recompute in (False, True):  # the gather of backward serves it
        cost = CostModel(cluster=cluster.model_copy(update={"recompute": recompute}), model=MOE)
        assert cost.layers[0].params_s == pytest.approx(params_s)
    whole = CostModel(cluster=cluster.model_copy(update={"sharded_params": False}), model=MOE)
    assert whole.layers[0].params_s == 0


@pytest.mark.parametrize(
    ("degree", "copies", "copy_s"),
    [(1, 1, 0), (2, 2, 1 / 2 / 100), (4, 3, 2 / 4 / 10)],  # half stay; half go to the neighbour; half to the other node
)
def test_expert_dispatch(degree: int, copies: int, copy_s: float) -> None:
    """A token of 3 x 2 bytes to 3 experts and back, forward and backward; with recompute, once more there and back."""
    moe, cluster = MOE.model_copy(update={"experts_per_token": 3}), {"expert_parallel_degree": degree}
    mixed = moe.model_copy(update={"num_dense_layers": 1, "intermediate_size": 7})
    for model, recompute, trips in ((moe, False, 4), (moe, True, 6), (mixed, False, 2), (MODEL, False, 0)):
        cost = CostModel(cluster=CLUSTER.model_copy(update=cluster | {"recompute": recompute}), model=model)
        assert cost.layers[0].dispatch_s == pytest.approx(trips * copies * 3 * 2 * copy_s)


def test_compute_hides_a_share_of_the_traffic() -> None:
    """The rank with tokens has compute to hide it behind; ranks without wait for the parameters all the same."""
    changes = {"sharded_params": True, "expert_parallel_degree": 4, "overlap": 0.25}
    cost = CostModel(cluster=CLUSTER.model_copy(update=changes), model=MOE)
    times = cost.layer_times(_local().microbatches[0])["full_attention"]
    linear_flops = 2 * (150 + 2 * 45)
    compute_s = (3 * 6 * linear_flops + 3.5 * 21 * 2 * PAIR_FLOPS) / 1000
    params_s, dispatch_s = 8 * 37.5 / 10, 6 * 4 * 2 * 3 * 2 * 2 / 4 / 10
    assert times.compute_s.tolist() == pytest.approx([compute_s, 0, 0, 0])
    assert times.exposed_s.tolist() == pytest.approx([params_s + dispatch_s - compute_s / 4, *[params_s] * 3])
    slowest_s = max(compute_s + params_s + dispatch_s - compute_s / 4, params_s)
    assert cost.predict(_local()).kinds["full_attention"].seconds == pytest.approx(2 * slowest_s)
    hidden = CostModel(
        cluster=CLUSTER.model_copy(update=changes | {"sharded_params": False, "overlap": 1.0}), model=MOE
    )
    assert hidden.layers[0].exposed_s(np.array([1.0, 99.0]), np.array([1, 6])).tolist() == pytest.approx([1.4, 0])


def test_recompute_runs_every_forward_twice() -> None:
    cluster = CLUSTER.model_copy(update={"recompute": True})
    prediction = predict(_ulysses((1, 2)), cluster, MODEL)
    kind = prediction.kinds["full_attention"]
    to_tiles, from_tiles = 3 * (4 + 4 + 6) * 2, 3 * 6 * 2
    comm_s = 3 * (to_tiles / 10 + 0.25 + from_tiles / 10 + 0.25)
    compute_s = (4 * 3 * LINEAR_FLOPS + 4.5 * 21 * PAIR_FLOPS) / 1000
    assert kind.seconds == pytest.approx(2 * (compute_s + comm_s))
    assert kind.slow_bytes == 2 * 3 * 2 * (to_tiles + from_tiles)  # ranks x passes x layers
    assert prediction.microbatches[0].slow_bytes == kind.slow_bytes
    assert kind.calls.tolist() == [12] * 4
    assert prediction.head_s == pytest.approx(3 * 3 * HEAD_FLOPS / 1000)  # not recomputed
    flops = 2 * (3 * 6 * LINEAR_FLOPS + 3 * 21 * 2 * PAIR_FLOPS) + 3 * 6 * HEAD_FLOPS  # nor counted twice
    assert prediction.mfu == pytest.approx(flops / (4 * 2000 * prediction.seconds))


def test_attention_is_as_fast_as_the_table_says() -> None:
    """Six keys lie halfway between 3 and 12 in log2."""
    table = EfficiencyTable(lengths=(3, 12), efficiency=((0.2,), (0.6,)))
    cluster = CLUSTER.model_copy(update={"attention_efficiency": table})
    times = CostModel(cluster=cluster, model=MODEL).layer_times(_local().microbatches[0])["full_attention"]
    assert times.attention_s[0] == pytest.approx(3.5 * 21 * 2 * PAIR_FLOPS / (2000 * 0.4))


@pytest.mark.parametrize("sync", ["layer", "step"])
def test_where_ranks_wait(sync: str) -> None:
    """Rank 1 has all attention, rank 0 one token more: the LM head waits for it only with sync "layer"."""
    cluster = CLUSTER.model_copy(
        update={"sync": sync, "message_latency_s": 0.0, "fast_bytes_per_s": 1e12, "slow_bytes_per_s": 1e12}
    )
    shards, tiles = (
        [Shard(0, 0, 0, 6), Shard(1, 1, 0, 5)],
        [Tile(0, 1, 0, 6, 0, 0, 2), Tile(1, 1, 0, 5, 0, 0, 2)],
    )
    prediction = predict(_plan(shards, tiles, (6, 5)), cluster, MODEL)
    rank_s = [3 * 6 * (2 * LINEAR_FLOPS + HEAD_FLOPS) / 1000]
    rank_s.append((3 * 5 * (2 * LINEAR_FLOPS + HEAD_FLOPS) + 2 * 3.5 * (21 + 15) * 2 * PAIR_FLOPS) / 1000)
    assert rank_s[1] > rank_s[0]
    head_wait_s = 3 * HEAD_FLOPS / 1000  # the LM head waits for rank 0, which has one token more
    assert prediction.seconds == pytest.approx(rank_s[1] + (head_wait_s if sync == "layer" else 0.0))


def test_microbatches_add_up() -> None:
    plan = wide_plan("dynamic", [3000] * 16, budget=2560)
    assert len(plan.microbatches) > 1
    prediction = predict(plan, WIDE_CLUSTER, WIDE_MODEL)
    assert prediction.seconds == pytest.approx(sum(part.seconds for part in prediction.microbatches))
    assert prediction.tokens_per_rank.sum() == 48000
    for kind, total in prediction.kinds.items():
        assert total.fast_bytes == sum(part.kinds[kind].fast_bytes for part in prediction.microbatches)


def test_the_estimate_of_a_group_is_its_prediction() -> None:
    """Where shares are level, the closed form that strategies search with is the exact prediction."""
    cost = CostModel(cluster=WIDE_CLUSTER, model=WIDE_MODEL)
    for degree in (4, 8, 16):
        plan = wide_plan("static", [1600], sp_degree=degree)
        loads = group_loads(cost, np.array([1600]), [GroupClass(degree)]).loads[:, 0, 0]
        estimate_s = float((loads + group_base(cost, [GroupClass(degree)])[:, 0]).sum())
        exact_s = predict(plan, WIDE_CLUSTER, WIDE_MODEL).seconds
        # The exact traffic of query ranges (degree > heads) skips keys after the range, so it may be lower.
        assert exact_s == pytest.approx(estimate_s, rel=1e-9 if degree <= 8 else 0.1)
