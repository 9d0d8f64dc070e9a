"""Bytes/s and latency of all-to-alls inside a node and between nodes, while all ranks are busy with their own."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from layerwise.calibrate.effort import Effort, median_s
from layerwise.errors import DataError, SpecError
from layerwise.exchange import Comm, all_to_all
from layerwise.groups import World
from layerwise.traffic import Block

# Exchanges are short, and the slowest of all ranks counts: their times vary more than those of kernels.
EXTRA_REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class LinkRate:
    """An exchange of some messages takes `latency_s` for each, and their bytes over `bytes_per_s`."""

    latency_s: float
    bytes_per_s: float


def fit_link(num_messages: int, message_bytes: Sequence[int], seconds: Sequence[float]) -> LinkRate:
    """The rate that fits the seconds of exchanges of `num_messages` messages of each size.

    Least squares of relative errors, so that small sizes, which show the latency, count as much as large ones; the
    latency is not negative. Raises DataError where seconds do not grow with bytes.
    """
    sizes, took = np.asarray(message_bytes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    terms = num_messages * np.stack([np.ones_like(sizes), sizes], axis=1) / took[:, None]
    (latency_s, s_per_byte), *_ = np.linalg.lstsq(terms, np.ones_like(took), rcond=None)
    if latency_s < 0:
        latency_s, s_per_byte = 0.0, terms[:, 1].sum() / (terms[:, 1] ** 2).sum()
    if s_per_byte <= 0:
        pairs = ", ".join(f"{size:.0f} bytes in {s:.2e} s" for size, s in zip(sizes, took, strict=True))
        raise DataError(f"all-to-alls do not take longer with more bytes ({pairs}); calibrate on an idle machine")
    return LinkRate(latency_s=float(latency_s), bytes_per_s=float(1 / s_per_byte))


def measure_fast(world: World, effort: Effort, device: torch.device) -> LinkRate:
    """The link inside a node: every rank exchanges with all ranks of its node, in all nodes at once.

    Raises SpecError where a node has one rank.
    """
    node = world.ranks_per_node
    if node == 1:
        raise SpecError("ranks_per_node=1 has no link inside a node to measure; give at least 2 ranks to a node")
    blocks = [Block(lo, lo + node) for lo in range(0, world.num_ranks, node)]
    world.prepare(blocks)
    comm = world.comm(blocks[world.rank // node])
    return _measure(world, comm, [True] * node, effort, device)


def measure_slow(world: World, effort: Effort, device: torch.device) -> LinkRate:
    """The link between nodes: every rank exchanges with all ranks of the other nodes."""
    everyone = Block(0, world.num_ranks)
    world.prepare([everyone])
    my_node = world.rank // world.ranks_per_node
    away = [rank // world.ranks_per_node != my_node for rank in range(world.num_ranks)]
    return _measure(world, world.comm(everyone), away, effort, device)


def spans_hosts(world: World, host: str | None = None) -> bool:
    """Whether nodes of ranks_per_node ranks are machines of their own, rather than parts of one.

    `host` names this rank's machine, by default as the operating system does. Raises SpecError where a node's ranks
    are on several machines.
    """
    name = zlib.crc32((host or socket.gethostname()).encode())
    hosts = np.array(world.gather_ints([name])).reshape(-1, world.ranks_per_node)
    if (hosts != hosts[:, :1]).any():
        node = int((hosts != hosts[:, :1]).any(axis=1).argmax())
        raise SpecError(
            f"ranks_per_node={world.ranks_per_node}, but the ranks of node {node} are on several machines; set it to "
            "the ranks that run on each machine"
        )
    return len(np.unique(hosts[:, 0])) > 1


def _measure(world: World, comm: Comm | None, peers: list[bool], effort: Effort, device: torch.device) -> LinkRate:
    assert comm is not None
    peers = [talks and peer != comm.peer for peer, talks in enumerate(peers)]
    meet = partial(world.all_reduce, torch.zeros(1, device=device))
    nanoseconds = []
    for size in effort.message_bytes:
        splits = [size if talks else 0 for talks in peers]
        send = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
        seconds = median_s(
            partial(all_to_all, comm, send, splits, splits), device, EXTRA_REPEATS * effort.repeats, before=meet
        )
        nanoseconds.append(round(seconds * 1e9))
    slowest = np.max(world.gather_ints(nanoseconds), axis=0)
    return fit_link(sum(peers), effort.message_bytes, np.maximum(slowest, 1) / 1e9)
