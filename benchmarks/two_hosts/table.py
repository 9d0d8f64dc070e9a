"""The results for people: tables for a terminal."""

from __future__ import annotations

from rich.console import Console

from benchmarks.two_hosts.figures import BASELINE, Check, Measured, check_figures, saving, summarize
from benchmarks.two_hosts.records import Results
from benchmarks.two_hosts.workload import MODEL, RANKS_PER_HOST
from layerwise.evaluate.table import narrow_table


def render(results: Results, console: Console) -> None:
    """Print what was measured, and which figures it reaches."""
    measured, settings = summarize(results), results.settings
    console.print(
        f"{settings.num_hosts} hosts (network namespaces) x {RANKS_PER_HOST} ranks over gloo; exchanges are real and "
        f"measured, compute is [bold]paced[/bold]: ranks wait for as long as the cost model says. Model "
        f"{'-'.join(kind[0].upper() for kind in MODEL.layer_types)} (F full, S sliding attention). "
        f"{settings.num_steps} step(s) of {results.tokens} tokens, longest sample {results.longest_tokens}; "
        f"{settings.repetitions} repetitions, strategies in another order in each; medians."
    )
    console.print(f"Links of a rank, before: {results.links.describe()}.")
    console.print(f"Links of a rank, after: {results.links_after.describe()}.")
    late = {name: f"{1e3 * seconds:.2f} ms" for name, seconds in results.lateness_s.items()}
    console.print(f"Paced work ended late by {late['p50']} (median), {late['p99']} (99th percentile).\n")
    for title, columns, rows in (_steps(measured), _exchanges(measured), _bytes(measured)):
        console.print(narrow_table(title, columns, rows))
        console.print()
    rows = [
        [check.name, _text(check), check.limits, "pass" if check.reached else "MISS"]
        for check in check_figures(results)
    ]
    console.print(narrow_table("Figures to reach", ["figure", "measured", "to reach", "result"], rows))


TableRows = tuple[str, list[str], list[list[str]]]


def _steps(measured: dict[str, Measured]) -> TableRows:
    rows = []
    for name, row in measured.items():
        seconds = [row.step_s, float(row.seconds.min()), float(row.seconds.max()), row.predicted_s]
        cells = [name, *(f"{s:.3f}" for s in seconds), f"{row.error_pct:+.1f}"]
        if BASELINE in measured:
            saved = saving(measured, name, BASELINE)
            cells += [f"{saved.pct:.1f}", f"{(saved.high_pct - saved.low_pct) / 2:.1f}", f"{saved.predicted_pct:.1f}"]
        rows.append(cells)
    columns = ["strategy", "step s", "min", "max", "model s", "over %"]
    saved_columns = ["saved %", "+-", "model %"] if BASELINE in measured else []
    title = f"Seconds of a step, and what is saved of {BASELINE}'s (+-: half the quartiles' distance); model: predicted"
    return title, [*columns, *saved_columns], rows


def _exchanges(measured: dict[str, Measured]) -> TableRows:
    rows = []
    for name, row in measured.items():
        for kind in row.kinds:
            (most, mean), (most_wait, mean_wait) = row.transfer_s(kind), row.wait_s(kind)
            times = [most, mean, row.predicted_exchange_s(kind), most_wait, mean_wait]
            rows.append([name, kind, *(f"{seconds:.3f}" for seconds in times)])
    title = "Seconds of a step that ranks waited in all-to-alls: since the last rank had come, and before, for it"
    return title, ["strategy", "layers", "slowest rank", "mean rank", "model", "waiting, slowest", "mean"], rows


def _bytes(measured: dict[str, Measured]) -> TableRows:
    rows = []
    for name, row in measured.items():
        wire = sum(run.sent.wire_bytes for run in row.runs) / len(row.runs)
        numbers = [row.counted_bytes, row.interface_bytes, wire]
        rows.append([name, *(f"{n / 1e6:.3f}" for n in numbers), f"{row.bytes_error_pct:+.2f}"])
    title = "MB of a step between hosts: payload by our count and by the interfaces', and all that was on the wire"
    return title, ["strategy", "counted", "interface", "wire", "over %"], rows


def _text(check: Check) -> str:
    return "missing" if check.measured is None else f"{check.measured:.4g}"
