"""Masks, settings and presets."""

from pathlib import Path

import numpy as np
import pytest

from layerwise.cost import dense_weights, expert_weights
from layerwise.errors import SpecError
from layerwise.spec import (
    AttentionSpec,
    ClusterSpec,
    EfficiencyTable,
    ModelSpec,
    load_cluster,
    load_model,
    preset_names,
    record_from,
)

DENSE = {
    "num_layers": 2,
    "layer_types": ["full_attention"],
    "hidden_size": 8,
    "vocab_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 16,
}


@pytest.mark.parametrize("mask", [{}, {"window": 1}, {"window": 5}, {"window": 100}, {"chunk": 1}, {"chunk": 7}])
def test_pairs_count_the_keys_of_every_query(mask: dict[str, int]) -> None:
    spec = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, v_head_dim=4, **mask)
    positions = np.arange(40)
    allowed = positions[:, None] >= positions[None, :]
    if "window" in mask:
        allowed &= positions[:, None] - positions[None, :] < mask["window"]
    if "chunk" in mask:
        allowed &= positions[:, None] // mask["chunk"] == positions[None, :] // mask["chunk"]
    assert np.array_equal(spec.first_key(positions), allowed.argmax(axis=1))
    for q0, q1 in [(0, 40), (0, 1), (13, 14), (6, 31), (20, 20)]:
        assert spec.pairs(q0, q1) == allowed[q0:q1].sum()


def test_a_linear_mixer_costs_the_same_for_every_token_and_needs_all_before_it() -> None:
    """Per token and head: chunks of 64 with 3 products of dk and 2 of dv per pair, and 3 of dk x dv with the state."""
    spec = AttentionSpec(num_heads=4, num_kv_heads=4, head_dim=4, v_head_dim=8, linear=True)
    flops = 2 * (32 * (3 * 4 + 2 * 8) + 3 * 4 * 8)
    per_token = -(-flops // (2 * (4 + 8)))
    assert (spec.pairs(0, 10), spec.pairs(7, 10), spec.pairs(7, 7)) == (10 * per_token, 10 * per_token, 0)
    assert spec.pairs(np.array([0, 3]), np.array([3, 3])).tolist() == [3 * per_token, 0]
    assert spec.first_key(np.array([0, 9])).tolist() == [0, 0]
    assert not spec.is_full


@pytest.mark.parametrize("names", [("window", "chunk"), ("window", "linear"), ("chunk", "linear")])
def test_a_kind_has_one_mask(names: tuple[str, str]) -> None:
    masks = {"window": 2, "chunk": 2, "linear": True}
    with pytest.raises(ValueError, match="one of window, chunk and linear"):
        AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, v_head_dim=4, **{name: masks[name] for name in names})


def test_kv_range_covers_the_groups_that_the_heads_read() -> None:
    spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=4, v_head_dim=4)
    assert [spec.kv_range(*heads) for heads in [(0, 4), (4, 8), (0, 8), (5, 6), (3, 4)]] == [
        (0, 1),
        (1, 2),
        (0, 2),
        (1, 2),
        (0, 1),
    ]


def test_a_period_of_layer_types_is_repeated() -> None:
    model = record_from(
        ModelSpec,
        {
            **DENSE,
            "num_layers": 4,
            "layer_types": ["full_attention", "sliding_attention"],
            "sliding_window": 3,
        },
        "m",
    )
    assert model.all_layer_types == ("full_attention", "sliding_attention") * 2
    assert model.num_layers_of("sliding_attention") == 2
    assert model.attention("sliding_attention").window == 3
    assert model.attention("full_attention").window is None


def test_kinds_may_differ_in_every_shape() -> None:
    changes = {
        "layer_types": ["full_attention", "linear_attention"],
        "num_heads_by_kind": {"linear_attention": 6},
        "kv_heads_by_kind": {"linear_attention": 3},
        "head_dim_by_kind": {"linear_attention": 5},
        "v_head_dim_by_kind": {"linear_attention": 7},
    }
    model = record_from(ModelSpec, DENSE | changes, "m")
    shapes = {"num_heads": 6, "num_kv_heads": 3, "head_dim": 5, "v_head_dim": 7}
    assert model.attention("linear_attention") == AttentionSpec(**shapes, linear=True)
    shapes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "v_head_dim": 4}
    assert model.attention("full_attention") == AttentionSpec(**shapes)


