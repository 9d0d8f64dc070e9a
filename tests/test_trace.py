"""The trace: valid for Perfetto, complete, and its bytes are those of the step."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from layerwise.errors import SpecError
from layerwise.simulate import Simulation, simulate
from layerwise.simulate.trace import trace_pieces, write_trace
from layerwise.spec import ClusterSpec
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, wide_plan

LENGTHS = [16000, 3000, *[300] * 20, *[40] * 30, 14000, *[300] * 30]


def simulated(strategy: str, **settings: Any) -> Simulation:
    options = {"fallback": False} if strategy == "redistribute" else {}
    cluster = ClusterSpec.model_validate(WIDE_CLUSTER.model_dump() | settings)
    return simulate(wide_plan(strategy, LENGTHS, **options), cluster, WIDE_MODEL)


def events_of(*args: Any, **options: Any) -> list[dict[str, Any]]:
    return json.loads("".join(trace_pieces(*args, **options)))["traceEvents"]


def slices(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


@pytest.mark.parametrize(("recompute", "num_parts"), [(False, 1), (True, 1), (True, 3)])
@pytest.mark.parametrize("strategy", ["dynamic", "redistribute"])
def test_bytes_of_all_slices_are_those_of_the_step(strategy: str, recompute: bool, num_parts: int) -> None:
    simulation = simulated(strategy, recompute=recompute, overlap_parts=num_parts)
    assert len(simulation.plan.microbatches) > 1
    sent: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
    for event in slices(events_of({strategy: simulation})):
        if "fast_bytes" in event.get("args", {}):
            total = sent[event["cat"], event["tid"]]
            total[0] += event["args"]["fast_bytes"]
            total[1] += event["args"]["slow_bytes"]
    prediction = simulation.prediction
    expected = {**prediction.kinds} | ({"moves": prediction.moves} if strategy == "redistribute" else {})
    for kind, part in expected.items():
        for rank in range(16):
            assert sent[kind, rank] == [part.rank_fast_bytes[rank], part.rank_slow_bytes[rank]]
    assert prediction.kinds["full_attention"].slow_bytes > 0


def test_slices_nest_and_fill_the_step() -> None:
    simulation = simulated("redistribute")
    for rank in (0, 15):
        own = [event for event in slices(events_of({"a": simulation})) if event["tid"] == rank]
        sites = [event for event in own if "tokens" in event.get("args", {})]
        assert sum(event["dur"] for event in sites) == pytest.approx(1e6 * simulation.prediction.seconds, rel=1e-6)
        phases = [event for event in own if event not in sites]
        assert sum(event["dur"] for event in phases) == pytest.approx(1e6 * simulation.prediction.seconds, rel=1e-6)
        starts = [event["ts"] for event in own]
        assert starts == sorted(starts)
        for site in sites:
            inside = [e for e in phases if site["ts"] - 1e-3 <= e["ts"] < site["ts"] + site["dur"] - 1e-3]
            assert {e["cat"] for e in inside} == {site["name"]}
    assert {site["args"]["microbatch"] for site in sites} == set(range(len(simulation.plan.microbatches)))


def test_exchanges_say_what_attention_hides() -> None:
    simulation = simulated("dynamic", overlap_parts=2)
    hidden: dict[tuple[str, int], float] = defaultdict(float)
    for event in slices(events_of({"a": simulation})):
        if "hidden_us" in event.get("args", {}):
            assert event["name"] in ("exchange_in", "exchange_out")
            hidden[event["cat"], event["tid"]] += event["args"]["hidden_us"]
    for kind in WIDE_MODEL.kinds:
        found = [hidden[kind, rank] for rank in range(16)]
        assert found == pytest.approx(1e6 * simulation.timeline.rank_hidden_s(kind), abs=0.1)
        assert any(found)


def test_tokens_are_those_of_the_place() -> None:
    simulation = simulated("redistribute")
    for site in slices(events_of({"a": simulation}, ranks=[0, 9])):
        if "tokens" in site.get("args", {}) and site["name"] in WIDE_MODEL.kinds:
            microbatch = simulation.plan.microbatches[site["args"]["microbatch"]]
            assert site["args"]["tokens"] == microbatch.tokens_per_rank(16, site["name"])[site["tid"]]


def test_one_process_per_node_and_strategy_and_one_thread_per_rank() -> None:
    events = events_of({"dynamic": simulated("dynamic"), "redistribute": simulated("redistribute")})
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        0: "dynamic, node 0",
        1: "dynamic, node 1",
        2: "redistribute, node 0",
        3: "redistribute, node 1",
    }
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {(2 * s + r // 8, r): f"rank {r}" for s in range(2) for r in range(16)}
    assert {(e["pid"], e["tid"]) for e in slices(events)} == set(threads)


def test_ranks_and_layers_can_be_limited() -> None:
    chosen = slices(events_of({"a": simulated("dynamic", sync="step")}, ranks=[3, 12], layers=[1]))
    assert {event["tid"] for event in chosen} == {3, 12}
    assert {event["args"]["layer"] for event in chosen if "layer" in event.get("args", {})} == {1}
    assert "lm_head" in {event["name"] for event in chosen}
    assert "full_attention" not in {event["name"] for event in chosen}  # layer 0


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = simulated("dynamic")
    write_trace(tmp_path / "t.json", {"a": simulation}, ranks=[0])
    before = (tmp_path / "t.json").read_text()
    assert json.loads(before)["displayTimeUnit"] == "ms"

    def broken(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("layerwise.simulate.trace._sent_bytes", broken)
    with pytest.raises(SpecError, match=r"--trace .*cannot be written: No space left"):
        write_trace(tmp_path / "t.json", {"a": simulation})
    assert (tmp_path / "t.json").read_text() == before
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]
