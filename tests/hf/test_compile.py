"""torch.compile: of a model after `apply` it computes the same; before `apply` it is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import layerwise.hf as lwhf
from layerwise import PlannedLoader, solo_world
from layerwise.errors import UnsupportedError
from tests.hf.harness import applied, make_samples, one_at_a_time, planner_for, trained
from tests.hf.models import tiny_model

LENGTHS = (12, 5, 9)


@pytest.mark.filterwarnings("ignore")  # of dynamo, about code of transformers
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_compiled_model_trains_as_the_untouched_one(name: str) -> None:
    """Attention and mixers stay outside of the compiled graphs; two micro-batches run, of unlike lengths."""
    model, samples = tiny_model(name, torch.float32), make_samples(LENGTHS)
    ours: Any = applied(model)
    compiled = torch.compile(ours, backend="aot_eager")
    planner = planner_for("dynamic", 1, model.config, LENGTHS, microbatches=2)
    assert len(planner(LENGTHS).microbatches) == 2
    steps = PlannedLoader(dataset=samples, planner=planner, world=solo_world(), steps=[range(len(LENGTHS))])
    for batch in lwhf.batches(steps):
        with batch.routes():
            lwhf.loss(compiled, batch).backward()
    expected = one_at_a_time(model, samples)
    for parameter, gradient in zip(trained(ours), expected.grads, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("in_place", [True, False])
def test_a_model_that_is_compiled_already_is_refused(in_place: bool) -> None:
    model: Any = copy.deepcopy(tiny_model("llama"))
    if in_place:
        model.compile(backend="eager")
    else:
        model = torch.compile(model, backend="eager")
    with pytest.raises(UnsupportedError, match="before wrapping or compiling the model"):
        lwhf.apply(model)
