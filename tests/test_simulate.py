"""The timeline: it lasts what is predicted, ranks wait where they should, and JSON tells what a real run sends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from layerwise.commands.simulate import simulate as simulate_command
from layerwise.cost import CostModel, LayerTimes
from layerwise.errors import SpecError
from layerwise.exchange import Count
from layerwise.labels import format_seconds
from layerwise.plan import MicrobatchPlan, StepPlan
from layerwise.planners import STRATEGIES, plan_step
from layerwise.simulate import Simulation, simulate
from layerwise.simulate.drawing import draw_timelines
from layerwise.simulate.page import build_page
from layerwise.simulate.series import timeline_window
from layerwise.simulate.table import render
from layerwise.simulate.timeline import LM_HEAD, MOVES, PHASES, STEP_END, build_timeline
from layerwise.spec import ClusterSpec, ModelSpec
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, make_cluster, wide_plan
from tests.runtime.test_moves import metered_step
from tests.runtime.test_strategies import model_for, planner_for

LENGTHS = [16000, 3000, *[300] * 20, *[40] * 30]
TWICE = [*LENGTHS, 14000, *[300] * 30]
LOADED = {"recompute": True, "sharded_params": True, "overlap": 0.0}
IN_PARTS = {"recompute": True, "overlap_parts": 3}
WAIT = PHASES.index("wait")


def changed(cluster: ClusterSpec, **settings: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(cluster.model_dump() | settings)


def simulated(strategy: str, lengths: list[int] = LENGTHS, **settings: Any) -> Simulation:
    options = {} if strategy in ("static", "dynamic") else {"fallback": False}
    if strategy in ("halo", "joint"):
        options = {}
    plan = wide_plan(strategy, lengths, **options)
    return simulate(plan, changed(WIDE_CLUSTER, **settings), WIDE_MODEL)


@pytest.mark.parametrize("settings", [{}, LOADED, IN_PARTS], ids=["plain", "loaded", "parts"])
@pytest.mark.parametrize("sync", ["layer", "step"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_timeline_lasts_what_is_predicted(strategy: str, sync: str, settings: dict[str, Any]) -> None:
    result = simulated(strategy, TWICE, sync=sync, **settings)
    assert len(result.plan.microbatches) > 1
    assert result.timeline.seconds == pytest.approx(result.prediction.seconds, rel=1e-9)
    assert result.timeline.duration_s.min() >= 0
    kinds = {"full_attention", "sliding_attention", LM_HEAD} | ({STEP_END} if sync == "step" else set())
    assert set(result.timeline.kinds) == kinds | ({MOVES} if strategy == "redistribute" else set())


@pytest.mark.parametrize("sync", ["layer", "step"])
@pytest.mark.parametrize("num_parts", [1, 3])
def test_phases_add_up_to_the_layer_times(num_parts: int, sync: str) -> None:
    result = simulated("redistribute", sync=sync, overlap_parts=num_parts, **LOADED)
    times: dict[str, list[Any]] = {kind: [] for kind in WIDE_MODEL.kinds}
    for microbatch in result.plan.microbatches:
        for kind, of_layer in result.cost.layer_times(microbatch).items():
            times[kind].append(of_layer)
    fields = ["to_tiles_s", "attention_s", "from_tiles_s", "linear_s", "exposed_s"]
    for kind, parts in times.items():
        expected = [sum(getattr(part, field) for part in parts) for field in fields]
        hidden_s = sum(part.hidden_s.sum(axis=0) for part in parts)
        expected[0], expected[2] = expected[0] - hidden_s[0], expected[2] - hidden_s[1]
        expected_s = WIDE_MODEL.num_layers_of(kind) * np.array(expected)
        np.testing.assert_allclose(result.timeline.phase_s(kind)[:5], expected_s, rtol=1e-9, atol=1e-12)
        hidden_s = WIDE_MODEL.num_layers_of(kind) * hidden_s.sum(axis=0)
        np.testing.assert_allclose(result.timeline.rank_hidden_s(kind), hidden_s, rtol=1e-9)
        assert hidden_s.any() == (num_parts > 1)
        assert any(part.exposed_s.any() for part in parts)


@pytest.mark.parametrize("strategy", ["dynamic", "redistribute"])
def test_ranks_start_each_site_together_with_sync_layer(strategy: str) -> None:
    """So what all ranks spend at a kind's sites, waiting included, is what the cost model predicts for the kind."""
    result = simulated(strategy)
    end = result.timeline.start_s + result.timeline.duration_s
    site_end = end.max(axis=2)
    np.testing.assert_allclose(site_end, np.broadcast_to(site_end[..., :1], site_end.shape), rtol=1e-9)
    for kind, of_kind in result.prediction.kinds.items():
        np.testing.assert_allclose(result.timeline.phase_s(kind).sum(axis=0), of_kind.seconds, rtol=1e-9)
    assert result.timeline.phase_s(LM_HEAD).sum(axis=0) == pytest.approx(result.prediction.head_s)
    if strategy == "redistribute":
        assert result.timeline.phase_s(MOVES).sum(axis=0) == pytest.approx(result.prediction.moves.seconds)


