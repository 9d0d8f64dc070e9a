"""Numbers out of metrics rows, one mapping per optimizer step as in metrics.jsonl."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = Sequence[Mapping[str, Any]]
Runs = Mapping[str, Rows]  # by strategy
Floats = NDArray[np.float64]


def column(rows: Rows, key: str) -> Floats:
    """One number of every row, float64 [steps]."""
    return np.array([row[key] for row in rows], dtype=np.float64)


def balance(rows: Rows) -> Floats:
    """Tokens of the fullest rank over the mean, float64 [steps]."""
    return column(rows, "tokens_per_rank_max") / np.maximum(column(rows, "tokens_per_rank_mean"), 1e-300)


def mean_of(rows: Rows, *path: str) -> float:
    """The mean over steps of a number found along the keys of `path`, 0 at steps that lack it.

    Bytes are averaged, not halved at the middle: a few wide steps may carry all the traffic of a run.
    """
    return float(np.mean([_at(row, path) for row in rows]))


def _at(row: Mapping[str, Any], path: tuple[str, ...]) -> float:
    value: Any = row
    for key in path:
        value = value.get(key, {})
    return value or 0.0


def by_degree(rows: Rows, key: str) -> dict[int, int]:
    """How many groups of each SP degree a whole run formed; `key` is "parents" or "children"."""
    total: Counter[int] = Counter()
    for row in rows:
        total.update({int(degree): count for degree, count in row[key].items()})
    return {degree: count for degree, count in sorted(total.items()) if count}
