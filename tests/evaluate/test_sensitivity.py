"""Variants of a workload, the steps they are judged on, and the verdict."""

from pathlib import Path

import numpy as np

from layerwise.evaluate.sensitivity import (
    VariantResult,
    count_steps,
    heaviest_steps,
    make_variants,
    run_variants,
    sensitivity_cells,
    verdict,
)
from layerwise.evaluate.table import evaluate
from tests.evaluate.builders import small_workload, step_result, strategy_step


def test_every_axis_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "some.txt"
    path.write_text("5\n")
    variants = {(v.axis, v.value): v.workload for v in make_variants(small_workload(), [path])}
    cluster = variants["link ratio", "3.5"].cluster_spec
    assert cluster.fast_bytes_per_s / cluster.slow_bytes_per_s == 3.5
    assert variants["nodes", "128"].cluster_spec.num_ranks == 128 * 8
    assert variants["ranks per node", "72 x 2"].cluster_spec.ranks_per_node == 72
    assert variants["window", "512"].model_spec.sliding_window == 512
    assert variants["pattern", "1F1S"].model_spec.all_layer_types == ("full_attention", "sliding_attention") * 2
    assert variants["query heads", "128"].model_spec.num_heads == 128
    assert variants["lengths", "long"].mixture == {"long": 1.0}
    assert variants["lengths", "some"].draw_steps(1)[0].max() == 5


def test_heaviest_steps_are_those_with_the_longest_samples() -> None:
    workload = small_workload(mixture={"short": 0.9, "long": 0.1})
    steps = workload.draw_steps(10)
    kept = heaviest_steps(workload, 3, 10)
    least = min(np.square(step).sum() for step in kept)
    assert sum(np.square(step).sum() >= least for step in steps) == len(kept) == 3


def test_equal_variants_are_planned_once() -> None:
    variants = [v for v in make_variants(small_workload()) if v.axis in ("window", "pattern")]
    variants = [v for v in variants if v.value in ("1024", "1F3S", "1F1S")] * 2
    assert count_steps(variants, 1) == 3
    done: list[int] = []
    results = run_variants(variants, ("dynamic", "repack"), num_steps=1, num_workers=1, on_step=lambda: done.append(1))
    assert len(done) == 3
    assert [(r.axis, r.value) for r in results] == [(v.axis, v.value) for v in variants]
    assert results[0].evaluation is results[3].evaluation
    assert results[0].evaluation.num_steps == 1


def _result(value: str, repack_s: float) -> VariantResult:
    steps = [step_result(dynamic=strategy_step(10.0), repack=strategy_step(repack_s))]
    return VariantResult(axis="nodes", value=value, evaluation=evaluate(steps))


def test_the_verdict_names_where_it_does_not_pay() -> None:
    results = [_result("4", 9.0), _result("8", 9.95)]
    assert verdict(results) == "Repacking saves less than 1% with: nodes 8."
    assert verdict(results[:1]) == "Repacking saves at least 1% everywhere."
    assert sensitivity_cells(results) == [
        ["nodes 4", "1/1", "10.00", "40.00", "yes"],
        ["nodes 8", "1/1", "0.50", "40.00", "no"],
    ]