def test_the_share_of_moe_layers_follows_the_first_dense_ones() -> None:
    changes = {
        "num_layers": 6,
        "layer_types": ["full_attention", "sliding_attention"],
        "sliding_window": 3,
        "num_experts": 4,
        "experts_per_token": 2,
        "moe_intermediate_size": 4,
        "num_dense_layers": 3,
    }
    model = record_from(ModelSpec, DENSE | changes, "m")
    assert (model.moe_share("full_attention"), model.moe_share("sliding_attention")) == (1 / 3, 2 / 3)


MOE = {"num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 4}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_kv_heads": 3},
            r"num_heads=4 is not a multiple of num_kv_heads=3; legal num_kv_heads: \[1, 2, 4\]",
        ),
        ({"num_layers": 3, "layer_types": ["full_attention"] * 2}, "num_layers=3 is not a multiple of the 2"),
        (
            {"layer_types": ["sliding_attention"]},
            "sliding_window=None, but layer_types has sliding_attention",
        ),
        ({"sliding_window": 8}, "sliding_window=8, but layer_types has no sliding_attention"),
        ({"num_experts": 4}, "set together"),
        (
            {"num_experts": 2, "experts_per_token": 3, "moe_intermediate_size": 4},
            "experts_per_token=3 exceeds num_experts=2",
        ),
        ({"intermediate_size": 0}, "not both and not neither"),
        ({"shared_intermediate_size": 4}, "no effect without num_experts"),
        ({"num_dense_layers": 1}, "no effect without num_experts"),
        ({**MOE, "num_dense_layers": 2}, "num_dense_layers=2 leaves no layer of num_layers=2"),
        ({**MOE, "num_dense_layers": 1, "intermediate_size": 0}, "not both and not neither"),
        ({**MOE, "num_dense_layers": 0}, "both only for a MoE model with num_dense_layers"),
        ({"kv_heads_by_kind": {"sliding_attention": 2}}, "which layer_types does not use"),
        ({"hiden_size": 8}, "m: unknown option 'hiden_size'; legal here: .*hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size.*got 'wide'"),
        ({"num_layers": True}, "m: num_layers: got True, which is legal for yes/no"),
        ({"v_head_dim": True}, "m: v_head_dim: got True, which is legal for yes/no"),
        ({"num_heads_by_kind": {"full_attention": 3}}, "m: full_attention: num_heads=3 is not a multiple of num_kv"),
        ({"head_dim_by_kind": {"full_attention": -4}}, "^m: head_dim_by_kind.full_attention: .* 1 .got -4.$"),
        (
            {"layer_types": ["sliding_attention"], "sliding_window": 10**30},
            "sliding_window: .*less than or equal to 21",
        ),
        ({"layer_types": ["chunked_attention"], "attention_chunk_size": 2**32}, "attention_chunk_size: .*equal to 21"),
        ({"num_layers": 10**8}, "num_layers: .*less than or equal to 10000"),
        ({"head_dim": 10**14}, "head_dim: .*less than or equal to 16777216"),
        ({"hidden_size": 10**14}, "hidden_size: .*less than or equal to 16777216"),
        ({"num_heads": 2**40, "num_kv_heads": 3}, "num_heads: .*less than or equal to 65536"),
    ],
)
def test_bad_models_are_explained(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        record_from(ModelSpec, {**DENSE, **change}, "m")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fast_bytes_per_s": 1e-300}, "fast_bytes_per_s: .*greater than or equal to 1 "),
        ({"peak_flops_per_s": 1e308}, "peak_flops_per_s: .*less than or equal to 10{24} "),
        ({"linear_efficiency": 1e-300}, "linear_efficiency: .*greater than or equal to 0.000000001"),
        ({"slow_bytes_per_s": 2e11, "fast_bytes_per_s": 1e11}, r"slow_bytes_per_s=2e\+11 .*at most .*=1e\+11 .*; swap"),
        ({"message_latency_s": 1e300}, "message_latency_s: .*less than or equal to"),
        (
            {"num_nodes": 10**9, "expert_parallel_degree": 7},
            r"must divide the 2000000000 ranks; legal values: \[1, 2, 4",
        ),
    ],
)
def test_clusters_beyond_arithmetic_are_explained(change: dict[str, float], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        record_from(ClusterSpec, {"num_nodes": 2, "ranks_per_node": 2, **change}, "c")


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(SpecError, match="num_nodes") as caught:
        record_from(ClusterSpec, {"num_nodes": 0, "ranks_per_node": -1}, "c")
    assert "ranks_per_node" in str(caught.value)


def test_efficiency_between_entries_is_linear_in_log2() -> None:
    table = EfficiencyTable(lengths=(16, 64), heads=(1, 4), efficiency=((0.1, 0.3), (0.2, 0.8)))
    assert table.at(16, 1) == pytest.approx(0.1)
    assert table.at(64, 4) == pytest.approx(0.8)
    assert table.at(32, 1) == pytest.approx(0.15)  # halfway from 16 to 64
    assert table.at(32, 2) == pytest.approx((0.1 + 0.3 + 0.2 + 0.8) / 4)
    assert table.at(64, np.array([1, 2, 4])) == pytest.approx([0.2, 0.5, 0.8])


def test_efficiency_stays_as_at_the_nearest_entry() -> None:
    table = EfficiencyTable(lengths=(16, 64), heads=(2, 4), efficiency=((0.1, 0.3), (0.2, 0.8)))
    corners = table.at(np.array([[0], [1], [10**9]]), np.array([0.5, 1, 64]))
    assert corners.tolist() == [[0.1, 0.1, 0.3], [0.1, 0.1, 0.3], [0.2, 0.2, 0.8]]
    one = EfficiencyTable(lengths=(16,), efficiency=((0.4,),))
    assert one.at(np.array([1, 16, 999]), 7).tolist() == [0.4, 0.4, 0.4]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"lengths": [16, 16], "efficiency": [[0.1], [0.2]]}, r"lengths=\(16, 16\) must be at least 1 and ascend"),
        ({"lengths": [0, 16], "efficiency": [[0.1], [0.2]]}, r"lengths=\(0, 16\) must be at least 1 and ascend"),
        ({"lengths": [1], "heads": [4, 2], "efficiency": [[0.1, 0.2]]}, r"heads=\(4, 2\) must be"),
        ({"lengths": [1, 2], "efficiency": [[0.1]]}, "1 rows of .* expected 2 rows"),
        (
            {"lengths": [1], "heads": [1, 2], "efficiency": [[0.1]]},
            r"1 rows of \[1\] columns; expected .* of 2 columns",
        ),
        ({"lengths": [1], "efficiency": [[1.5]]}, r"every efficiency lies in \(0, 1\]"),
    ],
)
def test_bad_efficiency_tables_are_explained(table: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        record_from(ClusterSpec, {"num_nodes": 1, "ranks_per_node": 1, "attention_efficiency": table}, "c")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("high", "^c: attention_efficiency.number: .*got 'high'.$"),
        ({"lengthz": [1], "efficiency": [[0.1]]}, "unknown option .*lengthz'; legal here: efficiency, heads, lengths$"),
        (
            {"lengths": [2, 1], "efficiency": [[0.1], [0.2]]},
            r"^c: attention_efficiency.table: lengths=\(2, 1\) [^\n]*$",
        ),
    ],
)
def test_an_efficiency_is_judged_as_what_it_is(value: object, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        record_from(ClusterSpec, {"num_nodes": 1, "ranks_per_node": 1, "attention_efficiency": value}, "c")


def test_kinds_other_than_full_attention_may_have_an_efficiency_of_their_own() -> None:
    shapes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "v_head_dim": 4}
    full, *others = (AttentionSpec(**shapes, **m) for m in ({}, {"window": 3}, {"chunk": 3}, {"linear": True}))
    table = EfficiencyTable(lengths=(16,), heads=(1, 4), efficiency=((0.1, 0.3),))
    cluster = ClusterSpec(num_nodes=1, ranks_per_node=1, attention_efficiency=0.5, window_efficiency=table)
    assert cluster.efficiency(full, 16, 4) == 0.5
    assert [float(cluster.efficiency(spec, 16, 4)) for spec in others] == pytest.approx([0.3] * 3)
    cluster = ClusterSpec(num_nodes=1, ranks_per_node=1, attention_efficiency=0.5)
    assert [cluster.efficiency(spec, 16, 4) for spec in others] == [0.5] * 3


