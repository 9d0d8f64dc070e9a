"""joint on steps of few samples, where it looks harder: finer, and with each sample over all ranks in turn."""

from __future__ import annotations

import numpy as np
import pytest

from layerwise import load_cluster, load_model
from layerwise.cost import predict
from layerwise.plan import StepPlan
from layerwise.planners import joint, plan_step
from layerwise.spec import ClusterSpec, ModelSpec
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, long_tailed

MANY_NODES = WIDE_CLUSTER.model_copy(update={"num_nodes": 8})
Specs = tuple[ClusterSpec, ModelSpec]


def few_long(seed: int, num_samples: int, log_mean: float) -> list[int]:
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(log_mean, 0.7, num_samples)).astype(int).tolist()  # type: ignore[no-any-return]


def plan_joint(
    lengths: list[int], specs: Specs = (MANY_NODES, WIDE_MODEL), spare: float = 1.3, fallback: bool = True
) -> StepPlan:
    cluster, model = specs
    budget = int(spare * sum(lengths) / cluster.num_ranks)
    return plan_step(
        lengths, cluster=cluster, model=model, strategy="joint", max_tokens_per_rank=budget, fallback=fallback
    )


def seconds(plan: StepPlan, specs: Specs = (MANY_NODES, WIDE_MODEL)) -> float:
    return predict(plan, *specs).seconds


def excess(plan: StepPlan) -> float:
    """The fullest rank's tokens over the mean, less one."""
    tokens = plan.microbatches[0].tokens_per_rank(plan.num_ranks)
    return float(tokens.max() / tokens.mean() - 1)


def test_a_finer_search_of_few_samples_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [[9000, 7000, *long_tailed(seed, n, cap=4000, log_mean=6.5)] for seed in range(4) for n in (18, 60, 150)]
    fine_s = sum(seconds(plan_joint(lengths)) for lengths in steps)
    monkeypatch.setattr(joint, "FEW", 0)
    assert fine_s < 0.995 * sum(seconds(plan_joint(lengths)) for lengths in steps)


@pytest.mark.parametrize(("num_samples", "seed"), [(14, 0), (18, 0), (22, 1)])
def test_one_sample_over_all_ranks_levels_tokens(monkeypatch: pytest.MonkeyPatch, num_samples: int, seed: int) -> None:
    lengths = few_long(seed, num_samples, 9.0)
    spread = plan_joint(lengths, fallback=False)
    monkeypatch.setattr(joint, "_with_one_spread", lambda problem, question: iter(()))
    narrow = plan_joint(lengths, fallback=False)
    assert seconds(spread) < seconds(narrow)
    assert excess(spread) < 0.5 * excess(narrow)


def test_which_sample_is_spread_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [few_long(seed, num_samples, 9.0) for num_samples in (14, 18, 22) for seed in range(3)]
    each_s = [seconds(plan_joint(lengths)) for lengths in steps]
    monkeypatch.setattr(joint, "EACH", 0)  # the longest only
    longest_s = [seconds(plan_joint(lengths)) for lengths in steps]
    assert sum(each_s) < sum(longest_s)


def test_level_tokens_are_preferred_where_that_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    specs = load_cluster("paper"), load_model("paper-1f3s")
    rng = np.random.default_rng(5)
    lengths = np.exp(rng.normal(11.4, 0.6, 12)).astype(int).tolist()
    level = plan_joint(lengths, specs)
    monkeypatch.setattr(joint, "WORTH", 0.0)
    fastest = plan_joint(lengths, specs)
    assert excess(level) <= joint.LEVEL < excess(fastest)
    assert seconds(fastest, specs) < seconds(level, specs) < 1.01 * seconds(fastest, specs)


@pytest.mark.parametrize("seed", range(4))
def test_no_slower_where_ranks_wait_at_the_end_only(seed: int) -> None:
    """The plan for waits at every layer takes no longer without them, so a plan made for that may not either."""
    lengths = few_long(seed, 15, 9.0)
    at_the_end = MANY_NODES.model_copy(update={"sync": "step"})
    layers, end = (plan_joint(lengths, (cluster, WIDE_MODEL)) for cluster in (MANY_NODES, at_the_end))
    assert seconds(end, (at_the_end, WIDE_MODEL)) <= 1.005 * seconds(layers, (at_the_end, WIDE_MODEL))


@pytest.mark.parametrize("seed", range(3))
def test_parents_and_children_are_tried_where_ours_is_far_from_level(seed: int) -> None:
    cluster = load_cluster("a100-8x8").model_copy(update={"num_nodes": 6, "ranks_per_node": 6})
    specs = cluster.model_copy(update={"sharded_params": True, "expert_parallel_degree": 1}), load_model("gpt-oss-120b")
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(11, 1.2, 80)).astype(int).tolist()
    ours = plan_joint(lengths, specs, spare=0.6)  # two micro-batches
    budget = ours.max_tokens_per_rank
    parents = plan_step(
        lengths, cluster=specs[0], model=specs[1], strategy="repack+parents", max_tokens_per_rank=budget
    )
    assert seconds(ours, specs) <= seconds(parents, specs)


@pytest.mark.parametrize("seed", [0, 5, 6])
def test_no_slower_than_halos_in_steps_of_few_samples(seed: int) -> None:
    cluster = load_cluster("paper").model_copy(update={"num_nodes": 16, "expert_parallel_degree": 1})
    specs = cluster, load_model("paper-1f3s")
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.uniform(np.log(1000), np.log(90000), 24)).astype(int).tolist()
    ours = plan_joint(lengths, specs, spare=1.5)
    budget = ours.max_tokens_per_rank
    halo = plan_step(lengths, cluster=specs[0], model=specs[1], strategy="halo", max_tokens_per_rank=budget)
    assert seconds(ours, specs) <= seconds(halo, specs)
