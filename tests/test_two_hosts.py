"""The parts of the two-host bench: pacing, clocks, hosts and figures; `python -m benchmarks.two_hosts` runs it all."""

from __future__ import annotations

import io
import itertools
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import Tensor

from benchmarks.two_hosts import hosts
from benchmarks.two_hosts.clocks import Call, Spent, messages_between_hosts, spent_by_kind
from benchmarks.two_hosts.figures import check_figures, saving, summarize
from benchmarks.two_hosts.links import Links, adjust
from benchmarks.two_hosts.meeting import meeting_point, serve_meetings
from benchmarks.two_hosts.pacing import attention_forward_s
from benchmarks.two_hosts.picture import plot_results
from benchmarks.two_hosts.rank import predict
from benchmarks.two_hosts.records import Predicted, Results, Run, Settings, Variant
from benchmarks.two_hosts.shaping import HEADER_BYTES, Sent
from benchmarks.two_hosts.step import Rank
from benchmarks.two_hosts.table import render
from benchmarks.two_hosts.workload import (
    LONG_TOKENS,
    MODEL,
    RANKS_PER_HOST,
    cluster_of,
    planner_of,
    step_lengths,
    wanted_links,
)
from layerwise import LocalWorld
from layerwise.cost import BACKWARD_ATTENTION, CostModel
from layerwise.errors import DataError, PlanError, UnsupportedError
from layerwise.evaluate.steps import has_wide_parent
from layerwise.groups import World
from layerwise.kernels import Segments, varlen_attention
from layerwise.plan import StepPlan
from layerwise.runtime import build_routes

CLUSTER = cluster_of(2, wanted_links(7.0))
COST = CostModel(cluster=CLUSTER, model=MODEL)


class Alone:
    """A meeting point that waits for nobody: the ranks of a LocalWorld wait in their exchanges."""

    def __init__(self) -> None:
        self.count = itertools.count()

    def meet(self) -> float:
        return float(next(self.count))


@cache
def plan_of(strategy: str) -> StepPlan:
    return planner_of(strategy, CLUSTER)(step_lengths(2, 0))


@pytest.mark.parametrize(
    ("strategy", "overlap_parts"), [("redistribute", 1), ("halo", 1), ("joint", 1), ("dynamic", 2)]
)
def test_ranks_send_what_is_predicted_and_get_back_what_they_sent(strategy: str, overlap_parts: int) -> None:
    plan = replace(plan_of(strategy), overlap_parts=overlap_parts)

    def on_rank(world: World) -> int:
        rank = Rank(world, COST, Alone())  # type: ignore[arg-type]
        rank.pacer.speed = float("inf")
        rank.run(rank.prepare(plan))
        if overlap_parts > 1:  # all 16 ranks are one block: four calls per layer and part
            assert len(rank.meter.calls) == 4 * MODEL.num_layers * overlap_parts
        return sum(count.slow_bytes for count in rank.meter.counts.values())

    prediction = COST.predict(plan)
    predicted = [prediction.moves, *prediction.kinds.values()]
    sent = LocalWorld(plan.num_ranks, RANKS_PER_HOST).run(on_rank)
    assert sent == np.sum([part.rank_slow_bytes for part in predicted], axis=0).tolist()


def test_predictions_are_of_as_many_parts_as_the_variant_has() -> None:
    plan = plan_of("dynamic")
    plans = {(Variant("dynamic", n), 0): replace(plan, overlap_parts=n) for n in (1, 2)}
    whole, parts = predict(plans, CLUSTER)
    assert (whole.strategy, parts.strategy) == ("dynamic", "dynamic, 2 parts")
    in_parts = CLUSTER.model_copy(update={"overlap_parts": 2})
    assert (whole.step_s, parts.step_s) == tuple(
        CostModel(cluster=c, model=MODEL).predict(plan).seconds for c in (CLUSTER, in_parts)
    )
    assert all(parts.exchange_s[kind] < seconds for kind, seconds in whole.exchange_s.items() if seconds)


def test_a_row_that_does_not_come_back_is_an_error() -> None:
    def on_rank(world: World) -> None:
        rank = Rank(world, COST, Alone())  # type: ignore[arg-type]
        rank.pacer.speed = float("inf")
        microbatches = rank.prepare(plan_of("repack"))
        microbatches[0].hidden.data[:] = torch.nan  # equal to nothing, itself included
        rank.run(microbatches)

    with pytest.raises(PlanError, match="did not come back"):
        LocalWorld(16, RANKS_PER_HOST).run(on_rank)


