"""Steps so short that the traffic of sharded parameters outlasts compute: what counts then is exchanges and tokens."""

from __future__ import annotations

import numpy as np
import pytest

from layerwise.cost import CostModel, predict
from layerwise.planners import grouping, joint, plan_step
from layerwise.planners.estimate import GroupClass, Rows, site_floor_s
from layerwise.planners.grouping import make_tasks
from layerwise.planners.packing import Packing, refine
from layerwise.planners.partitions import tile_cluster
from layerwise.planners.problem import StepProblem
from layerwise.spec import ClusterSpec
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, long_tailed

BUDGET = 2560


def cluster(**settings: object) -> ClusterSpec:
    """Eight nodes whose links take longer for the parameters of a sliding layer than its ranks compute."""
    rates = {"num_nodes": 8, "sharded_params": True, "slow_bytes_per_s": 1e6, "peak_flops_per_s": 2e10}
    return WIDE_CLUSTER.model_copy(update={**rates, **settings})


def steps(num_samples: int = 250) -> list[list[int]]:
    return [[4000, 3000, *long_tailed(seed, num_samples, cap=1500, log_mean=5.0)] for seed in range(4)]


def total_s(strategy: str, **options: object) -> float:
    specs = cluster(), WIDE_MODEL
    return sum(
        predict(
            plan_step(
                lengths, cluster=specs[0], model=specs[1], strategy=strategy, max_tokens_per_rank=BUDGET, **options
            ),
            *specs,
        ).seconds
        for lengths in steps()
    )


def packing() -> Packing:
    """Two bins and four items; the second row is of the first of two dimensions."""
    return Packing(
        loads=np.array([[4.0, 3, 2, 1], [1, 1, 1, 1], [1, 6, 1, 1]])[:, :, None],
        base=np.array([[0.0, 0], [0, 1], [2, 2]]),
        bin_class=np.zeros(2, dtype=np.int64),
        tokens=np.ones(4, dtype=np.int64),
        capacity_tokens=np.full(2, 4),
        second_of=(0,),
    )


def test_a_bin_is_as_high_as_the_higher_of_its_rows() -> None:
    # Rows of the first dimension: 7 and 3, then 2 + 7 and 2 + 2; the second dimension: 2 and 1 + 2.
    assert packing().makespan(np.array([0, 0, 1, 1])) == 9 + 3
    assert packing().makespan(np.array([0, 1, 1, 0])) == 9 + 3
    assert packing().makespan(np.array([0, 1, 0, 0])) == max(7, 8) + max(3, 2)


def test_refining_lowers_second_rows() -> None:
    """Bin 1 is the higher by first rows and cannot be lowered; a swap lowers bin 0 by second rows, from 14 to 10."""
    problem = Packing(
        loads=np.array([[1.0, 1, 2, 1], [6, 6, 2, 2]])[:, :, None],
        base=np.array([[0.0, 0], [2, 2]]),
        bin_class=np.zeros(2, dtype=np.int64),
        tokens=np.ones(4, dtype=np.int64),
        capacity_tokens=np.full(2, 4),
        second_of=(0,),
    )
    uneven = np.array([0, 0, 1, 1])
    assert problem.makespan(uneven) == 14
    assert problem.makespan(refine(problem, uneven)) == 10


@pytest.mark.parametrize("overlap", [1.0, 0.5, 0.0])
def test_the_rows_are_the_estimate(overlap: float) -> None:
    """Exposed traffic, a maximum within every rank, is the higher of two sums, whatever is packed where."""
    cost = CostModel(cluster=cluster(overlap=overlap, peak_flops_per_s=1e11), model=WIDE_MODEL)
    lengths = np.array(steps()[0])
    problem = StepProblem(lengths=lengths, cost=cost, max_tokens_per_rank=BUDGET)
    partition = tile_cluster((8,) * 2 + (2,) * 8 + (1,) * 32, 64, 8)
    (task,) = make_tasks(problem, np.arange(len(lengths)), [partition], GroupClass)
    assert task.packing.second_of == (0, 1)
    rng = np.random.default_rng(0)
    for _ in range(20):
        bin_of = rng.integers(0, len(partition.size), len(lengths))
        assert task.packing.makespan(bin_of) == pytest.approx(task.seconds(bin_of), rel=1e-12)


@pytest.mark.parametrize("settings", [{"sharded_params": False}, {"slow_bytes_per_s": 1e8}])
def test_traffic_that_no_rank_can_expose_has_no_row(settings: dict[str, object]) -> None:
    cost = CostModel(cluster=cluster(**settings), model=WIDE_MODEL)  # type: ignore[arg-type]
    problem = StepProblem(lengths=np.array(steps()[0]), cost=cost, max_tokens_per_rank=BUDGET)
    (task,) = make_tasks(problem, np.arange(252), [tile_cluster((1,) * 64, 64, 8)], GroupClass)
    assert task.packing.second_of == ()


def test_dynamic_packs_by_what_takes_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    with_rows_s = total_s("dynamic")
    monkeypatch.setattr(grouping, "with_traffic", lambda cost, found, base, *_: Rows(found.loads, base, ()))
    assert with_rows_s < 0.99 * total_s("dynamic")


def test_joint_levels_what_takes_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    with_floor_s = total_s("joint", fallback=False)
    monkeypatch.setattr(joint, "site_floor_s", lambda cost, lengths: np.zeros(2))
    assert with_floor_s < 0.99 * total_s("joint", fallback=False)


def test_the_floor_is_what_traffic_hides_of_sites() -> None:
    cost = CostModel(cluster=cluster(peak_flops_per_s=1e11), model=WIDE_MODEL)
    lengths = np.array([300] * 64)
    sparse, full = site_floor_s(cost, lengths)
    for layer in cost.layers:
        hidden_s = layer.num_layers * (layer.params_s - 300 * layer.token_s)  # no experts: nothing is dispatched
        assert hidden_s == pytest.approx(full if layer.kind == "full_attention" else sparse, rel=1e-12)
    assert site_floor_s(cost, 100 * lengths).tolist() == [0, 0]  # compute takes longer
    half_hidden = CostModel(cluster=cluster(overlap=0.5), model=WIDE_MODEL)
    assert site_floor_s(half_hidden, lengths).tolist() == [0, 0]  # half of it is exposed in any case
