"""Heuristics beside the exact optimum of the same question, on random small steps; a failure names the seeds.

The exact answer uses one micro-batch. A plan with more of them may be faster and then counts as 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np
import pytest

from layerwise.cost import Floats
from layerwise.plan import Ints, Parent, StepPlan
from layerwise.planners.children import child_degrees, full_attention_s, sparse_share
from layerwise.planners.estimate import child_loads
from layerwise.traffic import Block
from tests.exact.children import lowest_tops, tops_of
from tests.exact.instances import Instance, random_instance
from tests.exact.search import (
    Choice,
    Estimate,
    aligned_blocks,
    group_choices,
    lay_out_choices,
    read_choices,
    repack_choices,
    solve,
)

# The first test of each strategy pays for all its exact answers.
pytestmark = pytest.mark.timeout(400)

GROUP_NODES = ((2, 2), (2, 3), (2, 4))
# Four nodes have more than one group wider than a node, so that membership is a question of its own.
REPACK_NODES = (*GROUP_NODES, (4, 2))
REPACK_SEEDS = range(200, 280)
MEAN_LIMIT, WORST_LIMIT = 1.01, 1.03
# CP-SAT proves its optimum in whole units; see UNITS in search.py.
ROUNDING = 1e-5


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """A plan of the package over the exact one: by the estimate that was minimised, and by the cost model."""

    instance: Instance
    num_microbatches: int
    estimate: float
    prediction: float


@cache
def _exact_repacking(seed: int) -> tuple[Instance, dict[int, Choice]]:
    instance = random_instance(seed, REPACK_NODES)
    return instance, solve(instance, repack_choices(instance))[0]


def _compare(instance: Instance, exact: dict[int, Choice], strategy: str) -> Comparison:
    plan, estimate = instance.plan(strategy), Estimate(instance)
    return Comparison(
        instance=instance,
        num_microbatches=len(plan.microbatches),
        estimate=estimate.step_s(read_choices(plan)) / estimate.step_s([exact]),
        prediction=_predicted(plan, instance, exact),
    )


def _predicted(plan: StepPlan, instance: Instance, exact: dict[int, Choice]) -> float:
    reference = instance.cost.predict_microbatch(lay_out_choices(instance, exact))
    return instance.cost.predict(plan).seconds / instance.cost.step_s([reference])


@pytest.fixture(scope="module")
def dynamic() -> list[Comparison]:
    instances = [random_instance(seed, GROUP_NODES) for seed in range(140)]
    return [_compare(i, solve(i, group_choices(i))[0], "dynamic") for i in instances]


@pytest.fixture(scope="module")
def repack_parents() -> list[Comparison]:
    return [_compare(*_exact_repacking(seed), "repack+parents") for seed in REPACK_SEEDS]


# What is minimised is the estimate, then, where plans repack, the prediction of the candidates that are left.
MEASURES = [("dynamic", "prediction"), ("repack_parents", "prediction")]


@pytest.mark.parametrize(("strategy", "measure"), MEASURES)
def test_on_average_within_one_percent(strategy: str, measure: str, request: pytest.FixtureRequest) -> None:
    ratios = [max(1.0, getattr(found, measure)) for found in request.getfixturevalue(strategy)]
    assert np.mean(ratios) <= MEAN_LIMIT


@pytest.mark.parametrize(("strategy", "measure"), MEASURES)
def test_at_worst_within_three_percent(strategy: str, measure: str, request: pytest.FixtureRequest) -> None:
    found = sorted(request.getfixturevalue(strategy), key=lambda f: -getattr(f, measure))
    bad = [f"{getattr(f, measure):.4f} {f.instance}" for f in found if getattr(f, measure) > WORST_LIMIT]
    assert not bad, f"{len(bad)} of {len(found)} instances\n" + "\n".join(bad)


@pytest.mark.parametrize("strategy", ["dynamic", "repack_parents"])
def test_no_plan_of_one_microbatch_is_below_the_optimum(strategy: str, request: pytest.FixtureRequest) -> None:
    found = [f for f in request.getfixturevalue(strategy) if f.num_microbatches == 1]
    assert len(found) > 20
    assert min(f.estimate for f in found) >= 1 - ROUNDING


def test_joint_is_as_fast_as_the_exact_repacking() -> None:
    """It may choose more than parents and children can; what it must not do is lose to the best of those."""
    ratios = []
    for seed in REPACK_SEEDS:
        instance, exact = _exact_repacking(seed)
        ratios.append((_predicted(instance.plan("joint"), instance, exact), instance))
    bad = [f"{ratio:.4f} {instance}" for ratio, instance in ratios if ratio > WORST_LIMIT]
    assert np.mean([max(1.0, ratio) for ratio, _ in ratios]) <= MEAN_LIMIT
    assert not bad, f"{len(bad)} of {len(ratios)} instances\n" + "\n".join(bad)


@dataclass(frozen=True, kw_only=True, eq=False)
class ChildComparison:
    """Seconds of the fullest ranks of one parent with its children over the exact ones, as the child solver counts."""

    instance: Instance
    seconds: float


@pytest.fixture(scope="module")
def children() -> list[ChildComparison]:
    return [found for seed in range(400, 500) for found in _compare_children(seed)]


def _compare_children(seed: int) -> list[ChildComparison]:
    instance, found = random_instance(seed, ((2, 2), (2, 4), (4, 2))), []
    plan = instance.plan("repack", fallback=False)
    for microbatch, chosen in zip(plan.microbatches, read_choices(plan), strict=True):
        for parent in (p for p in microbatch.parents if p.repacked):
            own = {sample: chosen[sample] for sample in parent.samples}
            lengths = np.array(instance.lengths)[sorted(own)]
            block = Block(parent.first_rank, parent.first_rank + parent.sp_degree)
            loads, base = _seconds(instance, parent, lengths)
            exact = lowest_tops(instance.cluster, block, loads, base, lengths, instance.budget)
            found.append(ChildComparison(instance=instance, seconds=tops_of(block, own, loads, base) / exact))
    return found


def _seconds(instance: Instance, parent: Parent, lengths: Ints) -> tuple[dict[int, Floats], Floats]:
    """What samples add to ranks, and what ranks have anyway: of sparse and of full layers, or of both together."""
    problem = instance.pose()
    degrees, full_s = child_degrees(instance.cluster.ranks_per_node), full_attention_s(problem, parent)
    loads_s = child_loads(instance.cost, lengths, degrees)
    base = full_s[None, :]
    if instance.cluster.sync == "layer":
        share, (linear, sites) = sparse_share(problem), loads_s
        loads_s, base = np.stack([share * linear + sites, (1 - share) * linear]), np.stack([0 * full_s, full_s])
    return {degree: loads_s[:, :, column] for column, degree in enumerate(degrees)}, base


def test_children_fill_ranks_as_evenly_as_can_be(children: list[ChildComparison]) -> None:
    assert len(children) >= 30
    assert min(f.seconds for f in children) >= 1 - ROUNDING
    assert np.mean([f.seconds for f in children]) <= MEAN_LIMIT


def test_children_are_at_worst_within_three_percent(children: list[ChildComparison]) -> None:
    bad = [f"{f.seconds:.4f} {f.instance}" for f in children if f.seconds > WORST_LIMIT]
    assert not bad, "\n".join(bad)


@pytest.mark.parametrize("seed", range(6))
def test_the_reference_is_what_trying_everything_finds(seed: int) -> None:
    instance = random_instance(seed, ((2, 2),))
    lengths = instance.lengths[:4]
    instance = replace(instance, lengths=lengths, budget=-(-sum(lengths) * 21 // (20 * instance.cluster.num_ranks)))
    estimate = Estimate(instance)
    answers = [
        estimate.step_s([dict(enumerate(chosen))])
        for chosen in product(group_choices(instance), repeat=4)
        if _is_legal(instance, chosen)
    ]
    exact = estimate.step_s(solve(instance, group_choices(instance)))
    assert exact == pytest.approx(min(answers), rel=ROUNDING)


def _is_legal(instance: Instance, chosen: tuple[Choice, ...]) -> bool:
    blocks = {choice.parent for choice in chosen}
    if sum(block.size for block in blocks) != len({r for block in blocks for r in range(block.lo, block.hi)}):
        return False
    held = dict.fromkeys(blocks, 0)
    for length, choice in zip(instance.lengths, chosen, strict=True):
        held[choice.parent] += length
    return all(tokens <= block.size * instance.budget for block, tokens in held.items())


@pytest.mark.parametrize("seed", range(8))
def test_estimates_of_even_groups_are_what_the_cost_model_says(seed: int) -> None:
    """Widths that divide the heads: the closed forms leave out nothing but tokens that do not divide."""
    instance = random_instance(seed, ((2, 2), (2, 4)))
    (exact,) = solve(instance, group_choices(instance))
    predicted = instance.cost.predict_microbatch(lay_out_choices(instance, exact)).seconds
    assert predicted == pytest.approx(Estimate(instance).step_s([exact]), rel=2e-3)


def test_blocks_of_two_nodes_of_three_ranks() -> None:
    instance = random_instance(0, ((2, 3),))
    blocks = [(block.lo, block.hi) for block in aligned_blocks(instance.cluster)]
    assert blocks == [
        (0, 6), (0, 3), (3, 6), (0, 2), (3, 5), (0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)
    ]  # fmt: skip
