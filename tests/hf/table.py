"""The table of docs/huggingface.md, from runs: python -m tests.hf.table docs/huggingface.md"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.hf.harness import (
    STRATEGIES,
    Samples,
    applied,
    largest_error,
    make_samples,
    on_ranks,
    one_at_a_time,
    planner_for,
)
from tests.hf.models import TINY, InFloat64, tiny_model

LENGTHS = (37, 12, 1, 23)
RANKS = (4, 16)
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"


def rows() -> Iterator[list[str]]:
    """One row per family, after the header."""
    strategies = (f"`{strategy}`, {' / '.join(map(str, RANKS))} ranks" for strategy in STRATEGIES)
    yield ["model type", "layers", "heads", *strategies, "packed, without layerwise"]
    samples = make_samples(LENGTHS)
    for name in sorted(TINY):
        model = tiny_model(name)
        ours, expected = applied(model), one_at_a_time(model, samples)
        errors = []
        for strategy in STRATEGIES:
            planners = {num_ranks: planner_for(strategy, num_ranks, model.config, LENGTHS) for num_ranks in RANKS}
            results = [on_ranks(ours, samples, planner, num_ranks)[0] for num_ranks, planner in planners.items()]
            errors.append(" / ".join(f"{largest_error(model, result, expected)[0]:.0e}" for result in results))
        yield [name, *_covers(ours.config), *errors, _leak(model, samples, expected.logits)]


def _covers(config: Any) -> tuple[str, str]:
    from layerwise.hf import model_spec

    spec = model_spec(config)
    heads = {
        f"{a.num_heads}/{a.num_kv_heads} x {a.head_dim}{f'/{a.v_head_dim}' if a.v_head_dim != a.head_dim else ''}"
        for a in map(spec.attention, spec.kinds)
        if not a.linear
    }
    layers = " + ".join(kind.removesuffix("_attention") for kind in spec.kinds)
    return layers + (", experts" if spec.num_experts else ""), ", ".join(sorted(heads))


def _leak(model: Any, samples: Samples, alone: list[torch.Tensor]) -> str:
    """The largest relative error of logits where all samples are one row and only position_ids tell them apart."""
    ids = torch.cat([torch.from_numpy(s["input_ids"]) for s in samples])[None]
    positions = torch.cat([torch.arange(len(s["input_ids"])) for s in samples])[None]
    with torch.no_grad(), InFloat64():
        packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[0].split(LENGTHS)
    return f"{max(float((a - b).norm() / b.norm()) for a, b in zip(packed, alone, strict=True)):.0e}"


def table() -> str:
    """Markdown."""
    header, *body = rows()
    return "".join(f"| {' | '.join(row)} |\n" for row in (header, ["---"] * len(header), *body))


if __name__ == "__main__":
    path = Path(sys.argv[1])
    before, _, rest = path.read_text().partition(BEGIN)
    path.write_text(before + BEGIN + table() + END + rest.partition(END)[2])
