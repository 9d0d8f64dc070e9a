"""The exchange of one step of every strategy, forward and backward, beside a bare all_to_all_single of the same rows.

    python -m benchmarks.exchange [--ranks 4] [--megabytes 1,16,64] [--strategies a,b] [--repeats 7] [--json FILE]

Forked local ranks over gloo, two nodes in name only. --link-megabytes-per-s R (root, iproute2) runs them on a loopback
that carries R MB/s, since without a limit the link is a copy by the same cores that pack and unpack. Also the memory
that an exchange takes beyond its results, the time to build routes, and the all-to-alls of other libraries where they
are installed. Exits with status 1 where a figure is missed; docs/exchange.md explains them.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks.exchange import build
from benchmarks.exchange.figures import Figure, report
from benchmarks.exchange.measure import interleaved_s, peak_bytes, ratio
from benchmarks.exchange.peers import make_peers
from benchmarks.exchange.plans import ELEMENT_BYTES, MB, MODEL, TOKEN_BYTES, plan_of
from benchmarks.exchange.step import StepExchange, bare_calls, make_step
from benchmarks.options import at_least, count, each, strategies, target
from benchmarks.two_hosts.hosts import check_tools, make_hosts
from benchmarks.two_hosts.shaping import LOOPBACK, shape
from layerwise.errors import UnsupportedError
from layerwise.exchange import STAGING, Site, exchange
from layerwise.groups import World
from layerwise.kernels.rows import SCRATCH_ELEMENTS
from layerwise.planners import STRATEGIES
from layerwise.train.launch import launch

MAX_OVER_BARE = 1.15
MAX_BUILD_MS = 5.0
MEMORY_MEGABYTES = 16.0
LEAST_MEGABYTES = 0.1  # fewer are less than a token of the shortest sample


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exchange", description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, choices=range(2, 65, 2), default=4, metavar="RANKS", help="an even number")
    parser.add_argument(
        "--megabytes", type=each(at_least(LEAST_MEGABYTES)), default="1,16,64", help="Q, K and V rows of a rank to try"
    )
    parser.add_argument("--strategies", type=strategies, default=",".join(STRATEGIES))
    parser.add_argument("--repeats", type=count, default=7)
    parser.add_argument(
        "--link-megabytes-per-s", type=at_least(0), default=0.0, help="what the loopback carries; 0: what it can"
    )
    parser.add_argument("--json", type=target, help="file for all figures")
    return parser.parse_args()


def speed_figures(world: World, strategies: Sequence[str], sizes: Sequence[float], repeats: int) -> Iterator[Figure]:
    """Time of the exchange over that of the bare calls."""
    for megabytes in sizes:
        for strategy in strategies:
            step = make_step(plan_of(strategy, world.num_ranks, megabytes), world, MODEL.hidden_size)
            bare = bare_calls(step)
            runs = {"exchange": step.run, "bare": bare.run, "copies": bare.run_with_copies}
            seconds = interleaved_s(runs, repeats)
            ms = {name: 1000 * float(np.median(spent)) for name, spent in seconds.items()}
            over_bare, _ = ratio(seconds["exchange"], seconds["bare"])
            detail = f"{ms['exchange']:.1f} ms; bare {ms['bare']:.1f}, with two copies {ms['copies']:.1f}"
            name = f"{megabytes:g} MB, {strategy}"
            yield Figure(name, over_bare, MAX_OVER_BARE, "x bare", detail)


def memory_figures(world: World, strategies: Sequence[str]) -> Iterator[Figure]:
    """What an exchange of Q, K and V holds at most, beyond its results, over its two buffers and a scratch."""
    for strategy in strategies:
        step = make_step(plan_of(strategy, world.num_ranks, MEMORY_MEGABYTES), world, MODEL.hidden_size)
        extra = [_extra_over_buffers(step, kind) for kind in step.inputs]
        worst = torch.tensor(max(extra), dtype=torch.float64)
        torch.distributed.all_reduce(worst, torch.distributed.ReduceOp.MAX)
        yield Figure(f"extra memory, {strategy}", worst.item(), 1.0, "x buffers and 128 KB")


def _extra_over_buffers(step: StepExchange, kind: str) -> float:
    route = step.routes.by_kind[kind]
    site = Site(kind, step.routes.world.comm(route.block), step.routes.meter)
    results: list[tuple[torch.Tensor, ...]] = []
    STAGING.clear()
    peak = peak_bytes(lambda: results.append(exchange(step.inputs[kind], route.to_tiles, site)))
    if site.comm is None:
        return 0.0
    (wire,) = route.to_tiles[0].wires.values()
    buffers = (sum(wire.send_splits) + sum(wire.recv_splits)) * ELEMENT_BYTES
    made = sum(x.numel() * ELEMENT_BYTES for x in results[0])
    return (peak - made) / (buffers + SCRATCH_ELEMENTS * ELEMENT_BYTES)


def peer_figures(world: World, sizes: Sequence[float], repeats: int) -> Iterator[Figure]:
    """Our time over each peer's, where one sample is spread evenly; slower by more than the spread is slower."""
    for megabytes in sizes:
        runs = make_peers(world, int(megabytes * MB / TOKEN_BYTES))
        seconds = interleaved_s(runs, repeats)
        ours = seconds.pop("layerwise")
        for name, theirs in seconds.items():
            detail = f"{1000 * np.median(ours):.1f} ms; theirs {1000 * np.median(theirs):.1f}"
            over_theirs, spread = ratio(ours, theirs)
            yield Figure(f"{megabytes:g} MB, over {name}", over_theirs, 1.0, "x theirs", detail, tolerance=spread)


def build_figures(strategies: Sequence[str], repeats: int) -> Iterator[Figure]:
    """Milliseconds to build the route of each layer kind."""
    for strategy in strategies:
        for kind in build.MODEL.kinds:
            yield Figure(f"route, {strategy}, {kind}", build.build_ms(strategy, kind, repeats), MAX_BUILD_MS, "ms")


def on_ranks(options: argparse.Namespace, out: Path, world: World, device: torch.device) -> None:
    """All figures that take several ranks; the first rank writes them down."""
    figures = [
        *memory_figures(world, options.strategies),
        *speed_figures(world, options.strategies, options.megabytes, options.repeats),
        *peer_figures(world, options.megabytes, options.repeats),
    ]
    if world.rank == 0:
        out.write_text(json.dumps([asdict(figure) for figure in figures]))


def on_slow_loopback(megabytes_per_s: float) -> int:
    """This command again, in a network namespace whose loopback carries so much; its exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the namespace is removed then too
    try:
        check_tools()
        with make_hosts(1) as (host,):
            shape(LOOPBACK, megabytes_per_s * MB, host)
            again = [sys.executable, "-m", "benchmarks.exchange", *sys.argv[1:], "--link-megabytes-per-s", "0"]
            return subprocess.run(host.command(*again), check=False).returncode
    except UnsupportedError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the network namespace is removed", file=sys.stderr)
        return 130


def main() -> int:
    """Measure, print and judge."""
    options = arguments()
    if options.link_megabytes_per_s:
        return on_slow_loopback(options.link_megabytes_per_s)
    figures = list(build_figures(options.strategies, options.repeats))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        ranks = {"num_ranks": options.ranks, "ranks_per_node": options.ranks // 2}
        launch(partial(on_ranks, options, out), **ranks, device="cpu", timeout_s=600)
        figures += [Figure(**figure) for figure in json.loads(out.read_text())]
    return report(f"The exchange on {options.ranks} local ranks over gloo", figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
