"""The same figures with one setting of the workload changed: where repacking pays, and where it does not.

Only few steps are planned for each variant: those whose samples have the most full-attention work of all that the
workload draws, since wide parents form there. Equal lengths give equal steps, so most variants are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from layerwise.evaluate.steps import BASELINE, run_steps, step_jobs
from layerwise.evaluate.table import Evaluation, evaluate, narrow_table
from layerwise.evaluate.workload import Workload
from layerwise.plan import Ints
from layerwise.spec import FULL, SLIDING, ClusterSpec, ModelSpec

DEFAULT_STEPS = 12
REPACKING = ("repack", "repack+parents", "joint")
# Below this saving, the noise of a real run hides the gain.
PAYS_PCT = 1.0


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The workload with one setting changed: `axis` says which, `value` to what."""

    axis: str
    value: str
    workload: Workload


@dataclass(frozen=True, kw_only=True, eq=False)
class VariantResult:
    """The figures of a variant over its steps."""

    axis: str
    value: str
    evaluation: Evaluation

    @property
    def best_saving_pct(self) -> float:
        """The highest saving of a repacking strategy."""
        return max((f.saving_pct for name, f in self.evaluation.all.items() if name in REPACKING), default=0.0)

    @property
    def pays(self) -> bool:
        """Whether a repacking strategy saves at least PAYS_PCT."""
        return self.best_saving_pct >= PAYS_PCT

    def to_json(self) -> dict[str, Any]:
        """The figures over the steps planned."""
        strategies = {name: asdict(figures) for name, figures in self.evaluation.all.items()}
        return {
            "axis": self.axis,
            "value": self.value,
            "num_steps": self.evaluation.num_steps,
            "wide_steps": self.evaluation.wide_steps,
            "pays": self.pays,
            "strategies": strategies,
        }


def make_variants(workload: Workload, length_files: Sequence[Path] = ()) -> list[Variant]:
    """Every setting of every axis; each source of the mixture, and each length file given, alone. Raises SpecError."""
    cluster, model = workload.cluster_spec, workload.model_spec
    base = workload.change(cluster=cluster.model_dump(), model=model.model_dump())
    variants = [*_cluster_variants(base, cluster), *_model_variants(base, model), *_length_variants(base, length_files)]
    return [Variant(axis=axis, value=value, workload=changed) for axis, value, changed in variants]


Changed = Iterator[tuple[str, str, Workload]]


