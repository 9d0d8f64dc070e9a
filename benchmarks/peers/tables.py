"""The rows of a comparison as tables: on the terminal, and in docs/peers.md."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from rich.table import Table

from benchmarks.peers.compare import Row
from layerwise.errors import DataError

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"


def rich_table(rows: list[Row], title: str) -> Table:
    """For the terminal: one section for each source, one line for each planner."""
    table = Table(title=title)
    for index, name in enumerate(("planner", "x dynamic", "range", "won", "lost", "ms", "fullest")):
        table.add_column(name, justify="right" if index else "left", no_wrap=True)
    for source, group in groupby(rows, key=lambda row: row.source):
        table.add_section()
        table.add_row(f"[bold]{source}")
        for row in group:
            relative = (f"{row.relative:.3f}", f"{row.best:.3f}-{row.worst:.3f}")
            failed = f" ({row.failed} failed)" if row.failed else ""
            last = (str(row.won), str(row.lost), f"{row.planning_ms:.0f}", f"{row.fullest:.2f}")
            table.add_row(row.peer + failed, *relative, *last)
    return table


def markdown(rows: list[Row], title: str) -> str:
    """For a document: one line for each source, one column for each planner, then what holds for all sources."""
    sources, peers = list(dict.fromkeys(r.source for r in rows)), list(dict.fromkeys(r.peer for r in rows))
    cell = {(row.source, row.peer): row for row in rows}
    own = {peer: [cell[source, peer] for source in sources] for peer in peers}
    lines = [["source", *peers], ["---"] * (1 + len(peers))]
    lines += [[source, *(_cell(cell[source, peer]) for peer in peers)] for source in sources]
    lines.append(["planning, CPU ms", *(_range([row.planning_ms for row in own[peer]]) for peer in peers)])
    lines.append(["fullest rank / budget", *(f"{max(row.fullest for row in own[peer]):.2f}" for peer in peers)])
    return f"### {title}\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _cell(row: Row) -> str:
    failed = f", {row.failed} failed" if row.failed else ""
    return f"{row.relative:.3f} ({row.won} / {row.lost}{failed})"


def _range(values: list[float]) -> str:
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def write_between_markers(path: Path, text: str) -> None:
    """Replace what stands between BEGIN and END in the document. Raises DataError where it lacks them."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise DataError(f"{path}: expected the lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")
