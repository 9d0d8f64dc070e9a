"""Measured links, beside those that plans are made for."""

from __future__ import annotations

from collections.abc import Callable

import torch

from layerwise.calibrate.effort import EFFORTS
from layerwise.calibrate.links import LinkRate, measure_fast, measure_slow, spans_hosts
from layerwise.doctor.check import Check, ok, warning
from layerwise.errors import DataError
from layerwise.groups import World
from layerwise.labels import format_bytes, format_seconds
from layerwise.spec import ClusterSpec

INSIDE, BETWEEN = "link inside a node", "link between nodes"
# Rates that are measured and assumed further apart make plans for another machine.
FACTOR = 2.0
_CALIBRATE = "run `layerwise calibrate` on the idle machine and give its file as cluster"


def check_links(world: World, device: torch.device, cluster: ClusterSpec | None) -> list[Check]:
    """Measure all-to-alls inside nodes and between them. Every rank calls this; all get the same.

    cluster: what the config says; compared where nodes are hosts of their own.
    """
    effort, checks = EFFORTS[device.type, True], []
    several_hosts = spans_hosts(world)
    fast, slow = (cluster.fast_bytes_per_s, cluster.slow_bytes_per_s) if cluster and several_hosts else (None, None)
    if world.ranks_per_node > 1:
        checks.append(_measured(INSIDE, lambda: measure_fast(world, effort, device), fast))
    else:
        checks.append(ok(INSIDE, "none: a node has one rank"))
    if several_hosts:
        checks.append(_measured(BETWEEN, lambda: measure_slow(world, effort, device), slow))
    else:
        checks.append(ok(BETWEEN, "not measured: all ranks are on one host"))
    return checks


def _measured(name: str, measure: Callable[[], LinkRate], assumed: float | None) -> Check:
    try:
        rate = measure()
    except DataError as error:
        return warning(name, str(error), "stop other work on these hosts and try again")
    return judge_link(name, rate, assumed)


def judge_link(name: str, rate: LinkRate, assumed: float | None) -> Check:
    """A measured link against the bytes/s that plans are made for, if they are known."""
    found = f"{format_bytes(rate.bytes_per_s)}/s per rank, {format_seconds(rate.latency_s)} per message"
    if assumed is None:
        return ok(name, found)
    found += f"; the cluster spec says {format_bytes(assumed)}/s"
    if 1 / FACTOR <= rate.bytes_per_s / assumed <= FACTOR:
        return ok(name, found)
    return warning(name, f"{found}, more than a factor of {FACTOR:g} away", _CALIBRATE)
