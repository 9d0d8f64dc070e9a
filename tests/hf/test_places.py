"""Hidden states that move between layers (`redistribute`): what is sent, recompute, and what is refused."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

import layerwise.hf as lwhf
from layerwise.cost import predict
from layerwise.errors import UnsupportedError
from layerwise.runtime import MOVES
from layerwise.spec import FULL, ClusterSpec
from tests.hf.harness import (
    applied,
    assert_equal,
    make_samples,
    on_ranks,
    one_at_a_time,
    planner_for,
    recomputing,
    sent_by_ranks,
)
from tests.hf.models import tiny_model

LENGTHS = (37, 12, 1, 23)
RANKS = 4


@pytest.mark.parametrize("name", ["olmo3", "qwen3_next"])
def test_every_rank_sends_what_is_predicted(name: str) -> None:
    """Angles are computed where they are needed, and are not sent."""
    model = applied(tiny_model(name, torch.float32))
    plan = planner_for("redistribute", RANKS, model.config, LENGTHS)(LENGTHS)
    assert list(plan.microbatches[0].places) == ["home", FULL]
    expected = predict(plan, ClusterSpec(num_nodes=2, ranks_per_node=2), lwhf.model_spec(model.config), element_bytes=4)
    counted = sent_by_ranks(model, plan, MOVES)
    assert [c.calls for c in counted] == expected.moves.calls.tolist()
    assert [c.fast_bytes for c in counted] == expected.moves.rank_fast_bytes.tolist()
    assert [c.slow_bytes for c in counted] == expected.moves.rank_slow_bytes.tolist()
    assert expected.moves.rank_slow_bytes.sum() > 0


@pytest.mark.parametrize("name", ["llama4_text", "granitemoehybrid"])
def test_gradient_checkpointing_replays_its_own_moves(name: str) -> None:
    """The backward runs outside of `routes()`."""
    model = applied(tiny_model(name, torch.float32))
    recomputing(model)
    lengths = (37, 12, 5, 1, 23, 9)
    planner = planner_for("redistribute", RANKS, model.config, lengths, microbatches=2)
    ours, plan = on_ranks(model, make_samples(lengths), planner, RANKS)
    assert len(plan.microbatches) == 2
    assert_equal(model, ours, one_at_a_time(tiny_model(name, torch.float32), make_samples(lengths)), 5e-5)


def test_hidden_states_in_several_places_are_not_handed_out() -> None:
    model = applied(tiny_model("olmo3"))
    model.config.output_hidden_states = True
    planner = planner_for("redistribute", RANKS, model.config, LENGTHS)
    with pytest.raises(UnsupportedError, match=r"output_hidden_states is refused.*full_attention"):
        on_ranks(model, make_samples(LENGTHS), planner, RANKS)