def test_ranks_wait_only_at_the_end_with_sync_step() -> None:
    result = simulated("dynamic", TWICE, sync="step")
    waits = result.timeline.duration_s[:, :, WAIT]
    assert not waits[:, :-1].any()
    assert not waits[:-1].any()
    rank_s = np.sum([part.rank_s for part in result.prediction.microbatches], axis=0)
    np.testing.assert_allclose(waits[-1, -1], rank_s.max() - rank_s, rtol=1e-6, atol=1e-12)
    assert waits[-1, -1].max() > 0


@pytest.mark.parametrize(("recompute", "linear", "attention", "exchange"), [(False, 3, 3.5, 2), (True, 4, 4.5, 3)])
def test_backward_takes_what_the_constants_say(
    recompute: bool, linear: float, attention: float, exchange: float
) -> None:
    """What a forward takes of all of a layer's passes; of ranks that wait the share may differ, here none does."""
    timeline = simulated("static", [1600] * 2, recompute=recompute).timeline
    total, forward = timeline.phase_s("full_attention"), timeline.duration_s[0, 0]
    layers = WIDE_MODEL.num_layers_of("full_attention")
    for phase, passes in (("linear", linear), ("attention", attention), ("exchange_in", exchange)):
        index = PHASES.index(phase)
        assert forward[index].all()
        np.testing.assert_allclose(forward[index] * passes * layers, total[index])
    head = timeline.phase_s(LM_HEAD)[PHASES.index("head")]
    forward_site = next(i for i, site in enumerate(timeline.sites) if site.kind == LM_HEAD)
    np.testing.assert_allclose(timeline.duration_s[0, forward_site, PHASES.index("head")] * 3, head)


@pytest.mark.parametrize("sync", ["layer", "step"])
def test_events_of_a_rank_follow_one_another(sync: str) -> None:
    result = simulated("redistribute", TWICE, sync=sync)
    for rank in (0, 7, 15):
        events = result.timeline.events(rank)
        assert (events.duration_s > 0).all()
        np.testing.assert_allclose(events.start_s[1:], (events.start_s + events.duration_s)[:-1], rtol=1e-9)
        assert events.start_s[0] == 0
        assert events.start_s[-1] + events.duration_s[-1] == pytest.approx(result.prediction.seconds)
        assert (np.diff(events.microbatch) >= 0).all()


def test_moves_take_as_long_backward_as_forward() -> None:
    timeline = simulated("redistribute").timeline
    forward, backward = (
        timeline.duration_s[:, [i for i, site in enumerate(timeline.sites) if site[1:] == (MOVES, side)]].sum(axis=1)
        for side in (False, True)
    )
    assert forward.any()
    np.testing.assert_allclose(forward, backward)


def test_terminal_page_and_json_say_what_attention_hides(capsys: pytest.CaptureFixture[str]) -> None:
    whole, parts = simulated("dynamic"), simulated("dynamic", overlap_parts=2)
    hidden_s = {kind: float(parts.timeline.rank_hidden_s(kind).mean()) for kind in WIDE_MODEL.kinds}
    said = f"attention hides {format_seconds(hidden_s['full_attention'])} in full layers, "
    for simulation in (whole, parts):
        render(simulation, Console(width=200))
        for text in (capsys.readouterr().out, build_page([simulation])):
            assert (said in text) == ("attention hides" in text) == (simulation is parts)
            assert ("hidden by attention" in text) == (simulation is parts and "<html" in text)
    kinds = parts.to_dict()["kinds"]
    assert {kind: kinds[kind]["rank_mean_hidden_s"] for kind in hidden_s} == hidden_s


class TwoRanks(CostModel):
    """Rank 0 only exchanges, half of it forward; rank 1 only attends, 1 / 3.5 of it forward, and takes longer."""

    def layer_times(self, microbatch: MicrobatchPlan) -> dict[str, LayerTimes]:
        zero = np.zeros(2)
        layer = LayerTimes(
            linear_s=zero,
            attention_s=np.array([0.0, 14.0]),
            to_tiles_s=np.array([10.0, 0.0]),
            from_tiles_s=zero,
            hidden_s=np.zeros((2, 2, 2)),
            exposed_s=zero,
            slow_bytes=0,
        )
        return dict.fromkeys(self.model.kinds, layer)


