"""Numbers out of metrics rows, one mapping per optimizer step as in metrics.jsonl, and how to print them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Rows = Sequence[Mapping[str, Any]]
Runs = Mapping[str, Rows]  # by strategy
Floats = NDArray[np.float64]


def format_bytes(num_bytes: float) -> str:
    """Bytes for people, in decimal units: "0 B", "512 B", "3.4 kB", "12.3 MB"; only exactly 0 reads as 0."""
    if 0 < num_bytes < 1:
        return "<1 B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if num_bytes < 999.5 or unit == "TB":
            break
        num_bytes /= 1000
    whole = unit == "B" or num_bytes >= 99.95 or num_bytes == int(num_bytes)
    return f"{num_bytes:,.0f} {unit}" if whole else f"{num_bytes:.1f} {unit}"


def kind_label(kind: str) -> str:
    """A layer kind for people: "sliding_attention" reads "sliding layers"."""
    return kind.removesuffix("_attention").replace("_", " ") + " layers"


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


def format_seconds(seconds: float) -> str:
    """Seconds for people: "340 us", "12.1 ms", "4.21 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"
