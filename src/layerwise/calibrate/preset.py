"""Measurements as a ClusterSpec: a YAML file that says what was measured, where and how."""

from __future__ import annotations

from dataclasses import dataclass, replace

from layerwise.calibrate.kernels import AttentionRates
from layerwise.calibrate.links import LinkRate
from layerwise.errors import SpecError

DIGITS = 3


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What the ranks of a cluster found out together.

    where: the hardware and software, for people. linear_flops_per_s, full, windowed: FLOP/s of a rank; windowed is None
    for a model of full attention alone. slow is None where all nodes are parts of one machine.
    """

    num_nodes: int
    ranks_per_node: int
    where: str
    model: str
    element_bytes: int
    memory_bytes: int | None
    fast: LinkRate
    slow: LinkRate | None
    linear_flops_per_s: float
    full: AttentionRates
    windowed: AttentionRates | None

    @property
    def fastest_flops_per_s(self) -> float:
        """Of all kernels measured."""
        tables = [self.full, *([self.windowed] if self.windowed else [])]
        return max(self.linear_flops_per_s, *(rate for table in tables for row in table.flops_per_s for rate in row))


def preset_text(found: Measurements, *, name: str, ratio: float, peak_flops_per_s: float | None) -> str:
    """The YAML text. `ratio` makes the slow rate where it was not measured; without a peak, the fastest kernel is it.

    Raises SpecError for a peak that a kernel exceeded.
    """
    peak = peak_flops_per_s or round_up(found.fastest_flops_per_s)
    if peak < found.fastest_flops_per_s:
        raise SpecError(
            f"--peak-flops-per-s {peak:.3g}: a kernel ran at {found.fastest_flops_per_s:.3g} FLOP/s; give the peak "
            "of one rank for the dtype of the run, or leave it out"
        )
    fast, slow = found.fast, found.slow or LinkRate(latency_s=0.0, bytes_per_s=found.fast.bytes_per_s / ratio)
    slow_source = (
        "measured between nodes" if found.slow else f"not measured, all ranks share a machine: fast / {ratio:g}"
    )
    if slow.bytes_per_s > fast.bytes_per_s:
        slow_source = f"{slow_source} ({number(slow.bytes_per_s)}, but no plan may count on more than inside a node)"
        slow = replace(slow, bytes_per_s=fast.bytes_per_s)
    peak_source = "given" if peak_flops_per_s else "not known: the fastest kernel measured"
    lines = [
        f"# Measured by `layerwise calibrate` on {found.where}, all ranks busy,",
        f"# at the shapes of model {found.model}. Rates are per rank; docs/calibrate.md says how each was found.",
        f"name: {name}",
        f"num_nodes: {found.num_nodes}",
        f"ranks_per_node: {found.ranks_per_node}",
        f"fast_bytes_per_s: {number(fast.bytes_per_s)}  # all-to-all inside a node",
        f"slow_bytes_per_s: {number(slow.bytes_per_s)}  # {slow_source}",
        f"message_latency_s: {number(max(fast.latency_s, slow.latency_s))}  # of one message of an all-to-all",
        f"peak_flops_per_s: {number(peak)}  # {peak_source}",
        *_table_lines("attention_efficiency", found.full, peak),
        *(_table_lines("window_efficiency", found.windowed, peak) if found.windowed else ()),
        f"linear_efficiency: {number(found.linear_flops_per_s / peak)}  # three products of a linear layer",
        f"element_bytes: {found.element_bytes}",
        *([f"memory_bytes: {number(found.memory_bytes)}"] if found.memory_bytes else ()),
        "sync: layer",
    ]
    return "\n".join(lines) + "\n"


def _table_lines(key: str, rates: AttentionRates, peak: float) -> list[str]:
    rows = ", ".join(f"[{', '.join(number(rate / peak) for rate in row)}]" for row in rates.flops_per_s)
    return [
        f"{key}:  # packed samples, forward and backward",
        f"  lengths: {list(rates.lengths)}",
        f"  heads: {list(rates.heads)}",
        f"  efficiency: [{rows}]",
    ]


def number(value: float) -> str:
    """Three digits, in a form that YAML reads as a number."""
    digits, exponent = f"{value:.{DIGITS - 1}e}".split("e")
    return f"{digits}e{int(exponent):+d}"


def round_up(value: float) -> float:
    """The next number of three digits, so that no share of it exceeds 1."""
    step = float(f"1e{int(f'{value:e}'.split('e')[1]) - DIGITS + 1}")
    return float(number(value)) if float(number(value)) >= value else float(number(value)) + step
