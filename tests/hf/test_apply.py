"""What `apply` promises beyond equality: refusals, recompute, router losses, and models left as they were."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

import transformers
from transformers import DynamicCache

import layerwise.hf as lwhf
from layerwise import ModelSpec, PlannedLoader, solo_world
from layerwise.errors import DataError, SpecError, UnsupportedError
from layerwise.hf.attention import attention_function
from layerwise.hf.calls import PASS, ForwardPass
from layerwise.hf.families import AUX_LOSS_FAMILIES
from tests.hf.harness import (
    STRATEGIES,
    Samples,
    applied,
    assert_equal,
    make_samples,
    on_ranks,
    one_at_a_time,
    planner_for,
)
from tests.hf.models import BASE, TINY, tiny_model

LENGTHS = (37, 12, 1, 23)


def one_rank_batch(model: Any, samples: Samples) -> lwhf.Batch:
    planner = planner_for("dynamic", 1, model.config, [len(s["input_ids"]) for s in samples])
    steps = PlannedLoader(dataset=samples, planner=planner, world=solo_world(), steps=[range(len(samples))])
    (batch,) = lwhf.batches(steps)
    return batch


@pytest.mark.parametrize("strategy", ["repack+parents", "redistribute"])
@pytest.mark.parametrize("name", sorted(AUX_LOSS_FAMILIES))
@pytest.mark.parametrize("lengths", [LENGTHS, (3,)], ids=["mixed", "three tokens"])
def test_router_loss_equals_one_process(name: str, lengths: tuple[int, ...], strategy: str) -> None:
    model = copy.deepcopy(tiny_model(name))
    model.config.output_router_logits, model.config.router_aux_loss_coef = True, 0.5
    samples = make_samples(lengths)
    ours, _ = on_ranks(applied(model), samples, planner_for(strategy, 4, model.config, lengths), 4)
    expected = one_at_a_time(model, samples, aux_coef=0.5)
    # transformers pools router probabilities in float32.
    assert_equal(model, ours, expected, 1e-6)
    assert abs(one_at_a_time(model, samples).loss - expected.loss) > 0.1


@pytest.mark.parametrize("strategy", ["repack+parents", "redistribute"])
@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", "llama", "qwen3", "qwen3_5_text"])
def test_bfloat16_autocast_stays_near_the_untouched_models(name: str, strategy: str) -> None:
    """Norms and angles of Q and K are float32 there, and values are not. bfloat16 has 3 digits: 5% of a gradient."""
    model, samples = tiny_model(name, torch.float32), make_samples(LENGTHS)
    planner = planner_for(strategy, 4, model.config, LENGTHS)
    ours, _ = on_ranks(applied(model), samples, planner, 4, autocast=torch.bfloat16)
    assert_equal(model, ours, one_at_a_time(model, samples, autocast=torch.bfloat16), 0.05)
    exact = one_at_a_time(model, samples)
    assert 0 < abs(ours.loss - exact.loss) / exact.loss < 1e-3


def test_packing_with_position_ids_alone_leaks_where_ours_does_not() -> None:
    """gpt-oss does not hand position_ids to its mask, so its packed forward mixes samples."""
    model, samples = tiny_model("gpt_oss"), make_samples((12, 9))
    ids = torch.cat([torch.from_numpy(s["input_ids"]) for s in samples])[None]
    positions = torch.cat([torch.arange(12), torch.arange(9)])[None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0, 12:]
    alone = one_at_a_time(model, samples).logits[1]
    ours, _ = on_ranks(applied(model), samples, planner_for("dynamic", 1, model.config, (12, 9)), 1)
    assert (packed - alone).abs().max() > 0.01
    assert (ours.logits[1] - alone).abs().max() < 1e-9


def test_two_models_of_different_heads_share_a_process() -> None:
    """Each layer's heads are read from its own call."""
    samples = make_samples(LENGTHS)
    models = [tiny_model("llama"), tiny_model("mimo_v2_flash")]
    with_routes = [applied(model) for model in models]
    for model, ours in (*zip(models, with_routes, strict=True), (models[0], with_routes[0])):
        result, _ = on_ranks(ours, samples, planner_for("dynamic", 2, model.config, LENGTHS), 2)
        assert_equal(model, result, one_at_a_time(model, samples), 1e-9)


