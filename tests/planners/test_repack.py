"""repack and repack+parents: children inside nodes, sparse layers off the slow link, honest counts."""

from dataclasses import replace

import numpy as np
import pytest

from layerwise.cost import CostModel, MicrobatchTimes, Work, predict
from layerwise.plan import MicrobatchPlan, Parent, StepPlan
from layerwise.planners import plan_step
from layerwise.planners.children import child_degrees, solve_children
from layerwise.planners.layout import batched, lay_out, shard_rows
from layerwise.planners.nesting import USUAL
from layerwise.planners.problem import StepProblem
from layerwise.planners.redistribute import lay_out_apart
from layerwise.planners.repack import Repacked, RepackOptions, keep_if_faster, repack_microbatch
from layerwise.spec import ClusterSpec
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, long_tailed, make_model, wide_plan

MANY_NODES = WIDE_CLUSTER.model_copy(update={"num_nodes": 8})
LENGTHS = [13000, 2100, 1800, 1700, 900, 800, 750, 700, 600, 400, 350, 300, 120, 60, 20]


def _problem(lengths: list[int], budget: int = 2560) -> StepProblem:
    cost = CostModel(cluster=WIDE_CLUSTER, model=WIDE_MODEL)
    return StepProblem(lengths=np.array(lengths), cost=cost, max_tokens_per_rank=budget)


def _slow_bytes(plan: StepPlan, kind: str) -> int:
    return predict(plan, WIDE_CLUSTER, WIDE_MODEL).kinds[kind].slow_bytes


def _repacked_samples(microbatch: MicrobatchPlan) -> list[int]:
    return [sample for parent in microbatch.parents if parent.repacked for sample in parent.samples]


@pytest.mark.parametrize("strategy", ["repack", "repack+parents"])
def test_sparse_layers_leave_the_slow_link(strategy: str) -> None:
    dynamic, repacked = wide_plan("dynamic", LENGTHS), wide_plan(strategy, LENGTHS)
    assert _slow_bytes(dynamic, "sliding_attention") > 0
    assert _slow_bytes(repacked, "sliding_attention") == 0
    assert _slow_bytes(repacked, "full_attention") > 0
    assert repacked.notes["repacked"] >= 1
    assert repacked.notes["fallbacks"] == 0
    assert predict(repacked, WIDE_CLUSTER, WIDE_MODEL).seconds < predict(dynamic, WIDE_CLUSTER, WIDE_MODEL).seconds


