"""Every family under every strategy equals its untouched self, one sample at a time, in float64."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

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
)
from tests.hf.models import TINY, tiny_model

# Longer and shorter than the window of 7 and the chunk of 9, and a single token.
MIXED = (37, 12, 1, 23)
THREE_TOKENS = (3,)


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
