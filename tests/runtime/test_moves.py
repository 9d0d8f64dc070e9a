"""Hidden states that move between layers: what goes on the wire is what is predicted, and wrong calls are refused."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from layerwise import LocalWorld, PlannedLoader, relocate, solo_world, token_loss
from layerwise.cost import predict
from layerwise.errors import SpecError
from layerwise.exchange import Count, Meter
from layerwise.groups import World
from layerwise.model import HybridLM
from layerwise.plan import HOME, StepPlan
from layerwise.runtime import MOVES, agree, attention, build_routes, use_routes
from layerwise.spec import AttentionSpec, ClusterSpec
from tests.random_plans import random_step
from tests.runtime.test_strategies import LENGTHS, make_samples, model_for, planner_for

FULL, SLIDING = "full_attention", "sliding_attention"
SPECS = {
    FULL: AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, v_head_dim=4),
    SLIDING: AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=4, v_head_dim=4, window=5),
}


def metered_step(
    model: HybridLM, lengths: list[int], planner: Callable[[tuple[int, ...]], StepPlan], num_ranks: int
) -> tuple[StepPlan, list[dict[str, Count]]]:
    """The plan, and what each rank's forward and backward put on the wire."""
    samples = make_samples(lengths, model.spec.vocab_size)
    planner(tuple(lengths))

    def on_rank(world: World) -> tuple[StepPlan, dict[str, Count]]:
        (step,) = PlannedLoader(
            dataset=[s.input_ids.numpy() for s in samples],
            planner=lambda n: planner(tuple(n)),
            world=world,
            steps=[range(len(samples))],
        )
        for microbatch in step.microbatches:
            with microbatch.routes():
                output = model(microbatch.input_ids, microbatch.position_ids)
                loss = token_loss(output.logits, microbatch.shift_labels, step.num_valid_tokens)
            torch.autograd.grad(loss, list(model.parameters()))
        return step.plan, step.meter.counts

    results = LocalWorld(num_ranks, max(1, num_ranks // 2)).run(on_rank)
    return results[0][0], [counts for _, counts in results]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("strategy", ["halo", "redistribute"])
@pytest.mark.parametrize(("name", "num_ranks"), [("wide", 16), ("three", 8), ("ones", 4), ("thirteen", 8)])
def test_every_rank_sends_what_is_predicted(strategy: str, name: str, num_ranks: int, recompute: bool) -> None:
    model, lengths = model_for((8, 2), activation_checkpointing=recompute), LENGTHS.get(name, [200, *[20] * 10])
    planner = planner_for(strategy, num_ranks, model.spec, lengths)
    plan, counted = metered_step(model, lengths, planner, num_ranks)
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=num_ranks // 2, recompute=recompute)
    prediction = predict(plan, cluster, model.spec, element_bytes=8)
    for kind, expected in {**prediction.kinds, MOVES: prediction.moves}.items():
        for rank, counts in enumerate(counted):
            count = counts.get(kind, Count())
            assert count.calls == expected.calls[rank]
            assert (count.fast_bytes, count.slow_bytes) == (
                expected.rank_fast_bytes[rank],
                expected.rank_slow_bytes[rank],
            )
    if name == "wide":
        assert (prediction.moves.slow_bytes > 0) == (strategy == "redistribute")


def test_moving_there_and_back_is_the_identity_and_gradients_follow() -> None:
    plan = random_step(np.random.default_rng(3), [11, 4, 1, 9], SPECS, 4, 2, moving_kinds=(FULL, SLIDING))

    def on_rank(world: World) -> None:
        agree(plan, world, num_valid_tokens=0)
        meter = Meter(plan.ranks_per_node)
        with use_routes(build_routes(plan, 0, world, meter=meter)) as routes:
            sample = torch.from_numpy(routes.piece_samples)[routes.places[HOME].piece_index]
            home = torch.stack([sample, routes.position_ids], dim=1).double().requires_grad_()
            at_full = relocate(home, target=FULL)
            there = routes.places[FULL]
            # Every token arrives with its sample and position, in the packed order of the place.
            assert torch.equal(at_full[:, 0], torch.from_numpy(routes.piece_samples)[there.piece_index].double())
            assert torch.equal(at_full[:, 1], there.position_ids.double())
            back = relocate(relocate(at_full, source=FULL, target=SLIDING), source=SLIDING)
            assert torch.equal(back, home)
            (gradient,) = torch.autograd.grad((back * home.detach()).sum(), home)
            assert torch.equal(gradient, home.detach())
            assert relocate(home) is home
        assert set(meter.counts) <= {MOVES}

    LocalWorld(4, 2).run(on_rank)


def test_moves_are_free_where_every_kind_is_at_home() -> None:
    plan = random_step(np.random.default_rng(0), [9, 5], SPECS, 4, 2)

    def on_rank(world: World) -> None:
        routes = build_routes(plan, 0, world)
        hidden = torch.zeros(len(routes.position_ids), 3)
        assert relocate(hidden, target=FULL, routes=routes) is hidden
        assert relocate(hidden, source=SLIDING, target=FULL, routes=routes) is hidden
        assert not routes.meter.counts

    LocalWorld(4, 2).run(on_rank)


def test_attention_refuses_hidden_states_that_were_not_relocated() -> None:
    """Places may have equally many tokens, so their number would not tell."""
    plan = random_step(np.random.default_rng(0), [6], SPECS, 1, 1, moving_kinds=(FULL,))
    routes = build_routes(plan, 0, solo_world())
    rows = [torch.zeros(6, heads, 4) for heads in (SPECS[FULL].num_heads, *[SPECS[FULL].num_kv_heads] * 2)]
    with pytest.raises(
        SpecError, match=r'full_attention keep .* layerwise\.relocate\(hidden, target="full_attention"\)'
    ):
        attention(*rows, kind=FULL, routes=routes)
    relocate(torch.zeros(6, 3), target=FULL, routes=routes)
    attention(*rows, kind=FULL, routes=routes)


def test_what_relocate_refuses() -> None:
    plan = random_step(np.random.default_rng(0), [6], SPECS, 1, 1, moving_kinds=(FULL,))
    routes = build_routes(plan, 0, solo_world())
    with pytest.raises(SpecError, match=r"'linear_attention' is not planned; the plan has"):
        relocate(torch.zeros(6, 3), target="linear_attention", routes=routes)
    with pytest.raises(SpecError, match=r"hidden has shape \(5, 3\), expected \[tokens at home, C\] = \[6, C\]"):
        relocate(torch.zeros(5, 3), target=FULL, routes=routes)
    with pytest.raises(SpecError, match=r"expected \[tokens at full_attention, C\] = \[6, C\]"):
        relocate(torch.zeros(1, 6, 3), source=FULL, routes=routes)
