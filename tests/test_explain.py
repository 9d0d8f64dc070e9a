"""Why a sample sits where it sits: every place is a legal plan, and its seconds are those of that plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from layerwise.cli import app
from layerwise.cost import CostModel
from layerwise.errors import SpecError
from layerwise.explain.elsewhere import Moving
from layerwise.explain.sample import Explanation, _difference, explain_sample, find_terms, render
from layerwise.plan import MicrobatchPlan, StepPlan, shard_table, tile_table
from layerwise.planners import STRATEGIES, plan_step
from tests.planners.builders import WIDE_CLUSTER, WIDE_MODEL, make_cluster, make_model, wide_plan

LENGTHS = [2100, 13000, 1800, 1700, 900, 800, 750, 700, 600, 400, 350, 300, 120, 60, 20]
COST = CostModel(cluster=WIDE_CLUSTER, model=WIDE_MODEL)
IN_STEP = CostModel(cluster=WIDE_CLUSTER.model_copy(update={"sync": "step"}), model=WIDE_MODEL)


def text_of(explanation: Explanation) -> str:
    out = StringIO()
    render(explanation, Console(file=out, width=200))
    return out.getvalue()


def moving(plan: StepPlan, sample: int, cost: CostModel) -> Moving:
    index = next(i for i, m in enumerate(plan.microbatches) if sample in m.samples)
    return Moving(plan=plan, index=index, sample=sample, cost=cost)


def renumbered(plan: StepPlan, rank_of: Callable[[int], int]) -> StepPlan:
    (microbatch,) = plan.microbatches
    shards = shard_table(shard._replace(rank=rank_of(shard.rank)) for shard in microbatch.shards)
    tiles = {
        kind: tile_table(tile._replace(rank=rank_of(tile.rank)) for tile in table)
        for kind, table in microbatch.tiles.items()
    }
    return replace(plan, microbatches=(MicrobatchPlan(shards=shards, tiles=tiles),))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("sample", [1, 14])
@pytest.mark.parametrize("budget", [2560, 900])
def test_other_places_are_legal_plans_with_these_seconds(strategy: str, sample: int, budget: int) -> None:
    options = {"sp_degree": 16} if strategy == "static" else {}
    plan = wide_plan(strategy, LENGTHS, budget, **options)
    change = moving(plan, sample, COST)
    places = list(change.places())
    assert places
    for place in places:
        if place.microbatch is None:
            assert place.needed_tokens > budget
            continue
        parts = list(plan.microbatches)
        parts[change.index] = place.microbatch
        other = replace(plan, microbatches=tuple(parts))
        other.validate()
        assert COST.predict(other).seconds == pytest.approx(place.seconds)
        planned, moved = plan.microbatches[change.index], place.microbatch
        owners = moved.shards.rows[moved.shards.column("sample") == sample]
        assert owners[:, 1].min() >= place.first
        assert owners[:, 1].max() < place.first + place.degree
        for before, after in [
            (planned.shards, moved.shards),
            *zip(planned.tiles.values(), moved.tiles.values(), strict=True),
        ]:
            assert np.array_equal(
                before.rows[before.column("sample") != sample], after.rows[after.column("sample") != sample]
            )


@pytest.mark.parametrize("cost", [COST, IN_STEP], ids=["layer", "step"])
@pytest.mark.parametrize("strategy", ["redistribute", "joint"])
def test_terms_add_up_to_the_prediction(cost: CostModel, strategy: str) -> None:
    plan = plan_step(LENGTHS, cluster=cost.cluster, model=cost.model, strategy=strategy, max_tokens_per_rank=900)
    assert len(plan.microbatches) > 1
    change = moving(plan, 1, cost)
    total_s = sum(term.seconds for term in find_terms(change, change.microbatch).values())
    prediction = cost.predict(plan)
    whole_s = prediction.seconds if cost is IN_STEP else prediction.microbatches[change.index].seconds
    assert total_s == pytest.approx(whole_s)
    assert explain_sample(plan, 1, cost).seconds == pytest.approx(prediction.seconds)


def test_the_best_block_of_a_width_is_found() -> None:
    # Every rank has 100 tokens but rank 7, which has 10: sample 0 would join those, of all single ranks.
    cluster = make_cluster(16, slow_bytes_per_s=1.0, fast_bytes_per_s=1.0)
    cost = CostModel(cluster=cluster, model=make_model())
    lengths = [100] * 15 + [10]
    options = {"strategy": "static", "max_tokens_per_rank": 250, "sp_degree": 1}
    plan = renumbered(plan_step(lengths, cluster=cluster, model=cost.model, **options), lambda rank: (rank + 8) % 16)
    best = explain_sample(plan, 0, cost).options[0]
    assert (best.sp_degree, best.first_rank, best.needed_tokens) == (1, 7, 110)
    assert best.seconds is not None
    assert best.seconds > cost.predict(plan).seconds


def test_unequal_parts_fit_where_equal_ones_do_not() -> None:
    # Ranks hold 70 and 60 + 10; the 60 in equal parts would make it 100 and 40.
    cluster = make_cluster(2)
    cost = CostModel(cluster=cluster, model=make_model())
    options = {"strategy": "static", "max_tokens_per_rank": 90, "sp_degree": 1}
    plan = plan_step([60, 10, 70], cluster=cluster, model=cost.model, **options)
    assert plan.microbatches[0].tokens_per_rank(2).tolist() == [70, 70]
    both = next(place for place in moving(plan, 0, cost).places() if place.degree == 2)
    assert both.needed_tokens == 70
    assert both.microbatch is not None
    assert both.microbatch.tokens_per_rank(2).tolist() == [70, 70]


def test_a_place_without_room_says_both_numbers() -> None:
    explanation = explain_sample(wide_plan("dynamic", LENGTHS), 1, COST)
    single = next(option for option in explanation.options if option.sp_degree == 1)
    assert single.seconds is None
    assert single.needed_tokens >= 13000
    assert f"{single.needed_tokens:,} tokens on a rank, max_tokens_per_rank=2,560" in text_of(explanation)


def test_children_may_move_while_full_attention_stays() -> None:
    plan = wide_plan("repack", LENGTHS)
    explanation = explain_sample(plan, 0, COST)
    assert {option.moved for option in explanation.options} == {"all", "all but full_attention"}
    rest = [place for place in moving(plan, 0, COST).places() if "full_attention" not in place.kinds]
    moved = [place.microbatch for place in rest if place.microbatch is not None]
    assert moved
    for microbatch in moved:
        assert microbatch.tiles["full_attention"] == plan.microbatches[0].tiles["full_attention"]


def test_a_faster_place_is_admitted() -> None:
    # Two samples share a rank that could have one each.
    cluster = make_cluster(2)
    cost = CostModel(cluster=cluster, model=make_model())
    plan = plan_step(
        [100, 100], cluster=cluster, model=cost.model, strategy="static", max_tokens_per_rank=200, sp_degree=1
    )
    explanation = explain_sample(renumbered(plan, lambda rank: 0), 1, cost)
    assert explanation.options[0].seconds == pytest.approx(cost.predict(plan).seconds)
    assert "predicted to be faster: SP degree 1 on ranks 1: -" in text_of(explanation)
    assert "next best" in text_of(explain_sample(plan, 1, cost))


def test_shares_and_what_is_waited_for() -> None:
    plan = wide_plan("dynamic", LENGTHS)
    explanation = explain_sample(plan, 1, COST)
    assert explanation.token_share == pytest.approx(13000 / sum(LENGTHS))
    assert 0.5 < explanation.attention_share < 1
    assert explanation.sample.attention_ranks["full_attention"] == "0-15"
    assert explanation.is_waited_for  # its group is all ranks
    assert f"on rank {explanation.largest.rank}, which has a part of this sample" in text_of(explanation)


@pytest.mark.parametrize(
    ("added_s", "text"), [(0.0123456, "+12.35 ms"), (-8.349, "-8,349 ms"), (19.62, "+19,620 ms"), (0.0, "+0 ms")]
)
def test_added_time_is_written_out(added_s: float, text: str) -> None:
    assert _difference(4.0 + added_s, 4.0).startswith(f"{text} (")


@pytest.mark.parametrize("sample", [15, -1])
def test_a_sample_out_of_range_is_an_error(sample: int) -> None:
    with pytest.raises(SpecError, match=f"no sample {sample}: the step has 15, numbered 0 to 14"):
        explain_sample(wide_plan("dynamic", LENGTHS), sample, COST)


def run_plan(lengths: Path, *options: str) -> tuple[Exception | None, str]:
    command = ["plan", "--lengths", str(lengths), "--model", "demo", *options]
    result = CliRunner().invoke(app, command, env={"COLUMNS": "200"})
    return result.exception, result.output


@pytest.fixture
def lengths_file(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(map(str, LENGTHS)))
    return path


def test_the_command_explains_each_sample_once(lengths_file: Path) -> None:
    error, output = run_plan(lengths_file, "--cluster", "demo", *["--explain", "3", "--explain", "1", "--explain", "3"])
    assert error is None
    assert output.index("sample 3: 1,700 tokens") < output.index("sample 1: 13,000 tokens")
    assert output.count("sample 3:") == 1


def test_the_command_refuses_an_unknown_sample(lengths_file: Path) -> None:
    error, output = run_plan(lengths_file, "--cluster", "demo", "--explain", "15")
    assert isinstance(error, SpecError)
    assert "numbered 0 to 14" in str(error)
    assert not output


def test_a_cluster_beyond_planning_gets_one_message(lengths_file: Path, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text("base: paper\nnum_nodes: 100000\n")
    error, _ = run_plan(lengths_file, "--cluster", str(cluster))
    assert isinstance(error, SpecError)
    assert "num_nodes=100000 x ranks_per_node=8 = 800,000 ranks" in str(error)
