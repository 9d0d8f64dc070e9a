"""Memory by hand for small plans, and what a real forward keeps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from layerwise import LocalWorld
from layerwise.cost import Memory, kept_elements_per_token, predict_memory, site_bytes
from layerwise.model import HybridLM, ModelOptions
from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.runtime import build_routes, use_routes
from layerwise.spec import ClusterSpec, ModelSpec
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, wide_plan

DENSE: dict[str, Any] = {
    "num_layers": 2,
    "layer_types": ("full_attention",),
    "hidden_size": 3,
    "vocab_size": 5,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 4,
    "v_head_dim": 6,
    "intermediate_size": 7,
}
MODEL = ModelSpec(**DENSE)
# Q 3 x 8, K 3 x 4, V 3 x 6, O 12 x 3, three MLP matrices 3 x 7; the embedding is the head.
LAYER_WEIGHTS = 3 * 8 + 3 * 4 + 3 * 6 + 12 * 3 + 3 * 3 * 7
WEIGHTS = 2 * LAYER_WEIGHTS + 5 * 3


def cluster(**settings: Any) -> ClusterSpec:
    return ClusterSpec(**{"num_nodes": 2, "ranks_per_node": 2, **settings})


def plan_of(*microbatches: tuple[list[Shard], list[Tile]], lengths: tuple[int, ...]) -> StepPlan:
    parts = tuple(
        MicrobatchPlan(shards=shard_table(shards), tiles={"full_attention": tile_table(tiles)})
        for shards, tiles in microbatches
    )
    plan = StepPlan(
        strategy="by hand",
        num_ranks=4,
        ranks_per_node=2,
        max_tokens_per_rank=100,
        lengths=lengths,
        attention={"full_attention": MODEL.attention("full_attention")},
        microbatches=parts,
    )
    plan.validate()
    return plan


def ulysses() -> StepPlan:
    """Six tokens over ranks 0 and 1, one query head each; both need the one KV head."""
    tiles = [Tile(0, 0, 0, 6, 0, 0, 1), Tile(0, 1, 0, 6, 0, 1, 2)]
    return plan_of(([Shard(0, 0, 0, 3), Shard(0, 1, 3, 6)], tiles), lengths=(6,))


# Q and O 6 x (4 + 6), K and V 6 x (4 + 6), in 2 bytes; a float32 for each of 6 queries.
SITE = 2 * (60 + 60) + 4 * 6
# Per token: norm inputs and outputs 4 x 3, attention output 12, gate, up, silu(gate), product 4 x 7.
KEPT = 4 * 3 + 12 + 4 * 7


def test_state_of_a_replicated_model() -> None:
    state = predict_memory(ulysses(), cluster(), MODEL).state
    assert (state.weights, state.gradients, state.optimizer, state.gathered) == (
        2 * WEIGHTS,
        4 * WEIGHTS,
        12 * WEIGHTS,
        0,
    )


def test_float32_weights_are_their_own_master_copy() -> None:
    state = predict_memory(ulysses(), cluster(), MODEL, element_bytes=4).state
    assert (state.weights, state.optimizer) == (4 * WEIGHTS, 8 * WEIGHTS)


def test_sharded_state_is_spread_and_gathered_layer_by_layer() -> None:
    state = predict_memory(ulysses(), cluster(sharded_params=True), MODEL).state
    assert state.weights == 2 * WEIGHTS / 4
    assert state.optimizer == 12 * WEIGHTS / 4
    assert state.gathered == LAYER_WEIGHTS * (2 * 2 + 4)


@pytest.mark.parametrize("sharded", [False, True])
def test_expert_parallel_ranks_share_experts(sharded: bool) -> None:
    moe = {"num_experts": 8, "experts_per_token": 2, "moe_intermediate_size": 5, "intermediate_size": 0}
    model = ModelSpec(**DENSE | moe)
    router, expert = 3 * 8, 3 * 3 * 5
    dense = LAYER_WEIGHTS - 3 * 3 * 7 + router
    state = predict_memory(ulysses(), cluster(expert_parallel_degree=4, sharded_params=sharded), model).state
    local = 2 * (dense + 8 * expert / 4) + 15
    assert state.weights == 2 * ((2 * (dense + 8 * expert) + 15) / 4 if sharded else local)
    assert state.gathered == ((dense + 8 * expert / 4) * 8 if sharded else 0)


def test_activations_are_kept_in_every_layer_without_recompute() -> None:
    (part,) = predict_memory(ulysses(), cluster(), MODEL).microbatches
    assert kept_elements_per_token(MODEL, "full_attention") == KEPT
    assert part.hidden.tolist() == [2 * 3 * 2 * KEPT] * 2 + [0, 0]
    assert part.attention.tolist() == [2 * SITE] * 2 + [0, 0]
    assert part.work.tolist() == [SITE] * 2 + [0, 0]
    assert part.head.tolist() == [3 * 5 * (2 + 4 + 4)] * 2 + [0, 0]
    assert part.peak[0] == part.hidden[0] + part.attention[0] + SITE
    assert part.site_tokens["full_attention"].tolist() == [3, 3, 0, 0]


def test_recompute_keeps_layer_inputs_and_one_layer_in_work() -> None:
    (part,) = predict_memory(ulysses(), cluster(recompute=True), MODEL).microbatches
    assert part.hidden[0] == 2 * 3 * 2 * 3  # layers x tokens x bytes x hidden size
    assert part.attention[0] == 0
    assert part.work[0] == 3 * 2 * KEPT + 2 * SITE


def test_wide_vocabularies_peak_at_the_head() -> None:
    model = MODEL.model_copy(update={"vocab_size": 1000})
    memory = predict_memory(ulysses(), cluster(), model)
    (part,) = memory.microbatches
    assert part.head[0] > part.work[0]
    assert part.peak[0] == part.hidden[0] + part.attention[0] + 3 * 1000 * 10
    parts = memory.at_peak(0)
    assert parts["LM head"] == 30000
    assert parts["layer in backward"] == 0
    assert sum(parts.values()) == pytest.approx(memory.peak_bytes[0])


def test_the_peak_of_each_rank_is_that_of_its_largest_microbatch() -> None:
    def local(sample: int, rank: int, length: int) -> tuple[list[Shard], list[Tile]]:
        return [Shard(sample, rank, 0, length)], [Tile(sample, rank, 0, length, 0, 0, 2)]

    one, two = predict_memory(plan_of(local(0, 0, 9), local(1, 1, 4), lengths=(9, 4)), cluster(), MODEL).microbatches
    memory = predict_memory(plan_of(local(0, 0, 9), local(1, 1, 4), lengths=(9, 4)), cluster(), MODEL)
    assert memory.peak_tokens.tolist() == [9, 4, 0, 0]
    assert memory.peak_bytes.tolist() == [memory.state.total + x for x in (one.peak[0], two.peak[1], 0, 0)]
    assert memory.peak_site_tokens["full_attention"].tolist() == [9, 4, 0, 0]


def test_tiles_of_a_window_hold_only_the_keys_they_see() -> None:
    spec = ModelSpec(**DENSE | {"layer_types": ("sliding_attention",), "sliding_window": 3}).attention(
        "sliding_attention"
    )
    # Queries 4 and 5, keys 2 to 5, both heads on one KV head.
    (held,) = site_bytes(tile_table([Tile(0, 0, 4, 6, 2, 0, 2)]), spec, 1, 2).tolist()
    assert held == 2 * (2 * 2 * 10 + 4 * 1 * 10) + 4 * 4


def test_tokens_where_a_kind_keeps_them_elsewhere_count() -> None:
    plan = wide_plan("redistribute", [16000, *[300] * 20], fallback=False)
    moved = [m for m in plan.microbatches if m.shards_by_kind]
    assert moved
    memory = predict_memory(plan, WIDE_CLUSTER, WIDE_MODEL)
    for kind in WIDE_MODEL.kinds:
        for microbatch in plan.microbatches:
            assert (memory.peak_tokens >= microbatch.tokens_per_rank(16, kind)).all()


class TestWarning:
    def memory(self, **settings: Any) -> tuple[Memory, ClusterSpec]:
        spec = cluster(**settings)
        return predict_memory(ulysses(), spec, MODEL), spec

    def test_no_limit_or_enough_memory(self) -> None:
        memory, spec = self.memory()
        assert memory.warning(spec) is None
        assert memory.warning(cluster(memory_bytes=float(memory.peak_bytes.max()))) is None

    def test_says_which_rank_exceeds_by_how_much(self) -> None:
        memory, _ = self.memory()
        text = memory.warning(cluster(memory_bytes=float(memory.peak_bytes[0]) - 100))
        assert text is not None
        assert text.startswith("rank 0 needs ")
        assert ", 100 B more than memory_bytes=" in text
        assert "2 of 4 ranks exceed it" in text
        assert "recompute: true or sharded_params: true" in text

    def test_does_not_advise_what_is_set_already(self) -> None:
        memory, _ = self.memory(recompute=True, sharded_params=True)
        text = memory.warning(cluster(memory_bytes=10, recompute=True, sharded_params=True))
        assert text is not None
        assert "recompute" not in text
        assert "use more ranks" in text


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "moe"])
def test_a_real_forward_keeps_what_is_predicted(experts: bool) -> None:
    """What autograd saves for one more layer, weights aside, is the formula's elements and what the kernel copies."""
    moe = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 48, "intermediate_size": 0}
    base = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "v_head_dim": 8}
    saved = []
    for num_layers in (1, 2):
        spec = ModelSpec(
            **DENSE | base | {"intermediate_size": 96, "num_layers": num_layers} | (moe if experts else {})
        )
        saved.append(_saved_elements(spec, 64))
    heads_q, heads_kv, head_dim = 4, 2, 8
    rows = (heads_q + heads_kv) * head_dim  # Q and O, or K and V, of one token: each pair is as wide
    excess = (saved[1] - saved[0]) / 64 - kept_elements_per_token(spec, "full_attention") - 2 * rows
    # Beyond that, the kernel for CPUs copies Q, K and V, and sums, norms and routing weights take a few numbers.
    copies = (heads_q + 2 * heads_kv) * head_dim
    assert 0 <= excess <= copies + 16


def _saved_elements(spec: ModelSpec, num_tokens: int) -> int:
    """Elements of distinct storages that a forward saves for backward, of the hidden dtype and without parameters."""
    model = HybridLM(spec, ModelOptions())
    shards, tiles = [Shard(0, 0, 0, num_tokens)], [Tile(0, 0, 0, num_tokens, 0, 0, spec.num_heads)]
    plan = StepPlan(
        strategy="by hand",
        num_ranks=1,
        ranks_per_node=1,
        max_tokens_per_rank=num_tokens,
        lengths=(num_tokens,),
        attention={"full_attention": spec.attention("full_attention")},
        microbatches=(MicrobatchPlan(shards=shard_table(shards), tiles={"full_attention": tile_table(tiles)}),),
    )
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if tensor.dtype == torch.float32 and pointer not in own:
            seen[pointer] = tensor
        return tensor

    def on_rank(world: Any) -> None:
        routes = build_routes(plan, 0, world)
        with use_routes(routes), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(torch.arange(num_tokens) % spec.vocab_size, torch.arange(num_tokens)).logits.sum()

    LocalWorld(1, 1).run(on_rank)
    return int(np.sum([tensor.untyped_storage().nbytes() // 4 for tensor in seen.values()]))