def test_the_checkpoint_is_a_plain_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = tiny_model("gpt_oss")
    applied(model).save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    assert loaded.config._attn_implementation == "eager"
    assert {k: v.tolist() for k, v in loaded.state_dict().items()} == {
        k: v.tolist() for k, v in model.state_dict().items()
    }


def test_another_attention_can_be_chosen_again() -> None:
    model = applied(tiny_model("llama"))
    model.set_attn_implementation("eager")
    ids = torch.arange(5)[None]
    assert torch.equal(model(input_ids=ids).logits, tiny_model("llama")(input_ids=ids).logits)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_mask": torch.ones(1, 5)}, "attention_mask is refused"),
        ({"attention_mask": torch.tensor([[1, 1, 1, 0, 0]])}, "attention_mask is refused.*nothing is padded"),
        ({"attention_mask": torch.zeros(1, 1, 5, 5)}, "attention_mask is refused"),
        ({"labels": torch.zeros(1, 5, dtype=torch.int64)}, r"use layerwise\.hf\.loss"),
        ({"use_cache": True}, "use_cache is refused"),
        ({"past_key_values": DynamicCache()}, "past_key_values is refused"),
        ({"cache": DynamicCache()}, "cache is refused"),
        ({"logits_to_keep": 1}, "logits_to_keep is refused"),
        ({"logits_to_keep": torch.tensor([4])}, "logits_to_keep is refused"),
        ({"num_logits_to_keep": 1}, "num_logits_to_keep.* would have to ignore"),
        ({"output_attentions": True}, "output_attentions is refused"),
        ({"position_ids": torch.arange(5)[None] + 1}, "position_ids are not the plan's"),
        ({"input_ids": torch.zeros(1, 4, dtype=torch.int64)}, r"shape \(1, 4\), expected .* \(1, 5\)"),
        ({"input_ids": torch.zeros(5, 1, dtype=torch.int64)}, r"shape \(5, 1\), expected"),
        ({"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q.* would have to ignore"),
        ({"sliding_window": 3}, "sliding_window.* would have to ignore"),
    ],
)
def test_inputs_that_would_be_wrong_raise(changes: dict[str, Any], message: str) -> None:
    model = applied(tiny_model("llama"))
    batch = one_rank_batch(model, make_samples((5,)))
    with batch.routes(), pytest.raises((UnsupportedError, SpecError), match=message):
        model(**{"input_ids": batch.input_ids} | changes)


def test_a_forward_without_routes_raises() -> None:
    with pytest.raises(SpecError, match=r"LlamaForCausalLM was called without routes.*`with batch\.routes\(\):`"):
        applied(tiny_model("llama"))(input_ids=torch.arange(5)[None])


@pytest.mark.parametrize("other", ["sdpa", "eager"])
def test_another_attention_within_routes_raises(other: str) -> None:
    model = applied(tiny_model("llama"))
    batch = one_rank_batch(model, make_samples((5,)))
    model.set_attn_implementation(other)
    with batch.routes(), pytest.raises(SpecError, match=f"attention is '{other}', which would mix up samples"):
        model(input_ids=batch.input_ids, position_ids=batch.position_ids)
    assert model(input_ids=batch.input_ids).logits.shape[1] == 5


@pytest.mark.parametrize("strategy", ["dynamic", "redistribute"])
@pytest.mark.parametrize("kinds", ["fss", "sf", "sfsfs"], ids=["other order", "fewer layers", "more layers"])
def test_a_plan_made_for_other_layers_raises(kinds: str, strategy: str) -> None:
    model = applied(tiny_model("olmo3"))
    names = {"f": "full_attention", "s": "sliding_attention"}
    config = copy.deepcopy(model.config)
    config.layer_types, config.num_hidden_layers = [names[kind] for kind in kinds], len(kinds)
    planner = planner_for(strategy, 1, config, (5,))
    (batch,) = lwhf.batches(PlannedLoader(dataset=make_samples((5,)), planner=planner, world=solo_world(), steps=[[0]]))
    assert config.layer_types != model.config.layer_types
    planned, own = (str(tuple(c.layer_types)) for c in (config, model.config))
    with batch.routes(), pytest.raises(SpecError) as raised:
        lwhf.loss(model, batch)
    assert "the plan was made for the layers" in str(raised.value)
    assert planned in str(raised.value)
    assert own in str(raised.value)


