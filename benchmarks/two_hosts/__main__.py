"""Every strategy on hosts that this command makes: real exchanges over shaped links, compute paced by the cost model.

    python -m benchmarks.two_hosts [--hosts 2] [--ratio 7.0] [--repetitions 5] [--json FILE] [--png FILE]

Needs root, and iproute2 (ip, tc). Exits with status 1 where a figure is missed, 2 where it cannot run.
docs/two-hosts.md says what is measured and how.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from time import perf_counter

from rich.console import Console

from benchmarks.options import at_least, count, picture, strategies, target
from benchmarks.two_hosts.cluster import run_ranks
from benchmarks.two_hosts.figures import check_figures
from benchmarks.two_hosts.hosts import check_tools, make_hosts
from benchmarks.two_hosts.meeting import serve_meetings
from benchmarks.two_hosts.picture import plot_results
from benchmarks.two_hosts.records import Results, Settings
from benchmarks.two_hosts.table import render
from benchmarks.two_hosts.workload import LONG_TOKENS, RANKS_PER_HOST, STRATEGIES
from layerwise.errors import LayerwiseError, RankFailedError
from layerwise.files import whole_file, write_whole

START_S, STEP_S = 300.0, 40.0


def main() -> int:
    """Run the bench, print its tables and write its files; the exit status."""
    options = _parse()
    console = Console()
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell ignores the first for what it runs in the background
        signal.signal(number, signal.default_int_handler)
    start = perf_counter()
    try:
        results = run(options)
    except LayerwiseError as error:
        console.print(f"two_hosts: {error}", style="red", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print("two_hosts: interrupted; the hosts are removed", style="red")
        return 130
    render(results, console)
    if options.json is not None:
        write_whole(options.json, results.model_dump_json(indent=1), "--json")
    if options.png is not None:
        with whole_file(options.png, "--png") as part:
            plot_results(results).savefig(part, dpi=160)
    console.print(f"\nThe whole took {perf_counter() - start:.0f} s.")
    return 0 if all(check.reached for check in check_figures(results)) else 1


def run(options: argparse.Namespace) -> Results:
    """Make the hosts, run the ranks on them, and remove them. Raises UnsupportedError or RankFailedError."""
    check_tools()
    with tempfile.TemporaryDirectory(prefix="layerwise-two-hosts-") as name, make_hosts(options.hosts) as hosts:
        folder = Path(name)
        settings = Settings(
            num_hosts=options.hosts,
            ratio=options.ratio,
            repetitions=options.repetitions,
            strategies=tuple(options.strategies),
            num_steps=options.steps,
            overlap_parts=options.overlap_parts,
            folder=folder,
        )
        argument = folder / "settings.json"
        argument.write_text(settings.model_dump_json())
        timeout_s = START_S + STEP_S * settings.num_runs
        with serve_meetings(settings.meeting_path, options.hosts * RANKS_PER_HOST):
            try:
                run_ranks(hosts, "benchmarks.two_hosts.rank", argument, folder, timeout_s)
            except RankFailedError:
                if settings.failure_path.exists():
                    raise RankFailedError(settings.failure_path.read_text()) from None
                raise
        return Results.model_validate_json(settings.results_path.read_text())


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_hosts", description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, choices=tuple(LONG_TOKENS), default=2)
    parser.add_argument("--ratio", type=at_least(1), default=7.0, help="rate inside a host over rate between hosts")
    parser.add_argument("--repetitions", type=count, default=5)
    parser.add_argument("--steps", type=int, choices=range(1, len(LONG_TOKENS[2]) + 1), default=1)
    parser.add_argument(
        "--strategies",
        type=partial(strategies, known=STRATEGIES),
        default=",".join(STRATEGIES),
        help="figures need the ones they compare",
    )
    parser.add_argument(
        "--overlap-parts", type=int, choices=range(1, 5), default=2, help="of further rows with overlap; 1: none"
    )
    parser.add_argument("--json", type=target, metavar="FILE", help="everything measured and predicted")
    parser.add_argument("--png", type=picture, metavar="FILE", help="a picture of the tables; needs matplotlib")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
