"""Versions of transformers in which something has another name: each is an error, and never a wrong gradient."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import layerwise.hf as lwhf
from layerwise.errors import UnsupportedError
from layerwise.hf.families import LOWEST_MINOR, MAJOR
from tests.hf.harness import applied, make_samples, on_ranks, planner_for
from tests.hf.models import tiny_model

LENGTHS = (12, 5)
ROOT = Path(__file__).parents[2]


def train(model: Any) -> None:
    on_ranks(model, make_samples(LENGTHS), planner_for("dynamic", 2, model.config, LENGTHS), 2)


@pytest.mark.parametrize("version", ["4.57.6", f"5.{LOWEST_MINOR - 1}.9", "6.0.0"])
def test_another_version_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    tiny_model("llama")  # whose modules load before
    monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(UnsupportedError, match=rf"{re.escape(version)} is refused.*{MAJOR}\.{LOWEST_MINOR} or later"):
        lwhf.model_spec(tiny_model("llama").config)
    with pytest.raises(UnsupportedError, match=rf"{re.escape(version)} is refused"):
        applied(tiny_model("llama"))


def test_the_range_is_the_one_that_is_installed_and_documented() -> None:
    assert f"transformers>={MAJOR}.{LOWEST_MINOR},<{MAJOR + 1}" in (ROOT / "pyproject.toml").read_text()
    assert f"transformers {MAJOR}.{LOWEST_MINOR} to" in (ROOT / "docs" / "huggingface.md").read_text()


def test_renamed_decoder_layers() -> None:
    model = copy.deepcopy(tiny_model("olmo3"))
    model.model.blocks = model.model.layers
    del model.model.layers
    with pytest.raises(UnsupportedError, match="found 0 decoder layers, the config has 3"):
        lwhf.apply(model)


def test_a_layer_kind_that_nobody_knows() -> None:
    model = copy.deepcopy(tiny_model("olmo3"))
    model.config.layer_types[1] = "lattice_attention"
    with pytest.raises(UnsupportedError, match=r"layer kinds \['lattice_attention'\] are refused; legal"):
        lwhf.apply(model)


def test_attention_that_is_not_looked_up_by_name() -> None:
    """Its samples would be mixed up, and the loss curve would show nothing."""
    model = applied(tiny_model("olmo3"))
    model.model.layers[1].self_attn.forward = lambda hidden_states, **others: (hidden_states, None)
    with pytest.raises(UnsupportedError, match=r"ran .*'sliding_attention': 1.* and has .*'sliding_attention': 2"):
        train(model)


def test_a_layer_that_drops_the_routes() -> None:
    model = applied(tiny_model("olmo3"))
    layer = model.model.layers[1]
    forward = layer.forward
    layer.forward = lambda hidden_states, position_embeddings, **others: forward(
        hidden_states, position_embeddings=position_embeddings
    )
    with pytest.raises(UnsupportedError, match="drops keyword arguments"):
        train(model)


def test_the_decoder_without_its_model() -> None:
    model = applied(tiny_model("llama"))
    with pytest.raises(UnsupportedError, match="call the model that apply"):
        model.model(input_ids=torch.arange(5)[None])