@pytest.mark.parametrize(
    ("field", "values", "message"),
    [
        ("attention_mask", [1, 1, 1, 0, 0], "is 0 at position 3, expected all ones.*remove the padding"),
        ("attention_mask", [True, True, True, True, False], "is False at position 4.*remove the padding"),
        ("attention_mask", [1, 1, 1], r"has shape \(3,\), expected .* of shape \(5,\).*remove the padding"),
        ("attention_mask", [[1], [1, 1]], "is not a list of numbers"),
        ("position_ids", [0, 1, 2, 0, 1], "is 0 at position 3, expected 0, 1, .*each document as a sample of its own"),
        ("position_ids", torch.arange(5) + 1, "is 1 at position 0.*each document as a sample of its own"),
    ],
)
def test_padded_and_packed_samples_raise(field: str, values: Any, message: str) -> None:
    first, second = make_samples((12, 5))
    with pytest.raises(DataError, match=f"sample 1: {field} {message}"):
        one_rank_batch(tiny_model("llama"), [first, second | {field: values}])


def test_samples_that_say_they_are_whole_are_taken() -> None:
    (sample,) = make_samples((5,))
    for mask in (torch.ones(5), np.ones(5, bool), [1] * 5):
        whole = sample | {"attention_mask": mask, "position_ids": list(range(5))}
        assert one_rank_batch(tiny_model("llama"), [whole]).input_ids.tolist() == [sample["input_ids"].tolist()]


def test_a_batch_that_has_no_plan_raises() -> None:
    model = applied(tiny_model("llama"))
    with pytest.raises(SpecError, match=r"a Batch of layerwise\.hf\.batches\(loader\).* got dict"):
        lwhf.loss(model, {"input_ids": torch.arange(5)[None]})  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"takes a PlannedLoader.* got an item dict"):
        next(lwhf.batches([{"input_ids": [1]}]))  # type: ignore[list-item]


def test_the_routes_of_another_microbatch_raise() -> None:
    """Also where its tokens have the same positions."""
    model = applied(tiny_model("llama"))
    batch, other = (one_rank_batch(model, make_samples((5,), seed)) for seed in (0, 1))
    with other.routes(), pytest.raises(SpecError, match="routes of another micro-batch"):
        lwhf.loss(model, batch)


@pytest.mark.parametrize("name", ["AutoModel", "AutoModelForSequenceClassification"])
def test_a_model_without_a_language_model_head_is_refused(name: str) -> None:
    model = getattr(transformers, name).from_config(copy.deepcopy(tiny_model("llama").config))
    with pytest.raises(
        UnsupportedError, match=r"Llama\w+ is refused: .* no language-model head.* AutoModelForCausalLM"
    ):
        lwhf.apply(model)
    assert model.config._attn_implementation == "eager"


def test_an_output_without_logits_raises() -> None:
    model = applied(tiny_model("llama"))
    model.register_forward_hook(lambda module, inputs, output: output.logits)
    batch = one_rank_batch(model, make_samples((5,)))
    with batch.routes(), pytest.raises(SpecError, match=r"logits of shape None.* a hook or wrapper"):
        lwhf.loss(model, batch)


def test_generating_says_what_to_call_first_and_then_works() -> None:
    model = applied(tiny_model("llama", torch.float32))
    with pytest.raises(SpecError, match=r'without routes.*set_attn_implementation\("sdpa"\) first'):
        model.generate(torch.arange(4)[None], max_new_tokens=2)
    model.set_attn_implementation("sdpa")
    ids = model.generate(torch.arange(4)[None], max_new_tokens=2, do_sample=False)
    untouched = copy.deepcopy(tiny_model("llama", torch.float32))
    assert torch.equal(ids, untouched.generate(torch.arange(4)[None], max_new_tokens=2, do_sample=False))


@pytest.mark.parametrize("changes", [{"softcap": 30.0}, {"dropout": 0.1}, {"attention_mask": torch.zeros(1)}])
def test_unknown_arguments_of_an_attention_call_raise(changes: dict[str, Any]) -> None:
    model = applied(tiny_model("llama"))
    arguments: dict[str, Any] = {"attention_mask": None} | changes
    q = torch.zeros(1, 4, 5, 8)
    with one_rank_batch(model, make_samples((5,))).routes() as routes:
        arguments[PASS] = ForwardPass(routes)
    with pytest.raises(UnsupportedError, match=next(iter(changes))):
        attention_function(model.model.layers[0].self_attn, q, q[:, :2], q[:, :2], **arguments)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("gemma2", {}, "soft-capped"),
        ("jamba", {}, "state-space layers"),
        ("bamba", TINY["bamba"] | {"z_loss_coefficient": 0.1}, "set it to 0"),
        ("mistral", {}, "has not been compared"),
        ("llama", {"attention_dropout": 0.1}, "set it to 0"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "'dynamic' is refused",
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, "causal attention"),
    ],
)
def test_families_and_options_that_would_be_wrong_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **BASE | changes)
    with pytest.raises(UnsupportedError, match=message):
        lwhf.model_spec(config)