@pytest.mark.parametrize("strategy", ["static", "halo", "joint"])
def test_kernel_calls_are_paced_as_the_cost_model_times_the_plan(strategy: str) -> None:
    plan = plan_of(strategy)
    for index, microbatch in enumerate(plan.microbatches):
        times = COST.layer_times(microbatch)

        def on_rank(world: World, index: int = index) -> list[float]:
            routes = build_routes(plan, index, world)
            return [
                sum(attention_forward_s(layer, c.segments, c.h1 - c.h0) for c in routes.by_kind[layer.kind].calls)
                for layer in COST.layers
            ]

        forward_s = np.array(LocalWorld(16, RANKS_PER_HOST).run(on_rank)).T
        expected = [times[layer.kind].attention_s / (1 + BACKWARD_ATTENTION) for layer in COST.layers]
        np.testing.assert_allclose(forward_s, expected, rtol=1e-12)


def test_attention_takes_a_kernel_of_the_callers_own() -> None:
    seen = []

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, segments: Segments, window: int | None, scale: float, sinks: Tensor | None
    ) -> Tensor:
        seen.append((segments.q_lens, len(k), window, scale))
        return 2 * q

    q, kv = torch.randn(3, 2, 4), torch.randn(5, 1, 4)
    out = varlen_attention(q, kv, kv, Segments((3, 0), (3, 2)), window=2, backend=kernel)
    assert torch.equal(out, 2 * q)
    assert seen == [((3,), 3, 2, 0.5)]