def test_a_pass_lasts_as_long_as_that_of_the_slowest_rank() -> None:
    """Rank 1 takes 4 s forward and 10 s backward: the 5 s forward of rank 0 do not fit, so one is done backward."""
    cluster = make_cluster(2)
    plan = plan_step([8, 8], cluster=cluster, model=WIDE_MODEL, strategy="static", max_tokens_per_rank=8)
    timeline = build_timeline(plan, TwoRanks(cluster=cluster, model=WIDE_MODEL))
    exchange, attention = PHASES.index("exchange_in"), PHASES.index("attention")
    for site, lasts, exchanges in ((0, 4, 4), (-1, 10, 6)):
        phases = timeline.duration_s[0, site]
        np.testing.assert_allclose(phases[attention], [0, lasts])
        np.testing.assert_allclose(phases[exchange], [exchanges, 0])
        np.testing.assert_allclose(phases[WAIT], [lasts - exchanges, 0], atol=1e-12)


def test_backward_undoes_forward() -> None:
    timeline = simulated("redistribute", sync="step").timeline
    events = timeline.events(0)
    path = [(timeline.sites[site], PHASES[phase]) for site, phase in zip(events.site, events.phase, strict=True)]
    first = [path for path in path if path[0].layer == 0 and path[0].kind == "full_attention"]
    forward = ["exchange_in", "attention", "exchange_out", "linear"]
    assert [phase for _, phase in first] == [*forward, *reversed(forward)]
    layers = [site.layer for site in timeline.sites if site.kind in WIDE_MODEL.kinds]
    assert layers == [0, 1, 2, 3, 3, 2, 1, 0]
    # Home is where sliding layers run or where full ones do; either way hidden states cross between the two kinds.
    between = [(site.layer, site.backward) for site in timeline.sites if site.kind == MOVES]
    assert (1, False) in between
    assert between == [*between[: len(between) // 2], *((layer, True) for layer, _ in reversed(between) if not _)]


@pytest.mark.parametrize("strategy", ["dynamic", "redistribute", "repack+parents"])
def test_json_tells_what_a_real_run_sends(strategy: str) -> None:
    model, lengths = model_for((8, 2)), [200, *[20] * 10]
    plan, counted = metered_step(model, lengths, planner_for(strategy, 16, model.spec, lengths), 16)
    cluster = ClusterSpec(num_nodes=2, ranks_per_node=8)
    data = json.loads(json.dumps(simulate(plan, cluster, model.spec, element_bytes=8).to_dict()))
    sent = {kind: row for kind, row in data["kinds"].items() if "rank_calls" in row}
    assert set().union(*counted) <= set(sent)
    for kind, row in sent.items():
        counts = [counts.get(kind, Count()) for counts in counted]
        assert row["rank_fast_bytes"] == [count.fast_bytes for count in counts]
        assert row["rank_slow_bytes"] == [count.slow_bytes for count in counts]
        assert row["rank_calls"] == [count.calls for count in counts]
        assert row["slow_bytes"] == sum(count.slow_bytes for count in counts)
    assert sent["full_attention"]["slow_bytes"] > 0


def test_the_gap_is_to_the_ideal() -> None:
    result = simulated("dynamic")
    data = result.to_dict()
    assert data["seconds"] == pytest.approx(data["ideal_s"] * (1 + data["gap_to_ideal_pct"] / 100))
    assert data["gap_to_ideal_pct"] > 0
    assert data["tokens_per_rank"] == result.prediction.tokens_per_rank.tolist()


def _run(tmp_path: Path, *arguments: str, lengths: list[int] = LENGTHS) -> Any:
    (tmp_path / "lengths.txt").write_text("\n".join(map(str, lengths)))
    settings = {"cluster": WIDE_CLUSTER, "model": WIDE_MODEL}
    for name, record in settings.items():
        (tmp_path / f"{name}.yaml").write_text(json.dumps(record.model_dump(mode="json", exclude_none=True)))
    app = typer.Typer()
    app.command()(simulate_command)
    files = [f"--{name}={tmp_path / file}" for name, file in _FILES.items()]
    return CliRunner().invoke(app, [*files, "--max-tokens-per-rank=2560", *arguments])


_FILES = {"lengths": "lengths.txt", "cluster": "cluster.yaml", "model": "model.yaml"}


def test_the_command_prints_and_writes(tmp_path: Path) -> None:
    targets = {"json": "out.json", "trace": "out.trace.json", "report": "out.html", "png": "out.png"}
    pytest.importorskip("matplotlib")
    pytest.importorskip("plotly")
    options = [f"--{name}={tmp_path / file}" for name, file in targets.items()]
    result = _run(tmp_path, "--strategy=dynamic,repack", "--sync=step", *options)
    assert result.exit_code == 0, result.output
    data = json.loads((tmp_path / "out.json").read_text())
    assert list(data["strategies"]) == ["dynamic", "repack"]
    assert data["sync"] == "step"
    expected = simulate(wide_plan("dynamic", LENGTHS), changed(WIDE_CLUSTER, sync="step"), WIDE_MODEL)
    assert data["strategies"]["dynamic"]["seconds"] == expected.prediction.seconds
    assert "dynamic: " in result.output
    assert "repack: " in result.output
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert "<html" in (tmp_path / "out.html").read_text()
    # Nothing half-written is left beside what was asked for.
    assert {path.name for path in tmp_path.iterdir()} == {*targets.values(), *_FILES.values()}


def test_options_are_those_of_one_strategy(tmp_path: Path) -> None:
    result = _run(tmp_path, "--strategy=static,dynamic", "--set=static.sp_degree=16", f"--json={tmp_path / 'o.json'}")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "o.json").read_text())["strategies"]
    for name, options in (("static", {"sp_degree": 16}), ("dynamic", {})):
        expected = simulate(wide_plan(name, LENGTHS, **options), WIDE_CLUSTER, WIDE_MODEL)
        assert found[name]["seconds"] == expected.prediction.seconds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sync=never"], "--sync 'never' is unknown; legal values: layer, step"),
        (["--strategy=dynamic,dynamic"], "give one or more different ones"),
        (
            ["--set=sp_degree=16"],
            "begin with the strategy, as in dynamic.sp_degree=...; simulated: dynamic, repack+par",
        ),
        (["--trace-ranks=0-3"], "no effect without --trace"),
        (["--trace=t.json", "--trace-ranks=0-16"], "'0-16' is not in 0-15"),
        (["--trace=t.json", "--trace-layers=x"], "'x' is neither a number nor a range"),
        (["--json=nowhere/out.json"], "--json nowhere/out.json: no such folder 'nowhere'"),
        (["--json=out.json", "--trace=./out.json"], "--json and --trace name the same file, out.json"),
        (["--png=out.xyz"], "--png out.xyz: no format for pictures; legal suffixes: "),
        (["--png=out"], "--png out: no format for pictures; legal suffixes: "),
    ],
)
def test_wrong_options_are_named(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = _run(tmp_path, *arguments)
    assert isinstance(result.exception, SpecError)
    assert not result.output
    assert message in str(result.exception)


def test_pictures_show_one_period_around_the_head() -> None:
    result = simulated("redistribute")
    window = timeline_window(result)
    assert len(window.labels) == len(set(window.labels)) == len(window.colours)
    longest = next(m for m in result.plan.microbatches if 0 in m.samples)
    assert window.tokens.tolist() == longest.tokens_per_rank(16).tolist()
    assert set(window.rank.tolist()) == set(range(16))
    # Ranks meet at every layer, so the window covers all of every rank's time.
    busy = np.bincount(window.rank, weights=window.duration_ms)
    np.testing.assert_allclose(busy, window.end_ms, rtol=1e-9)


def test_a_page_names_every_strategy_and_loads_nothing() -> None:
    pytest.importorskip("plotly")
    page = build_page([simulated("dynamic"), simulated("redistribute")])
    assert page.count("<h2>dynamic: ") == page.count("<h2>redistribute: ") == 1
    assert "sliding layers: exchange" in page
    assert "<script src=" not in page


def test_a_drawing_has_two_panels_for_each_strategy() -> None:
    pytest.importorskip("matplotlib")
    figure = draw_timelines([simulated("dynamic"), simulated("redistribute")])
    titles = [ax.get_title(loc="left") for ax in figure.axes]
    assert [title.split(":")[0] for title in titles] == ["dynamic", "", "redistribute", ""]


def test_a_model_whose_layers_are_all_of_one_kind() -> None:
    model = ModelSpec.model_validate(
        WIDE_MODEL.model_dump() | {"layer_types": ("full_attention",), "sliding_window": None}
    )
    plan = wide_plan("dynamic", LENGTHS)
    full = StepPlan(
        **vars(plan)
        | {
            "attention": {"full_attention": plan.attention["full_attention"]},
            "microbatches": tuple(
                type(m)(shards=m.shards, tiles={"full_attention": m.tiles["full_attention"]}, parents=m.parents)
                for m in plan.microbatches
            ),
        }
    )
    result = simulate(full, WIDE_CLUSTER, model)
    assert result.timeline.seconds == pytest.approx(result.prediction.seconds, rel=1e-9)
    assert timeline_window(result).end_ms < 1e3 * result.prediction.seconds
