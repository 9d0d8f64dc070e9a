"""Linear layers: mixers run on whole samples, one by one, wherever the plan says, and everything else stays put."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import layerwise.hf as lwhf
from layerwise.cost import predict
from layerwise.errors import UnsupportedError
from layerwise.hf.families import MIXERS
from layerwise.spec import LINEAR, ClusterSpec
from tests.hf.harness import (
    applied,
    assert_equal,
    make_samples,
    on_ranks,
    one_at_a_time,
    planner_for,
    sent_by_ranks,
)
from tests.hf.models import BASE, TINY, tiny_model

LENGTHS = (37, 12, 1, 23)
RANKS = 4


@pytest.mark.parametrize("strategy", ["static", "dynamic", "repack+parents", "joint"])
def test_plans_keep_samples_whole_that_are_split_elsewhere(strategy: str) -> None:
    """The cases of test_families would prove little otherwise."""
    (microbatch,) = planner_for(strategy, RANKS, tiny_model("qwen3_next").config, LENGTHS)(LENGTHS).microbatches
    assert [(t.sample, t.q0, t.q1, t.h0, t.h1) for t in microbatch.tiles[LINEAR]] == [
        (sample, 0, length, 0, 1) for sample, length in enumerate(LENGTHS)
    ]
    assert (np.bincount(microbatch.shards.column("sample")) > 1).any()


@pytest.mark.parametrize("strategy", ["static", "joint"])
def test_every_rank_sends_what_is_predicted(strategy: str) -> None:
    model = applied(tiny_model("bamba", torch.float32))
    plan = planner_for(strategy, RANKS, model.config, LENGTHS)(LENGTHS)
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=RANKS // 2)
    expected = predict(plan, cluster, lwhf.model_spec(model.config), element_bytes=4).kinds[LINEAR]
    counted = sent_by_ranks(model, plan, LINEAR)
    assert [c.calls for c in counted] == expected.calls.tolist()
    assert [c.fast_bytes for c in counted] == expected.rank_fast_bytes.tolist()
    assert [c.slow_bytes for c in counted] == expected.rank_slow_bytes.tolist()
    assert expected.rank_fast_bytes.sum() > 0


@pytest.mark.parametrize("name", ["qwen3_next", "bamba", "lfm2"])
@pytest.mark.parametrize("lengths", [(3,), (40, 2)], ids=["three tokens", "one sample a rank"])
def test_ranks_without_samples_get_zero_gradients_and_not_none(name: str, lengths: tuple[int, ...]) -> None:
    model = tiny_model(name)
    planner = planner_for("static", RANKS, model.config, lengths)
    tiles = planner(lengths).microbatches[0].tiles[LINEAR]
    assert len(set(tiles.column("rank").tolist())) < RANKS
    ours, _ = on_ranks(applied(model), make_samples(lengths), planner, RANKS)
    assert_equal(model, ours, one_at_a_time(model, make_samples(lengths)), 1e-9)


def test_another_attention_can_be_chosen_again() -> None:
    """Also after `apply` twice, and a copy runs its own weights."""
    model = applied(tiny_model("qwen3_next"))
    lwhf.apply(model)
    twin = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.data.zero_()
    twin.set_attn_implementation("eager")
    ids = torch.arange(5)[None]
    assert torch.equal(twin(input_ids=ids).logits, tiny_model("qwen3_next")(input_ids=ids).logits)


def test_a_renamed_mixer_is_an_error() -> None:
    model = copy.deepcopy(tiny_model("bamba"))
    layer = model.model.layers[0]
    layer.ssm = layer.mamba
    del layer.mamba
    with pytest.raises(UnsupportedError, match="no module 'mamba' in this version of transformers"):
        lwhf.apply(model)


@pytest.mark.parametrize("name", sorted(MIXERS))
def test_mixer_sizes_are_those_of_the_modules(name: str) -> None:
    """Weights and convolutions are counted; biases and vectors of a few per head are not."""
    model = tiny_model(name)
    kinds = lwhf.model_spec(model.config).all_layer_types
    mixer = getattr(model.model.layers[kinds.index(LINEAR)], MIXERS[name])
    spec = lwhf.model_spec(model.config).attention(LINEAR)
    assert spec.mixer is not None
    assert spec.mixer.num_weights == sum(p.numel() for p in mixer.parameters() if p.dim() > 1)


def test_model_spec_of_a_published_config() -> None:
    """Qwen3-Next-80B-A3B by its card: 80B parameters, of which attention, mixers, experts and tables count here."""
    from transformers import AutoConfig

    from layerwise.cost import dense_weights, expert_weights

    spec = lwhf.model_spec(AutoConfig.for_model("qwen3_next"))
    per_layer = [dense_weights(spec, kind) + 512 * expert_weights(spec) for kind in spec.all_layer_types]
    assert sum(per_layer) + 2 * spec.vocab_size * spec.hidden_size == pytest.approx(80e9, rel=0.02)
    assert (spec.num_layers_of(LINEAR), spec.shared_intermediate_size, spec.output_gate) == (36, 512, True)


def test_a_model_without_attention_is_refused() -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model("bamba", **BASE | TINY["bamba"] | {"attn_layer_indices": []})
    with pytest.raises(UnsupportedError, match="no attention layer"):
        lwhf.model_spec(config)
