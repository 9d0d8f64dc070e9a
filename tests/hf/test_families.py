"""Every family under every strategy equals its untouched self, one sample at a time."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import layerwise.hf as lwhf
from layerwise.hf.families import FAMILIES
from tests.hf.harness import (
    STRATEGIES,
    Result,
    applied,
    assert_equal,
    make_samples,
    on_ranks,
    one_at_a_time,
    planner_for,
    recomputing,
)
from tests.hf.models import TINY, VOCAB, tiny_model

# Longer and shorter than the window of 7 and the chunk of 9, and a single token.
MIXED = (37, 12, 1, 23)
THREE_TOKENS = (3,)
TWICE = (37, 12, 5, 1, 23, 9)  # in two micro-batches


@cache
def expected(name: str, lengths: tuple[int, ...]) -> Result:
    return one_at_a_time(tiny_model(name), make_samples(lengths))


@cache
def routed(name: str) -> Any:
    return applied(tiny_model(name))


# Sixteen are more ranks than query heads, with shards shorter than the window.
@pytest.mark.parametrize("num_ranks", [4, 16])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("name", TINY)
def test_family_equals_itself(name: str, strategy: str, num_ranks: int) -> None:
    planner = planner_for(strategy, num_ranks, routed(name).config, MIXED)
    ours, _ = on_ranks(routed(name), make_samples(MIXED), planner, num_ranks)
    assert_equal(routed(name), ours, expected(name, MIXED), 1e-9)


@pytest.mark.parametrize("recompute", [False, True], ids=["", "gradient checkpointing"])
@pytest.mark.parametrize("name", TINY)
def test_family_equals_itself_in_float32(name: str, recompute: bool) -> None:
    """With grouped expert kernels, and norms and scores as they come; recompute runs outside of `routes()`."""
    model = tiny_model(name, torch.float32)
    ours = applied(model)
    if ours._can_set_experts_implementation():
        ours.set_experts_implementation("grouped_mm")
    if recompute:
        recomputing(ours)
    planner = planner_for("repack+parents", 4, model.config, TWICE, microbatches=2)
    result, plan = on_ranks(ours, make_samples(TWICE), planner, 4)
    assert len(plan.microbatches) == 2
    assert_equal(model, result, one_at_a_time(model, make_samples(TWICE)), 5e-5)


@pytest.mark.parametrize("name", TINY)
def test_a_sample_does_not_see_the_others(name: str) -> None:
    """To the bit without experts, to rounding with them."""
    model = routed(name)
    planner = planner_for("repack+parents", 4, model.config, MIXED)
    before, after = make_samples(MIXED), make_samples(MIXED)
    after[1]["input_ids"] = (after[1]["input_ids"] + 1) % VOCAB
    (a, _), (b, _) = (on_ranks(model, samples, planner, 4) for samples in (before, after))
    assert not torch.allclose(a.logits[1], b.logits[1])
    tolerance = 1e-12 if lwhf.model_spec(model.config).num_experts else 0.0
    for sample in (0, 2, 3):
        torch.testing.assert_close(a.logits[sample], b.logits[sample], rtol=0, atol=tolerance)


@pytest.mark.parametrize("strategy", ["dynamic", "redistribute"])
@pytest.mark.parametrize("name", ["gpt_oss", "llama4_text", "gemma4_text", "qwen3_moe"])
def test_ranks_without_tokens_get_zero_gradients_and_not_none(name: str, strategy: str) -> None:
    planner = planner_for(strategy, 4, routed(name).config, THREE_TOKENS)
    assert 0 in planner(THREE_TOKENS).microbatches[0].tokens_per_rank(4)
    ours, _ = on_ranks(routed(name), make_samples(THREE_TOKENS), planner, 4)
    assert_equal(routed(name), ours, expected(name, THREE_TOKENS), 1e-9)


@pytest.mark.parametrize("strategy", ["repack+parents", "joint"])
def test_the_cases_above_do_repack(strategy: str) -> None:
    """They would prove little if these plans were those of `dynamic`."""
    config = tiny_model("olmo3").config
    ours, wide = (planner_for(s, 4, config, MIXED)(MIXED).microbatches[0] for s in (strategy, "dynamic"))
    assert (ours.shards, ours.tiles) != (wide.shards, wide.tiles)


def test_the_documented_table_has_every_family() -> None:
    text = (Path(__file__).parents[2] / "docs" / "huggingface.md").read_text()
    table = text.partition("<!-- table: begin -->")[2].partition("<!-- table: end -->")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()]
    errors = {
        row[0]: [float(error) for cell in row[3 : 3 + len(STRATEGIES)] for error in cell.split("/")] for row in rows[2:]
    }
    assert rows[0][3 : 3 + len(STRATEGIES)] == [f"`{strategy}`, 4 / 16 ranks" for strategy in STRATEGIES]
    assert {len(found) for found in errors.values()} == {2 * len(STRATEGIES)}
    assert set(errors) == set(TINY) == FAMILIES
    assert max(map(max, errors.values())) < 1e-9