@pytest.mark.parametrize("strategy", ["repack", "repack+parents"])
@pytest.mark.parametrize("seed", range(8))
def test_children_stay_inside_nodes(strategy: str, seed: int) -> None:
    lengths = [14000 - 1000 * seed, *long_tailed(seed, 20, cap=4000, log_mean=6.0)]
    plan = wide_plan(strategy, lengths)
    for microbatch in plan.microbatches:
        for sample in _repacked_samples(microbatch):
            for table in (microbatch.shards, microbatch.tiles["sliding_attention"]):
                ranks = table.column("rank")[table.column("sample") == sample]
                assert len({int(rank) // 8 for rank in ranks}) == 1
            full = microbatch.tiles["full_attention"]
            ranks = full.column("rank")[full.column("sample") == sample]
            (parent,) = [p for p in microbatch.parents if sample in p.samples]
            assert set(ranks.tolist()) == set(range(parent.first_rank, parent.first_rank + parent.sp_degree))


def test_repack_keeps_the_parents_of_dynamic() -> None:
    for dynamic, repacked in zip(
        wide_plan("dynamic", LENGTHS).microbatches, wide_plan("repack", LENGTHS).microbatches, strict=True
    ):
        groups = [[(p.first_rank, p.sp_degree, p.samples) for p in m.parents] for m in (dynamic, repacked)]
        assert groups[0] == groups[1]


def test_children_are_level_and_narrow() -> None:
    """16 equal samples on a parent of 16 ranks need no sharing; one long sample takes all of a node."""
    placement = solve_children(_problem([500] * 16), Parent(first_rank=0, sp_degree=16, samples=tuple(range(16))))
    assert placement is not None
    assert sorted(placement.first.tolist()) == list(range(16))
    assert set(placement.degree.tolist()) == {1}
    placement = solve_children(
        _problem([8000, *[1000] * 8]), Parent(first_rank=0, sp_degree=16, samples=tuple(range(9)))
    )
    assert placement is not None
    by_sample = dict(zip(placement.sample.tolist(), placement.degree.tolist(), strict=True))
    assert by_sample == {0: 8, **dict.fromkeys(range(1, 9), 1)}


@pytest.mark.parametrize("seed", range(5))
def test_children_share_tokens_evenly(seed: int) -> None:
    lengths = long_tailed(seed, 60, cap=4000, log_mean=6.0)
    plan = wide_plan("repack", [12000, *lengths], budget=8000, fallback=False)
    for microbatch in plan.microbatches:
        for parent in microbatch.parents:
            if parent.repacked:
                tokens = microbatch.tokens_per_rank(16)[parent.first_rank : parent.first_rank + parent.sp_degree]
                level = max(tokens.mean(), max(plan.lengths[s] for s in parent.samples) / 8)
                assert tokens.max() <= 1.15 * level


def test_a_sample_too_long_for_a_node_keeps_its_wide_layout() -> None:
    """25,000 tokens exceed 8 x 2560, so the parent cannot be repacked, wanted or not."""
    problem = _problem([25000, 100])
    assert solve_children(problem, Parent(first_rank=0, sp_degree=16, samples=(0, 1))) is None
    plan = wide_plan("repack", [25000, 100], fallback=False)
    assert plan.notes == {"parents": 1, "repacked": 0, "fallbacks": 1}
    assert not plan.microbatches[0].parents[0].repacked
    assert _slow_bytes(plan, "sliding_attention") > 0


def test_falls_back_where_children_are_slower() -> None:
    """One long sample, two nodes: one node would take twice as long, and the slow link costs nothing here."""
    cluster = WIDE_CLUSTER.model_copy(
        update={"slow_bytes_per_s": 1e15, "fast_bytes_per_s": 1e15, "message_latency_s": 0.0}
    )
    plans = [
        plan_step(
            [16000],
            cluster=cluster,
            model=WIDE_MODEL,
            strategy="repack",
            max_tokens_per_rank=2560,
            fallback=fallback,
        )
        for fallback in (True, False)
    ]
    assert [plan.notes for plan in plans] == [
        {"parents": 1, "repacked": 0, "fallbacks": 1},
        {"parents": 1, "repacked": 1, "fallbacks": 0},
    ]
    assert predict(plans[0], cluster, WIDE_MODEL).seconds < predict(plans[1], cluster, WIDE_MODEL).seconds


def test_each_microbatch_decides_for_itself() -> None:
    cluster = WIDE_CLUSTER.model_copy(update={"slow_bytes_per_s": 1e15, "message_latency_s": 0.0})
    cost = CostModel(cluster=cluster, model=WIDE_MODEL)
    problem = StepProblem(lengths=np.array([16000]), cost=cost, max_tokens_per_rank=2560)
    parent = Parent(first_rank=0, sp_degree=16, samples=(0,))
    kept = repack_microbatch(problem, (parent,), RepackOptions())
    forced = repack_microbatch(problem, (parent,), RepackOptions(fallback=False))
    assert (kept.num_repacked, forced.num_repacked) == (0, 1)
    assert kept.times(problem).seconds < forced.times(problem).seconds


@pytest.mark.parametrize("strategy", ["repack", "redistribute"])
@pytest.mark.parametrize("sync", ["layer", "step"])
@pytest.mark.parametrize("overlap_parts", [1, 2])
def test_parts_are_predicted_as_the_whole_is(strategy: str, sync: str, overlap_parts: int) -> None:
    """Groups share no rank, so narrow and wide ones are predicted apart; what is exposed is not to be counted twice.

    Nor do samples of one group decide to which part of an overlapped site those of another go.
    """
    changes = {"sync": sync, "sharded_params": True, "overlap_parts": overlap_parts}
    cost = CostModel(cluster=MANY_NODES.model_copy(update=changes), model=WIDE_MODEL)
    lengths = np.array([13000, *LENGTHS[1:], 9000, 4000, *LENGTHS[1:]])
    problem = StepProblem(lengths=lengths, cost=cost, max_tokens_per_rank=2560)
    blocks = {(0, 16): range(15), (16, 8): [15, 17, 18], (24, 8): [16, 19, 20], (32, 4): range(21, 25)}
    groups = [Parent(first_rank=first, sp_degree=sp, samples=tuple(who)) for (first, sp), who in blocks.items()]
    parents = (*groups, *(Parent(first_rank=i + 11, sp_degree=1, samples=(i,)) for i in range(25, 31)))
    layout = lay_out_apart if strategy == "redistribute" else lay_out
    for fallback in (True, False):
        found = repack_microbatch(problem, parents, RepackOptions(fallback=fallback), layout)
        assert len(found.wide) == 1
        assert found.num_repacked == 1 or fallback
        whole, parts = vars(cost.time_microbatch(found.microbatch(problem))), vars(found.times(problem))
        for kind, times in whole.pop("times").items():
            for name, value in vars(times).items():
                np.testing.assert_allclose(getattr(parts["times"][kind], name), value, rtol=1e-12)
        for name, value in whole.items():
            np.testing.assert_allclose(parts[name], value, rtol=1e-12)


def test_moves_of_all_parts_count() -> None:
    """Three groups that move hidden states to children and back, each predicted apart, and one that stays as it is."""
    cost = CostModel(cluster=MANY_NODES, model=WIDE_MODEL)
    lengths = np.array(LENGTHS * 4)
    parents = [Parent(first_rank=16 * i, sp_degree=16, samples=tuple(range(15 * i, 15 * i + 15))) for i in range(4)]
    problem = StepProblem(lengths=lengths, cost=cost, max_tokens_per_rank=2560)
    children = {parent: placement for parent in parents[1:] if (placement := solve_children(problem, parent))}
    assert len(children) == 3

    def work(some: list[Parent]) -> Work:
        return cost.work(lay_out_apart(lengths, cost.attention, some, {p: children[p] for p in some if p in children}))

    apart, whole = cost.time_works([work([parent]) for parent in parents]), cost.time_works([work(parents)])
    np.testing.assert_allclose(apart.rank_s, whole.rank_s, rtol=1e-12)
    assert apart.seconds == pytest.approx(whole.seconds, rel=1e-12)
    assert apart.slow_bytes == whole.slow_bytes


def test_gains_of_microbatches_must_add_up() -> None:
    """Ranks that meet at the end of the step: 2 s twice on one rank is slower than 3 s once on each."""
    cluster = WIDE_CLUSTER.model_copy(update={"sync": "step"})
    problem = StepProblem(
        lengths=np.array([100]), cost=CostModel(cluster=cluster, model=WIDE_MODEL), max_tokens_per_rank=2560
    )
    some = repack_microbatch(problem, (Parent(first_rank=0, sp_degree=1, samples=(0,)),), RepackOptions())

    class Timed(Repacked):
        def times(self, problem: StepProblem) -> MicrobatchTimes:
            return replace(some.times(problem), rank_s=rank_s[self], seconds=rank_s[self].max())

    rank_s: dict[Repacked, np.ndarray] = {}

    def with_rank_s(*seconds: float) -> Repacked:
        timed = Timed(**vars(some))
        rank_s[timed] = np.array(seconds)
        return timed

    old, new = [with_rank_s(3, 0), with_rank_s(0, 3)], [with_rank_s(2, 0), with_rank_s(2, 0)]
    assert keep_if_faster(problem, new, old) is old
    assert keep_if_faster(problem, old, new) is old


def test_children_respect_the_token_budget() -> None:
    """Tokens of long samples take longer: ranks level in seconds would hold over 1000 of short ones."""
    problem = _problem([500] * 8 + [10] * 1100, budget=1000)
    placement = solve_children(problem, Parent(first_rank=0, sp_degree=16, samples=tuple(range(1108))))
    assert placement is not None
    rows = shard_rows(batched(placement, problem.lengths))
    assert np.bincount(rows[:, 1], weights=rows[:, 3] - rows[:, 2]).max() <= 1000


def test_no_wide_parents_means_nothing_to_do() -> None:
    plan = wide_plan("repack+parents", [100] * 32)
    assert plan.notes == {"parents": 0, "repacked": 0, "fallbacks": 0, "moved": 0}
    assert plan.microbatches == wide_plan("dynamic", [100] * 32).microbatches


def test_repack_within_node_repacks_narrow_parents() -> None:
    lengths = [6000, 6000, *[700] * 10]
    inside = wide_plan("repack", lengths, repack_within_node=True, max_sp_degree=8, fallback=False)
    parents = [p for m in inside.microbatches for p in m.parents if p.sp_degree > 1]
    assert parents
    assert all(p.repacked for p in parents)
    assert wide_plan("repack", lengths, max_sp_degree=8).notes["parents"] == 0


def test_members_may_leave_a_group_without_any() -> None:
    """Settling moves the last sample out of a group, then settles again."""
    cluster = ClusterSpec(
        num_nodes=4,
        ranks_per_node=8,
        fast_bytes_per_s=38363925926.69864,
        slow_bytes_per_s=18599967883.832268,
        message_latency_s=1e-4,
        peak_flops_per_s=676056926.2527595,
        overlap_parts=2,
    )
    layers = {"num_layers": 2, "layer_types": ("full_attention", "sliding_attention"), "sliding_window": 512}
    model = make_model(num_heads=4, hidden_size=64, vocab_size=97, **layers)
    lengths = [4, 3, 16, 7, 4, 6, 6, 4, 2, 6, 5, 4, 11, 2, 3, 6, 10, 9, 9, 1]
    lengths += [8, 8, 9, 3, 8, 12, 18, 7, 2, 6, 9, 8, 22, 5, 2, 3, 9, 3, 2, 3]
    options = {"strategy": "repack+parents", "max_tokens_per_rank": 6, "repack_within_node": True}
    plan = plan_step(lengths, cluster=cluster, model=model, **options)
    assert plan.notes["moved"] > 0


def test_parent_solver_moves_samples_and_gains() -> None:
    """Long-tailed steps on 64 ranks: at least one of them gets faster by moving samples between parents."""
    moved, faster = 0, 0
    for seed in range(4):
        lengths = [14000, 11000, *long_tailed(seed, 120, cap=4000, log_mean=5.5)]
        plans = [
            plan_step(lengths, cluster=MANY_NODES, model=WIDE_MODEL, strategy=s, max_tokens_per_rank=2560)
            for s in ("repack", "repack+parents")
        ]
        seconds = [predict(plan, MANY_NODES, WIDE_MODEL).seconds for plan in plans]
        moved += plans[1].notes["moved"]
        faster += seconds[1] < seconds[0]
        assert seconds[1] <= seconds[0]
        assert plans[1].notes["moved"] > 0 or seconds[1] == seconds[0]
    assert moved > 0
    assert faster > 0


def test_the_parent_solver_learns_what_children_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples moved after a prediction with children make some steps faster, and none slower."""
    steps = [[9000, 7000, *long_tailed(seed, 120, cap=4000, log_mean=5.5)] for seed in range(3)]
    seconds: dict[int, list[float]] = {0: [], 2: []}
    for times, found in seconds.items():
        monkeypatch.setattr("layerwise.planners.parents.NUM_SETTLED", times)
        for lengths in steps:
            plan = plan_step(
                lengths, cluster=MANY_NODES, model=WIDE_MODEL, strategy="repack+parents", max_tokens_per_rank=2560
            )
            found.append(predict(plan, MANY_NODES, WIDE_MODEL).seconds)
    share = [settled / before for before, settled in zip(seconds[0], seconds[2], strict=True)]
    assert max(share) <= 1
    assert min(share) < 0.995


def test_a_finer_search_levels_children_better(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [[9000, 7000, *long_tailed(seed, 120, cap=4000, log_mean=5.5)] for seed in range(3)]

    def plan_all() -> float:
        options = {"cluster": MANY_NODES, "model": WIDE_MODEL, "strategy": "repack", "max_tokens_per_rank": 2560}
        return sum(predict(plan_step(lengths, **options), MANY_NODES, WIDE_MODEL).seconds for lengths in steps)

    fine_s = plan_all()
    monkeypatch.setattr("layerwise.planners.children.FINE", USUAL)
    assert fine_s < 0.99 * plan_all()


@pytest.mark.parametrize(
    ("num_ranks", "degrees"), [(1, [1]), (2, [1, 2]), (4, [1, 2, 4]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])]
)
def test_child_degrees(num_ranks: int, degrees: list[int]) -> None:
    assert child_degrees(num_ranks) == degrees