@pytest.mark.parametrize("num_hosts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_steps_have_wide_parents_that_repacking_and_joint_planning_improve(num_hosts: int) -> None:
    cost = CostModel(cluster=cluster_of(num_hosts, wanted_links(7.0)), model=MODEL)
    for step in range(len(LONG_TOKENS[num_hosts])):
        lengths = step_lengths(num_hosts, step)
        plans = {
            name: planner_of(name, cost.cluster)(lengths) for name in ("dynamic", "redistribute", "repack", "joint")
        }
        seconds = {name: cost.predict(plan).seconds for name, plan in plans.items()}
        assert has_wide_parent(plans["dynamic"])
        assert seconds["joint"] < 0.98 * seconds["repack"]
        assert seconds["repack"] < 0.98 * seconds["redistribute"]
        assert seconds["redistribute"] < seconds["dynamic"]


def test_waiting_for_late_ranks_is_told_from_exchanging() -> None:
    pair, other = (0, 2), (2, 3)
    calls = [
        [Call("full", pair, 1.0, 1.0, 4.0), Call("sparse", pair, 5.0, 5.0, 5.5)],
        [Call("full", pair, 3.0, 3.0, 4.5), Call("sparse", pair, 5.25, 5.25, 5.75)],
        [Call("full", other, 0.0, 0.0, 9.0)],
    ]
    assert spent_by_kind(calls) == [
        {"full": Spent(3.0, 2.0), "sparse": Spent(0.5, 0.25)},
        {"full": Spent(1.5, 0.0), "sparse": Spent(0.5, 0.0)},
        {"full": Spent(9.0, 0.0)},
    ]


def test_what_a_rank_computes_while_rows_travel_is_not_waiting() -> None:
    """The last rank comes at 2: the first waits from 1.5, the second for what is left at 3, the third not at all."""
    calls = [
        [Call("full", (0, 3), begin_s, *rest)] for begin_s, *rest in ((1.0, 1.5, 4.0), (1.0, 3.0, 4.0), (2.0, 5.0, 5.0))
    ]
    assert spent_by_kind(calls) == [{"full": Spent(2.5, 0.5)}, {"full": Spent(1.0, 0.0)}, {"full": Spent(0.0, 0.0)}]


def test_messages_between_hosts_are_those_to_peers_on_other_hosts() -> None:
    calls = [Call("full", block, 0.0, 0.0, 1.0) for block in ((0, 4), (0, 8), (0, 16), (0, 32))]
    assert [messages_between_hosts([call], 5, 8) for call in calls] == [0, 0, 8, 24]
    assert messages_between_hosts(calls[2:], 9, 8) == 8 + 24


def links_of(ratio: float) -> Links:
    return Links(fast_bytes_per_s=ratio * 1e6, slow_bytes_per_s=1e6, latency_s=1e-3)


def adjust_a_link(behaviour: Callable[[float], float]) -> tuple[Links, list[float]]:
    """`behaviour`: the ratio that is measured at a rate of the slow link."""
    rates: list[float] = []
    return adjust(lambda: links_of(behaviour(rates[-1])), rates.append, 10.0, ratio=7.0, tolerance=0.03), rates


def test_the_slow_link_is_adjusted_until_the_ratio_is_measured() -> None:
    found, rates = adjust_a_link(lambda rate: 100.0 / rate)
    assert found.ratio == pytest.approx(7.0, rel=0.03)
    assert rates == pytest.approx([10.0, 100.0 / 7])


def test_links_that_do_not_settle_are_an_error_that_shows_what_was_measured() -> None:
    with pytest.raises(DataError, match=r"ratio of 7 within 3%: measured 9\.00, 9\.00"):
        adjust_a_link(lambda rate: 9.0)


def test_ranks_meet_when_the_last_one_comes_and_learn_when_one_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "meeting"
    with serve_meetings(path, 2), meeting_point(path) as point, socket.socket(socket.AF_UNIX) as other:
        other.connect(str(path))
        begin_s = time.monotonic()
        other.sendall(b".")
        at_s = point.meet()
        assert begin_s <= at_s <= time.monotonic()
        assert int.from_bytes(other.recv(8)) / 1e9 == at_s
        other.close()
        with pytest.raises(ConnectionError):
            point.meet()


def run_of(strategy: str, repetition: int, step_s: float, sparse_s: float, sent_bytes: int) -> Run:
    """Two ranks, of which the second waits for half of its sparse exchanges."""
    return Run(
        strategy=strategy,
        step=0,
        repetition=repetition,
        step_s=step_s,
        exchange_s={"full_attention": [0.1, 0.1], "sliding_attention": [sparse_s, 2 * sparse_s]},
        wait_s={"full_attention": [0.0, 0.0], "sliding_attention": [0.0, sparse_s]},
        counted_bytes=sent_bytes,
        messages=10,
        sent=Sent(wire_bytes=sent_bytes + 7 * HEADER_BYTES + 10 * 100, packets=7),
    )


# Of each strategy: seconds of a step, of them predicted, in sparse exchanges; bytes between hosts.
REACHED = {
    "dynamic": (10.0, 10.2, 1.0, 1000),
    "redistribute": (9.4, 9.3, 0.2, 500),
    "repack": (9.0, 9.2, 0.2, 400),
    "repack+parents": (9.0, 9.2, 0.2, 400),
    "joint": (8.5, 8.4, 0.1, 100),
}


def results_of(rows: dict[str, tuple[float, float, float, int]], ratio: float = 7.0, overlap_parts: int = 1) -> Results:
    """Three repetitions, of which every second is as given, and the others are off by as much."""
    kinds = {"full_attention": 0.1, "sliding_attention": 0.1, "moves": 0.0}
    return Results(
        settings=Settings(
            num_hosts=2,
            ratio=7.0,
            repetitions=3,
            strategies=tuple(name for name in rows if "," not in name),
            num_steps=1,
            overlap_parts=overlap_parts,
            folder=Path("/nowhere"),
        ),
        links=links_of(ratio),
        links_after=links_of(ratio),
        message_overhead_bytes=100.0,
        samples=[10],
        tokens=[1000],
        longest_tokens=[500],
        predicted=[
            Predicted(strategy=name, step=0, step_s=predicted_s, mfu=0.5, slow_bytes=sent, exchange_s=kinds)
            for name, (_, predicted_s, _, sent) in rows.items()
        ],
        runs=[
            run_of(name, repetition, step_s * (1 + off), sparse_s, sent)
            for name, (step_s, _, sparse_s, sent) in rows.items()
            for repetition, off in enumerate((-0.01, 0.0, 0.01))
        ],
        lateness_s={"p50": 1e-4, "p99": 1e-3},
    )


def test_all_figures_are_reached_by_measurements_that_reach_them() -> None:
    checks = check_figures(results_of(REACHED))
    assert [check.name for check in checks if not check.reached] == []
    assert len(checks) == 5 + 2 * len(REACHED)


@pytest.mark.parametrize(
    ("change", "missed"),
    [
        ({"repack": (9.0, 9.2, 0.21, 400)}, "sparse exchange, repack / dynamic"),
        ({"redistribute": (9.05, 9.3, 0.2, 500)}, "repack saves over redistribute, %"),
        ({"repack+parents": (9.3, 9.2, 0.2, 400)}, "repack+parents saves over dynamic, %"),
        ({"joint": (9.01, 8.4, 0.1, 100)}, "joint saves over repack+parents, %"),
        ({"joint": (8.5, 7.7, 0.1, 100)}, "joint: step beyond predicted, %"),
    ],
)
def test_a_figure_that_is_missed_is_named(change: dict[str, tuple[float, float, float, int]], missed: str) -> None:
    assert missed in [check.name for check in check_figures(results_of(REACHED | change)) if not check.reached]


def test_a_ratio_off_by_more_than_five_percent_is_missed() -> None:
    assert [c.name for c in check_figures(results_of(REACHED, ratio=7.4)) if not c.reached] == ["fast link / slow link"]


def test_bytes_of_the_interface_are_compared_without_headers_and_messages_own() -> None:
    results = results_of(REACHED)
    extra = results.model_copy(update={"message_overhead_bytes": 99.0})  # 10 messages, so 10 bytes of 400 too many
    assert summarize(results)["repack"].bytes_error_pct == 0.0
    assert summarize(extra)["repack"].bytes_error_pct == pytest.approx(2.5)


def test_a_step_with_overlap_takes_what_is_predicted_of_it_and_no_more_than_without() -> None:
    rows = {"dynamic": REACHED["dynamic"], "static": REACHED["dynamic"]}
    missed = ["dynamic, 2 parts: saves over none, %", "dynamic, 2 parts: step beyond predicted, %"]
    for seconds, expected in ((9.0, []), (8.0, missed[1:]), (10.1, missed)):
        results = results_of(rows | {"dynamic, 2 parts": (seconds, 9.1, *REACHED["dynamic"][2:])}, overlap_parts=2)
        assert [variant.name for variant in results.settings.variants] == ["dynamic", "dynamic, 2 parts", "static"]
        assert [check.name for check in check_figures(results) if not check.reached] == expected


def test_savings_are_taken_within_a_repetition() -> None:
    measured = summarize(results_of(REACHED))
    found = saving(measured, "repack", "dynamic")
    assert (found.low_pct, found.pct, found.high_pct) == pytest.approx((10.0, 10.0, 10.0))  # both are off alike
    assert found.predicted_pct == pytest.approx(100 * (1 - 9.2 / 10.2))


def test_results_become_tables_and_a_picture() -> None:
    results = results_of(REACHED)
    console = Console(width=80, record=True, file=io.StringIO())
    render(results, console)
    text = console.export_text()
    assert all(name in text for name in REACHED)
    assert "paced" in text
    assert len(plot_results(results).axes) == 3


def test_without_root_or_tools_the_way_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(UnsupportedError, match="need root"):
        hosts.check_tools()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(UnsupportedError, match="'tc' is missing: install iproute2"):
        hosts.check_tools()


def namespaces() -> list[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()]


@pytest.fixture
def can_make_hosts() -> None:
    try:
        hosts.check_tools()
        with hosts.make_hosts(1):
            pass
    except UnsupportedError as error:
        pytest.skip(f"hosts cannot be made here: {error}")


@pytest.mark.usefixtures("can_make_hosts")
def test_hosts_reach_one_another_and_are_gone_after_a_failure() -> None:
    names: list[str] = []

    def work(made: list[hosts.Host]) -> None:
        names.extend(host.namespace for host in made)
        assert set(names) < set(namespaces())
        with subprocess.Popen(made[1].command(sys.executable, "-c", SERVER), stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            assert server.stdout.readline()  # it listens
            client = f"import socket; print(socket.create_connection(({made[1].address!r}, 5000)).recv(5))"
            heard = subprocess.run(made[0].command(sys.executable, "-c", client), capture_output=True, check=True)
            assert heard.stdout == b"b'hello'\n"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), hosts.make_hosts(2) as made:
        work(made)
    assert not set(names) & set(namespaces())


SERVER = """
import socket
listener = socket.create_server(("0.0.0.0", 5000))
print("listening", flush=True)
listener.accept()[0].sendall(b"hello")
"""


@pytest.mark.usefixtures("can_make_hosts")
def test_what_a_killed_run_left_is_removed_and_what_a_living_one_has_is_not() -> None:
    dead = f"{hosts.PREFIX}-{os.getpid()}.1-host0"  # this process has started since
    living = f"{hosts.PREFIX}-{os.getpid()}.{hosts._start_ticks(os.getpid())}-other"
    for name in (dead, living):
        subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        hosts.remove_stale()
        assert dead not in namespaces()
        assert living in namespaces()
    finally:
        for name in (dead, living):
            hosts.remove_namespace(name)