def test_experts_are_shared_by_a_divisor_of_the_ranks() -> None:
    assert ClusterSpec(num_nodes=3, ranks_per_node=4, expert_parallel_degree=6).expert_parallel_degree == 6
    with pytest.raises(SpecError, match=r"=5 must divide the 12 ranks; legal values: \[1, 2, 3, 4, 6, 12\]"):
        record_from(ClusterSpec, {"num_nodes": 3, "ranks_per_node": 4, "expert_parallel_degree": 5}, "c")


def test_nodes_of_ranks() -> None:
    cluster = ClusterSpec(num_nodes=3, ranks_per_node=4)
    assert cluster.num_ranks == 12
    assert cluster.node_of(np.array([0, 3, 4, 11])).tolist() == [0, 0, 1, 2]


# Billions of parameters, all and active per token, as their authors publish them; embeddings of tokens that a step does
# not look up count as active in some of them and not in others.
PUBLISHED = {
    "command-a": (111, 111),
    "gpt-oss-120b": (117, 5.1),
    "llama4-scout": (109, 17),
    "mimo-v2-flash": (309, 15),
    "olmo3-7b": (7.3, 7.3),
    "qwen3-next-80b-a3b": (80, 3),
    "qwen3.5-35b-a3b": (35, 3),
    "trinity-large": (398, 13),
    "trinity-mini": (26, 3),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_number_of_parameters(name: str) -> None:
    model = load_model(name)
    embeddings = model.hidden_size * model.vocab_size * (1 if model.tie_embeddings else 2)
    total, active = embeddings, 0
    for kind in model.kinds:
        dense, moe = dense_weights(model, kind), model.moe_share(kind) * expert_weights(model)
        total += model.num_layers_of(kind) * (dense + moe * model.num_experts)
        active += model.num_layers_of(kind) * (dense + moe * model.experts_per_token)
    published, published_active = PUBLISHED[name]
    assert total / 1e9 == pytest.approx(published, rel=0.02)
    assert 0.9 * active <= published_active * 1e9 <= 1.1 * (active + embeddings)


def test_presets_load() -> None:
    assert preset_names("cluster") == ["a100-8x8", "demo", "h100-8x8", "h200-8x8", "paper"]
    assert set(preset_names("model")) == {"demo", "paper-1f3s", *PUBLISHED}
    for name in preset_names("cluster"):
        assert load_cluster(name).name == name
    for name in preset_names("model"):
        assert load_model(name).name == name


def test_the_h200_is_a_h100_with_more_memory() -> None:
    assert load_cluster("h200-8x8") == load_cluster("h100-8x8").model_copy(
        update={"name": "h200-8x8", "memory_bytes": 141e9}
    )


@pytest.mark.parametrize("name", ["demo", "paper"])
def test_the_slow_link_is_seven_times_slower(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.fast_bytes_per_s / cluster.slow_bytes_per_s == pytest.approx(7.0, rel=1e-6)


def test_the_demo_is_one_full_layer_per_three_sliding() -> None:
    model = load_model("demo")
    assert model.all_layer_types == ("full_attention", *["sliding_attention"] * 3)
    assert load_cluster("demo").num_ranks == 16


def test_files_and_their_faults(tmp_path: object) -> None:
    path = tmp_path / "cluster.yaml"  # type: ignore[operator]
    path.write_text("num_nodes: 2\nranks_per_node: 3\n")
    assert load_cluster(path).num_ranks == 6
    path.write_text("num_nodes: [2\n")
    with pytest.raises(SpecError, match="not valid YAML"):
        load_cluster(path)
    path.write_text("7\n")
    with pytest.raises(SpecError, match="expected a mapping of settings, got int"):
        load_cluster(path)
    with pytest.raises(SpecError, match="no such file; presets are a100-8x8, demo"):
        load_cluster("nonesuch")
    with pytest.raises(SpecError, match="no such file; presets are a100-8x8, demo"):
        load_cluster("x" * 5000)


def test_a_file_may_start_from_a_base(tmp_path: Path) -> None:
    four, slow = tmp_path / "four.yaml", tmp_path / "slow.yaml"
    four.write_text("base: demo\nname: four\nnum_nodes: 4\n")
    slow.write_text(f"base: {four}\nslow_bytes_per_s: 1.0e6\n")
    changes = {"name": "four", "num_nodes": 4, "slow_bytes_per_s": 1e6}
    assert load_cluster(slow) == load_cluster("demo").model_copy(update=changes)
    four.write_text(f"base: {slow}\n")
    with pytest.raises(SpecError, match=r"slow\.yaml is its own base"):
        load_cluster(slow)
    four.write_text("base: 3\n")
    with pytest.raises(SpecError, match=r"cluster '3': no such file; presets are a100-8x8, demo"):
        load_cluster(four)
