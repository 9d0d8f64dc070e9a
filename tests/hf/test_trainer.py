"""PlannedTrainer on one rank: its weights are those of one sample at a time, with evaluation and checkpoints."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import layerwise.hf as lwhf
from layerwise import PlannedLoader, Planner, solo_world
from layerwise.errors import DataError, SpecError, UnsupportedError
from layerwise.plan import StepPlan
from layerwise.spec import ClusterSpec
from tests.hf.harness import MASKED, applied, make_samples, one_at_a_time, trained
from tests.hf.models import InFloat64, tiny_model

SAMPLES = make_samples((21, 9, 1, 14, 6, 30, 5, 12))
STEPS = [[0, 1, 2], [3], [4, 5, 6], [7, 1]]
LEARNING_RATE = 0.5


def make_loader(model: Any, planned: list[StepPlan] | None = None) -> PlannedLoader:
    """At most 32 tokens in a micro-batch, so that steps have one or two."""
    cluster = ClusterSpec(num_nodes=1, ranks_per_node=1)
    planner = Planner(strategy="dynamic", cluster=cluster, model=lwhf.model_spec(model.config), max_tokens_per_rank=32)

    def plan(lengths: Any) -> StepPlan:
        made = planner(lengths)
        if planned is not None:
            planned.append(made)
        return made

    return PlannedLoader(dataset=SAMPLES, planner=plan, world=solo_world(), steps=STEPS)


def make_trainer(model: Any, out: Path, loader: Any = None, **changes: Any) -> Any:
    from transformers import TrainingArguments

    ours = ("eval_dataset", "compute_metrics", "data_collator")
    made: dict[str, Any] = {name: changes.pop(name) for name in ours if name in changes}
    settings: dict[str, Any] = {
        "num_train_epochs": 1,
        "optim": "sgd",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
    }
    args = TrainingArguments(output_dir=str(out), **settings | changes)
    return lwhf.PlannedTrainer(model=model, args=args, train_dataset=loader or make_loader(model), **made)


def expected_steps(model: Any, steps: list[list[int]]) -> tuple[Any, list[float]]:
    """Plain SGD on the untouched model, one sample at a time: the model after the steps, and their losses."""
    model, losses = copy.deepcopy(model), []
    for ids in steps:
        result = one_at_a_time(model, [SAMPLES[i] for i in ids])
        losses.append(float(result.loss))
        with torch.no_grad():
            for parameter, gradient in zip(trained(model), result.grads, strict=True):
                parameter -= LEARNING_RATE * gradient
    return model, losses


def assert_same_weights(model: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
        )


def test_weights_and_losses_are_those_of_one_sample_at_a_time(tmp_path: Path) -> None:
    planned: list[StepPlan] = []
    model = applied(tiny_model("llama"))
    trainer = make_trainer(model, tmp_path, make_loader(model, planned))
    with InFloat64():
        trainer.train()
    expected, losses = expected_steps(tiny_model("llama"), STEPS)
    assert [len(plan.microbatches) for plan in planned] == [1, 1, 2, 1]
    assert_same_weights(model, expected)
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert logged == pytest.approx(losses, rel=1e-5)  # Trainer adds losses up in float32


def test_evaluation_is_the_mean_over_all_labels(tmp_path: Path) -> None:
    """And not over steps, which have unlike numbers of labels."""
    model = applied(tiny_model("llama"))
    metrics = make_trainer(model, tmp_path, eval_dataset=make_loader(model)).evaluate()
    visited = [SAMPLES[i] for ids in STEPS for i in ids]
    expected = float(one_at_a_time(tiny_model("llama"), visited).loss)
    assert metrics["eval_loss"] == pytest.approx(expected, rel=1e-5)
    of_steps = [float(one_at_a_time(tiny_model("llama"), [SAMPLES[i] for i in ids]).loss) for ids in STEPS]
    assert abs(np.mean(of_steps) - expected) > 1e-3 * expected


def test_an_evaluation_without_labels_has_no_loss(tmp_path: Path) -> None:
    """Zero would be the best loss of all."""
    model = applied(tiny_model("llama"))
    masked = [sample | {"labels": np.full_like(sample["labels"], MASKED)} for sample in SAMPLES]
    trainer = make_trainer(model, tmp_path)
    with pytest.raises(DataError, match="no label in 4 steps"):
        trainer.evaluate(replace(make_loader(model), dataset=masked))
    with pytest.raises(DataError, match="no label in 0 steps"):
        trainer.evaluate(replace(make_loader(model), steps=[]))
    with pytest.raises(SpecError, match="an evaluation needs a loader with a known end"):
        trainer.evaluate(replace(make_loader(model), steps=iter(STEPS)))


def test_speeds_are_of_steps(tmp_path: Path) -> None:
    """And not of the batch size of TrainingArguments, which nothing here goes by."""
    trainer = make_trainer(applied(tiny_model("llama")), tmp_path)
    metrics = trainer.train().metrics
    assert metrics["train_samples_per_second"] == pytest.approx(metrics["train_steps_per_second"], rel=0.01)


def test_a_resumed_run_ends_with_the_same_weights_and_plans_no_trained_step(tmp_path: Path) -> None:
    """Of a model whose experts have other names in a checkpoint."""
    model = applied(tiny_model("qwen3_next"))
    whole = copy.deepcopy(model)
    make_trainer(whole, tmp_path / "whole", optim="adamw_torch", learning_rate=1e-2).train()
    saving = make_trainer(
        copy.deepcopy(model),
        tmp_path,
        optim="adamw_torch",
        learning_rate=1e-2,
        max_steps=2,
        save_strategy="steps",
        save_steps=2,
    )
    saving.train()
    planned: list[StepPlan] = []
    resumed = make_trainer(
        model, tmp_path, make_loader(model, planned), optim="adamw_torch", learning_rate=1e-2, max_steps=4
    )
    resumed.train(resume_from_checkpoint=True)
    assert [plan.lengths for plan in planned] == [tuple(len(SAMPLES[i]["input_ids"]) for i in ids) for ids in STEPS[2:]]
    assert_same_weights(model, whole)


def test_the_checkpoint_is_a_plain_one(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = applied(tiny_model("qwen3_next"))
    trainer = make_trainer(model, tmp_path)
    trainer.save_model()
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    assert_same_weights(loaded, model, 0.0)
    ids = torch.from_numpy(SAMPLES[0]["input_ids"])[None]
    expected = one_at_a_time(tiny_model("qwen3_next"), SAMPLES[:1]).logits[0]
    torch.testing.assert_close(loaded(input_ids=ids).logits[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2 is refused"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor=0.1 is refused"),
        ({"dataloader_num_workers": 1}, "dataloader_num_workers=1 is refused"),
        ({"compute_metrics": lambda prediction: {}}, "compute_metrics is refused"),
        ({"data_collator": lambda items: items[0]}, "data_collator is refused"),
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha=5.0 is refused.*leave it at None"),
        ({"torch_compile": True}, "torch_compile=True is refused"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True is refused"),
        ({"per_device_train_batch_size": 2}, "per_device_train_batch_size=2 is refused.*no effect"),
        ({"per_device_eval_batch_size": 2}, "per_device_eval_batch_size=2 is refused.*no effect"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy=group_by_length is refused"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        make_trainer(applied(tiny_model("llama")), tmp_path, **changes)


def test_several_devices_in_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.TrainingArguments.n_gpu", 2)
    with pytest.raises(UnsupportedError, match="n_gpu=2 is refused"):
        make_trainer(applied(tiny_model("llama")), tmp_path)


def test_what_cannot_be_trained_on_is_refused(tmp_path: Path) -> None:
    model = applied(tiny_model("llama"))
    with pytest.raises(SpecError, match="a PlannedLoader, got list"):
        make_trainer(model, tmp_path, SAMPLES).train()
    endless = replace(make_loader(model), steps=iter(STEPS))
    with pytest.raises(SpecError, match="max_steps must be set"):
        make_trainer(model, tmp_path, endless).train()
    with pytest.raises(UnsupportedError, match="predict"):
        make_trainer(model, tmp_path).predict(make_loader(model))
    with pytest.raises(SpecError, match=r"call layerwise\.hf\.apply"):
        make_trainer(copy.deepcopy(tiny_model("llama")), tmp_path).train()


def test_experts_that_would_stay_as_they_are_raise(tmp_path: Path) -> None:
    """Trainer loads the best model by the names in the checkpoint, and only warns of those that it does not know."""
    model = applied(tiny_model("qwen3_next"))
    settings = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(
        model, tmp_path, max_steps=2, eval_dataset=make_loader(model), load_best_model_at_end=True, **settings
    )
    with pytest.raises(UnsupportedError, match=r"experts.*would leave these weights as they are"):
        trainer.train()
