"""Masks, settings and presets."""

import numpy as np
import pytest

from layerwise.errors import SpecError
from layerwise.spec import (
    AttentionSpec,
    ClusterSpec,
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
        ({"kv_heads_by_kind": {"sliding_attention": 2}}, "which layer_types does not use"),
        ({"hiden_size": 8}, "m: unknown option 'hiden_size'; legal here: .*hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size.*got 'wide'"),
    ],
)
def test_bad_models_are_explained(change: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        record_from(ModelSpec, {**DENSE, **change}, "m")


def test_every_fault_is_named_at_once() -> None:
    with pytest.raises(SpecError, match="num_nodes") as caught:
        record_from(ClusterSpec, {"num_nodes": 0, "ranks_per_node": -1}, "c")
    assert "ranks_per_node" in str(caught.value)


def test_nodes_of_ranks() -> None:
    cluster = ClusterSpec(num_nodes=3, ranks_per_node=4)
    assert cluster.num_ranks == 12
    assert cluster.node_of(np.array([0, 3, 4, 11])).tolist() == [0, 0, 1, 2]


def test_presets_load() -> None:
    assert preset_names("cluster") == ["demo", "h100-8x8", "paper"]
    assert preset_names("model") == ["demo", "gpt-oss-120b", "llama4-scout", "olmo3-7b", "paper-1f3s"]
    for name in preset_names("cluster"):
        assert load_cluster(name).name == name
    for name in preset_names("model"):
        assert load_model(name).name == name


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
    with pytest.raises(SpecError, match="no such file; presets are demo"):
        load_cluster("nonesuch")