def test_model_spec_takes_a_config() -> None:
    for given in (tiny_model("llama"), "llama", {"model_type": "llama"}):
        with pytest.raises(SpecError, match=r"takes a config, got \w+; pass model\.config"):
            lwhf.model_spec(given)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")  # peft calls renamed methods of transformers
@pytest.mark.parametrize(
    ("strategy", "lengths"),
    [*((strategy, LENGTHS) for strategy in STRATEGIES), ("dynamic", (3,))],
    ids=[*STRATEGIES, "three tokens"],
)
@pytest.mark.parametrize("wrapped_first", [True, False], ids=["peft first", "apply first"])
def test_lora(strategy: str, lengths: tuple[int, ...], wrapped_first: bool) -> None:
    """Frozen weights, and adapters that start away from zero."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(copy.deepcopy(tiny_model("olmo3")), lora).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
    if wrapped_first:
        ours = copy.deepcopy(model)
        lwhf.apply(ours.get_base_model())
    else:
        ours = peft.get_peft_model(applied(tiny_model("olmo3")), lora).double()
        ours.load_state_dict(model.state_dict())
    samples = make_samples(lengths)
    result, _ = on_ranks(ours, samples, planner_for(strategy, 4, model.config, lengths), 4)
    assert_equal(model, result, one_at_a_time(model, samples), 1e-9)


def test_only_a_bare_model_is_taken() -> None:
    with pytest.raises(UnsupportedError, match="before wrapping or compiling"):
        lwhf.apply(torch.nn.Sequential(tiny_model("llama")))


def test_a_model_of_more_than_text_is_refused() -> None:
    text = BASE | TINY["gemma3_text"]
    vision = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision)
    with pytest.raises(UnsupportedError, match=r"\(gemma3\) is refused.*only its language model \(gemma3_text\)"):
        lwhf.apply(transformers.Gemma3ForConditionalGeneration(config))


def test_the_loss_of_a_model_in_an_unknown_wrapper_raises() -> None:
    model = applied(tiny_model("llama"))
    batch = one_rank_batch(model, make_samples((5,)))
    with batch.routes(), pytest.raises(SpecError, match=r"alone or wrapped by PEFT.* got Sequential"):
        lwhf.loss(torch.nn.Sequential(model), batch)


def test_router_loss_of_families_that_have_none_is_refused() -> None:
    model = applied(tiny_model("afmoe"))
    model.config.output_router_logits = True
    batch = one_rank_batch(model, make_samples((5,)))
    with batch.routes(), pytest.raises(UnsupportedError, match="no router loss"):
        lwhf.loss(model, batch)


def test_model_spec_of_published_configs() -> None:
    """Against the models' cards: heads, windows and experts of the default configs."""
    from transformers import AutoConfig

    specs = {name: lwhf.model_spec(AutoConfig.for_model(name)) for name in ("gpt_oss", "llama4_text", "mimo_v2_flash")}
    got = {name: _numbers(spec) for name, spec in specs.items()}
    assert got["gpt_oss"] == (36, 64, 8, 64, 128, None, 128, 4)
    assert got["llama4_text"] == (48, 40, 8, 128, None, 8192, 16, 1)
    mimo = specs["mimo_v2_flash"]
    full, sliding = mimo.attention("full_attention"), mimo.attention("sliding_attention")
    assert (full.num_kv_heads, sliding.num_kv_heads, full.head_dim, full.v_head_dim) == (4, 8, 192, 128)
    assert (mimo.num_experts, mimo.experts_per_token, mimo.num_dense_layers) == (256, 8, 1)


def _numbers(spec: ModelSpec) -> tuple[int | None, ...]:
    return (
        spec.num_layers,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        spec.sliding_window,
        spec.attention_chunk_size,
        spec.num_experts,
        spec.experts_per_token,
    )
