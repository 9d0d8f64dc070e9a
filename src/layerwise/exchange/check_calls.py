"""A check before every exchange that all its ranks are at the same place: for training loops of one's own.

A loop that gives ranks micro-batches in different order, or models of different dtype, makes exchanges that do not fit
one another: rows are taken for others, or gloo ends the process. With LAYERWISE_CHECK_CALLS=1 in the environment each
exchange is preceded by a small all-reduce over its block that tells.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from layerwise.errors import PlanMismatchError
from layerwise.exchange.progress import Progress, waiting

if TYPE_CHECKING:
    from layerwise.exchange.collective import Comm

CHECKS_CALLS = os.environ.get("LAYERWISE_CHECK_CALLS", "0") == "1"
_MAX_BYTES = 120  # of a place


def compare_call(comm: Comm, progress: Progress, send: Tensor, send_splits: list[int], recv_splits: list[int]) -> None:
    """Raises PlanMismatchError where a rank of the block is elsewhere, or sends what another does not expect."""
    ours = f"{progress.at}, {str(send.dtype).removeprefix('torch.')}".encode()[:_MAX_BYTES]
    row = [*ours, *[0] * (_MAX_BYTES - len(ours)), *send_splits]
    table = torch.zeros(comm.block.size, len(row), dtype=torch.int64, device=send.device)
    table[comm.peer] = torch.tensor(row)
    me = comm.block.lo + comm.peer
    with waiting(progress, me, comm.block):
        comm.all_reduce(table)
    for peer, other in enumerate(table.tolist()):
        rank, theirs = comm.block.lo + peer, bytes(other[:_MAX_BYTES]).rstrip(b"\0")
        if theirs != ours:
            raise PlanMismatchError(
                f"rank {me} is at {ours.decode()}, but rank {rank} is at {theirs.decode()}: all ranks must run the "
                "same layers of the same micro-batches in the same order, forward and backward, in one dtype"
            )
        sent, expected = other[_MAX_BYTES + comm.peer], recv_splits[peer]
        if sent != expected:
            raise PlanMismatchError(
                f"rank {rank} sends rank {me} {sent} elements at {theirs.decode()}, where {expected} are expected: "
                "they follow different plans, or have models of different sizes"
            )
