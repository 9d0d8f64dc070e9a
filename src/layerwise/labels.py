"""Numbers, ranks and layer kinds, written for people."""

from __future__ import annotations

from collections.abc import Iterable


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


def format_seconds(seconds: float) -> str:
    """Seconds for people: "340 us", "12.1 ms", "4.21 s"."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:,.2f} s"


def counted(number: int, noun: str) -> str:
    """So many of what a noun names: "1 rank", "12,000 samples", "2 micro-batches"."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def ranks_label(ranks: Iterable[int]) -> str:
    """Ranks for people, in runs: "rank 3", "ranks 0-2, 5"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {', '.join(texts)}"


def kind_label(kind: str) -> str:
    """A layer kind for people: "sliding_attention" reads "sliding layers"; what is none, such as "experts", stays."""
    name = kind.removesuffix("_attention")
    return kind if name == kind else name.replace("_", " ") + " layers"