def _cluster_variants(base: Workload, cluster: ClusterSpec) -> Changed:
    def change(**settings: Any) -> Workload:
        ranks = settings.get("num_nodes", cluster.num_nodes) * settings.get("ranks_per_node", cluster.ranks_per_node)
        experts = gcd(ranks, cluster.expert_parallel_degree)
        return base.change(cluster=cluster.model_dump() | {"expert_parallel_degree": experts} | settings)

    for ratio in (1.0, 3.5, 7.0, 14.0):
        yield "link ratio", f"{ratio:g}", change(slow_bytes_per_s=cluster.fast_bytes_per_s / ratio)
    for size in (4, 8, 72):
        nodes = max(2, cluster.num_ranks // size)
        yield "ranks per node", f"{size} x {nodes}", change(ranks_per_node=size, num_nodes=nodes)
    for nodes in (4, 8, 16, 32, 64, 128):
        yield "nodes", str(nodes), change(num_nodes=nodes)


def _model_variants(base: Workload, model: ModelSpec) -> Changed:
    def change(**settings: Any) -> Workload:
        return base.change(model=model.model_dump() | settings)

    if SLIDING in model.kinds:
        for window in (128, 512, 1024, 2048, 4096, 8192):
            yield "window", str(window), change(sliding_window=window)
        for sparse in (1, 3, 5):
            pattern = (FULL, *[SLIDING] * sparse)
            layers = max(1, model.num_layers // len(pattern)) * len(pattern)
            yield "pattern", f"1F{sparse}S", change(layer_types=pattern, num_layers=layers)
    for heads in (16, 32, 64, 128):
        by_kind = {kind: gcd(heads, kv_heads) for kind, kv_heads in model.kv_heads_by_kind.items()}
        changed = change(num_heads=heads, num_kv_heads=gcd(heads, model.num_kv_heads), kv_heads_by_kind=by_kind)
        yield "query heads", str(heads), changed


def _length_variants(base: Workload, length_files: Sequence[Path]) -> Changed:
    for name, source in base.lengths.items():
        yield "lengths", name, base.change(mixture={name: 1.0}, lengths={name: source})
    for path in length_files:
        name = path.name.partition(".")[0]
        yield "lengths", name, base.change(mixture={name: 1.0}, lengths={name: str(path)})


def heaviest_steps(workload: Workload, num_steps: int, num_drawn: int) -> list[Ints]:
    """The `num_steps` of the first `num_drawn` steps whose lengths have the highest sum of squares, in order drawn."""
    steps = workload.draw_steps(max(num_steps, num_drawn))
    work = np.array([np.square(lengths.astype(np.float64)).sum() for lengths in steps])
    return [steps[index] for index in np.sort(np.argsort(-work, kind="stable")[:num_steps]).tolist()]


def run_variants(
    variants: Sequence[Variant],
    strategies: tuple[str, ...],
    *,
    num_steps: int = DEFAULT_STEPS,
    num_workers: int | None = None,
    on_step: Callable[[], None] = lambda: None,
) -> list[VariantResult]:
    """The figures of every variant; equal workloads are planned once.

    A bigger cluster draws fewer steps to choose from: as many tokens as the smallest cluster draws.
    """
    distinct = {variant.workload.model_dump_json(): variant.workload for variant in variants}
    fewest_tokens = min(workload.step_tokens for workload in distinct.values())
    jobs = []
    for workload in distinct.values():
        drawn = workload.num_steps * fewest_tokens // workload.step_tokens
        jobs += step_jobs(workload, strategies, heaviest_steps(workload, num_steps, drawn))
    steps = run_steps(jobs, num_workers=num_workers, on_step=on_step)
    parts = [steps[first : first + num_steps] for first in range(0, len(steps), num_steps)]
    evaluations = dict(zip(distinct, (evaluate(part) for part in parts), strict=True))
    return [
        VariantResult(axis=v.axis, value=v.value, evaluation=evaluations[v.workload.model_dump_json()])
        for v in variants
    ]


def count_steps(variants: Sequence[Variant], num_steps: int) -> int:
    """How often `on_step` will be called."""
    return num_steps * len({variant.workload.model_dump_json() for variant in variants})


def sensitivity_columns(results: Sequence[VariantResult]) -> list[str]:
    """Headings of `sensitivity_cells`."""
    return ["setting", "wide", *_names(results), "pays"]


def sensitivity_cells(results: Sequence[VariantResult]) -> list[list[str]]:
    """A row per variant: the saving of each strategy in percent of the baseline's seconds, and the ideal's."""
    return [
        [
            f"{result.axis} {result.value}",
            f"{result.evaluation.wide_steps}/{result.evaluation.num_steps}",
            *(f"{result.evaluation.all[name].saving_pct:.2f}" for name in _names(results)),
            "yes" if result.pays else "no",
        ]
        for result in results
    ]


def _names(results: Sequence[VariantResult]) -> list[str]:
    return [name for name in results[0].evaluation.all if name != BASELINE]


def verdict(results: Sequence[VariantResult]) -> str:
    """Where repacking does not pay, in one sentence."""
    losers = [f"{result.axis} {result.value}" for result in results if not result.pays]
    if not losers:
        return f"Repacking saves at least {PAYS_PCT:g}% everywhere."
    return f"Repacking saves less than {PAYS_PCT:g}% with: {', '.join(losers)}."


def render_sensitivity(results: Sequence[VariantResult], console: Console) -> None:
    """Print the table and the verdict."""
    title = "Saving in %, on the steps with the most attention work"
    console.print(narrow_table(title, sensitivity_columns(results), sensitivity_cells(results)))
    console.print(verdict(results))
