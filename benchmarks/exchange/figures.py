"""Figures with limits, as a table, as JSON and as an exit status."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from layerwise.evaluate.table import narrow_table


@dataclass(frozen=True)
class Figure:
    """One figure: `measured` is to be at most `limit`, both in `unit`. `detail` says what it was made of.

    tolerance: how far the limit is passed without being missed: what repetitions differ by, where a tie is enough.
    """

    name: str
    measured: float
    limit: float
    unit: str
    detail: str = ""
    tolerance: float = 0.0

    @property
    def reached(self) -> bool:
        """Whether it is."""
        return self.measured <= self.limit + self.tolerance


def _limit(figure: Figure) -> str:
    return f"{figure.limit:g}" + (f" (+{figure.tolerance:.2f})" if figure.tolerance else "")


def report(title: str, figures: Sequence[Figure], path: Path | None) -> int:
    """Print the table, write the JSON, and return the exit status: 1 where a figure is missed."""
    rows = [[f.name, f"{f.measured:.2f} {f.unit}", _limit(f), "yes" if f.reached else "NO", f.detail] for f in figures]
    columns = ["figure", "measured", "at most", "reached", "made of"]
    Console(width=120).print(narrow_table(title, columns, rows))
    if path:
        path.write_text(json.dumps([asdict(f) | {"reached": f.reached} for f in figures], indent=1) + "\n")
    return 0 if all(figure.reached for figure in figures) else 1
