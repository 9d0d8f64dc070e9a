"""One step under every strategy, many steps on several processes, and where the gap sits."""

import numpy as np
import pytest

from layerwise.cost import CostModel
from layerwise.errors import SpecError
from layerwise.evaluate.gaps import HEAD, split_gap
from layerwise.evaluate.steps import check_strategies, run_step, run_steps, static_degree, step_jobs
from layerwise.planners import STRATEGIES, plan_step
from layerwise.spec import ClusterSpec
from tests.evaluate.builders import small_workload
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL

LENGTHS = [24000, *[700] * 20, *[150] * 20]


@pytest.mark.parametrize("sync", ["layer", "step"])
@pytest.mark.parametrize("strategy", list(STRATEGIES))
def test_gaps_add_up_to_the_step(strategy: str, sync: str) -> None:
    lengths = [16000, *LENGTHS[1:]]
    cluster = ClusterSpec.model_validate(WIDE_CLUSTER.model_dump() | {"sync": sync, "overlap": 0.1})
    plan = plan_step(lengths, cluster=cluster, model=WIDE_MODEL, strategy=strategy, max_tokens_per_rank=2560)
    cost = CostModel(cluster=cluster, model=WIDE_MODEL)
    prediction = cost.predict(plan)
    gaps = split_gap(plan, prediction, cost)
    if sync == "layer":
        assert sum(gap.total_s for gap in gaps.values()) == pytest.approx(prediction.seconds, rel=1e-9)
    else:
        layers = sum(gap.total_s for kind, gap in gaps.items() if kind != HEAD)
        assert layers + prediction.head_s == pytest.approx(prediction.seconds, rel=1e-2)
    assert sum(gap.ideal_s for gap in gaps.values()) == pytest.approx(prediction.ideal_s, rel=1e-9)


def test_a_step_tells_what_each_strategy_does() -> None:
    (job,) = step_jobs(small_workload(), ("dynamic", "repack"), [np.array(LENGTHS)])
    result = run_step(job)
    assert result.wide
    assert (result.num_samples, result.num_tokens, result.longest_tokens) == (41, sum(LENGTHS), 24000)
    repack = result.strategies["repack"]
    assert repack.parents >= 1
    assert repack.step_s <= result.strategies["dynamic"].step_s
    assert repack.tokens_per_rank.sum() == sum(LENGTHS)


def test_a_step_of_short_samples_is_not_wide() -> None:
    (job,) = step_jobs(small_workload(), ("dynamic",), [np.full(200, 100)])
    assert not run_step(job).wide


@pytest.mark.parametrize(("cap_tokens", "degree"), [(20480, 8), (20481, 16)])
def test_static_groups_hold_the_longest_sample(cap_tokens: int, degree: int) -> None:
    assert static_degree(small_workload(cap_tokens=cap_tokens)) == degree


def test_processes_do_not_change_results() -> None:
    workload = small_workload()
    jobs = step_jobs(workload, ("dynamic", "repack"), workload.draw_steps(2))
    done: list[int] = []
    together = run_steps(jobs, num_workers=2, on_step=lambda: done.append(1))
    alone = run_steps(jobs, num_workers=1)
    assert len(done) == 2
    for a, b in zip(together, alone, strict=True):
        assert [s.step_s for s in a.strategies.values()] == [s.step_s for s in b.strategies.values()]


def test_the_baseline_is_always_there_and_names_are_checked() -> None:
    assert check_strategies(["static", "repack", "static"]) == ("dynamic", "static", "repack")
    with pytest.raises(SpecError, match=r"'repak' is unknown.*repack\+parents"):
        check_strategies(["repak"])
