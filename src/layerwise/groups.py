"""The ranks of a run and the groups among them: the only place that creates process groups.

A World gives its rank a Comm for each block of ranks. ProcessWorld does it over torch.distributed; LocalWorld runs the
ranks as threads of one process, with the same code above it, for tests and small experiments.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from layerwise.errors import PlanMismatchError, SpecError
from layerwise.exchange import Comm, GroupComm, Progress, waiting
from layerwise.traffic import Block

ResultT = TypeVar("ResultT")


class World(Protocol):
    """All ranks of a run, seen from one of them."""

    rank: int
    num_ranks: int
    ranks_per_node: int
    device: torch.device
    progress: Progress

    def prepare(self, blocks: Iterable[Block]) -> None:
        """Make the groups that are missing; every rank calls this with the same blocks."""

    def comm(self, block: Block | None) -> Comm | None:
        """The prepared group of a block; None for None."""

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, by rank; all ranks give equally many."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over all ranks, in place."""


class ProcessWorld:
    """The ranks of the initialised torch.distributed default group.

    Each distinct block becomes one process group, once, on every rank and in the same order, however many layers and
    micro-batches use it; the block of all ranks is the default group itself.
    """

    def __init__(self, ranks_per_node: int, device: torch.device | None = None) -> None:
        """device: of what ranks send and of a loader's tensors; by default this rank's GPU under NCCL, else the CPU.

        Raises SpecError where the number of ranks is not a multiple of ranks_per_node.
        """
        if not dist.is_initialized():
            raise SpecError("torch.distributed is not initialised; call init_process_group first, or use solo_world()")
        self.rank = dist.get_rank()
        self.num_ranks = dist.get_world_size()
        self.ranks_per_node = ranks_per_node
        self.device = this_device(device or torch.device("cuda" if "nccl" in dist.get_backend() else "cpu"))
        self.progress = Progress()
        if self.num_ranks % ranks_per_node:
            raise SpecError(f"{self.num_ranks} ranks are not a multiple of ranks_per_node={ranks_per_node}")
        self._everyone = Block(0, self.num_ranks)
        self._groups: dict[Block, Any] = {self._everyone: dist.group.WORLD}

    def prepare(self, blocks: Iterable[Block]) -> None:
        """Make the missing groups, in ascending order."""
        for block in sorted(set(blocks) - set(self._groups)):
            self._groups[block] = dist.new_group(list(range(block.lo, block.hi)), timeout=default_timeout())

    def comm(self, block: Block | None) -> GroupComm | None:
        """The prepared group of a block."""
        if block is None:
            return None
        if block not in self._groups:
            raise SpecError(
                f"there is no group of ranks {block.lo} to {block.hi - 1} yet: every rank calls agree(plan, world), or "
                "world.prepare(plan_blocks(plan)), before it uses the plan; PlannedLoader does"
            )
        return GroupComm(block, self.rank - block.lo, self._groups[block])

    def side_group(self, timeout: timedelta) -> Any:
        """A CPU group of all ranks of its own, for a thread that talks beside the training. Made anew by every call.

        Its ranks meet within the default group's timeout; its collectives wait for `timeout`.
        """
        group = dist.new_group(backend="gloo", timeout=default_timeout())
        distributed_c10d._set_pg_timeout(timeout, group)
        return group

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        """Every rank's values, by rank."""
        table = torch.zeros(self.num_ranks, len(values), dtype=torch.int64, device=self.device)
        table[self.rank] = torch.tensor(values, dtype=torch.int64)
        # A sum with one term: the all-gather functions change names between torch versions.
        self.all_reduce(table)
        return table.tolist()

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place. Raises CollectiveError where some of them do not come."""
        with waiting(self.progress, self.rank, self._everyone):
            dist.all_reduce(tensor)


def this_device(device: torch.device) -> torch.device:
    """The device with its number: which GPU "cuda" means depends on the thread that asks."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def default_timeout() -> timedelta:
    """How long the default group waits. torch gives a new group 30 minutes (gloo), whatever that is."""
    group: Any = dist.group.WORLD
    timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
    return timeout


def share_timeout(group: Any) -> None:
    """Let a group that torch made wait no longer than the default group."""
    distributed_c10d._set_pg_timeout(default_timeout(), group)


class LocalWorld:
    """Ranks as threads of one process. `run` calls fn(world) once per rank and returns the results by rank.

    Stricter than gloo: a sender and a receiver that disagree about a split raise PlanMismatchError. The first rank to
    fail ends the others, and its error is raised.
    """

    def __init__(self, num_ranks: int, ranks_per_node: int) -> None:
        if num_ranks % ranks_per_node:
            raise SpecError(f"{num_ranks} ranks are not a multiple of ranks_per_node={ranks_per_node}")
        self.num_ranks = num_ranks
        self.ranks_per_node = ranks_per_node
        self._tables: dict[Block, _MeetingPoint] = {}
        self._failed = False
        self._lock = threading.Lock()

    def meeting_point(self, block: Block) -> _MeetingPoint:
        """The one place where the threads of a block meet."""
        with self._lock:
            point = self._tables.setdefault(block, _MeetingPoint(block.size))
            if self._failed:
                point.barrier.abort()
            return point

    def run(self, fn: Callable[[World], ResultT]) -> list[ResultT]:
        """fn(world) on every rank."""
        self._tables, self._failed = {}, False
        results: list[Any] = [None] * self.num_ranks
        errors: list[BaseException] = []

        def target(rank: int) -> None:
            try:
                results[rank] = fn(_LocalRank(self, rank))
            except BaseException as error:
                with self._lock:
                    self._failed = True
                    errors.append(error)
                    for point in self._tables.values():
                        point.barrier.abort()

        threads = [threading.Thread(target=target, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


def solo_world(device: torch.device | None = None) -> World:
    """The world of a single process without torch.distributed. device: of a loader's tensors, by default the CPU."""
    world = _LocalRank(LocalWorld(1, 1), 0)
    world.device = this_device(device or world.device)
    return world


class _MeetingPoint:
    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=60)
        self.slots: list[Any] = [None] * size

    def swap(self, peer: int, value: Any, read: Callable[[list[Any]], Any] = list) -> Any:
        """What `read` makes of everyone's value, by peer; all ranks have read when anyone's call returns."""
        self.slots[peer] = value
        self.barrier.wait()
        result = read(self.slots)
        self.barrier.wait()
        return result


class _Done:
    def wait(self) -> None:
        """Threads exchange at once."""


@dataclass(frozen=True, eq=False)
class _LocalComm:
    block: Block
    peer: int
    point: _MeetingPoint

    def start_all_to_all(self, send: Tensor, recv: Tensor, send_splits: list[int], recv_splits: list[int]) -> _Done:
        def read(parts: list[tuple[Tensor, ...]]) -> _Done:
            for peer, (theirs, expected) in enumerate(zip(parts, recv_splits, strict=True)):
                if theirs[self.peer].numel() != expected:
                    raise PlanMismatchError(
                        f"rank {self.block.lo + peer} sends {theirs[self.peer].numel()} elements to rank "
                        f"{self.block.lo + self.peer}, which expects {expected}: they follow different plans"
                    )
            torch.cat([theirs[self.peer] for theirs in parts], out=recv)
            return _Done()

        done: _Done = self.point.swap(self.peer, send.split(send_splits), read)
        return done

    def all_reduce(self, tensor: Tensor) -> None:
        values = self.point.swap(self.peer, tensor.clone())
        tensor.copy_(torch.stack(values).sum(0))


class _LocalRank:
    def __init__(self, local: LocalWorld, rank: int) -> None:
        self.local, self.rank, self.device = local, rank, torch.device("cpu")
        self.num_ranks, self.ranks_per_node = local.num_ranks, local.ranks_per_node
        self.progress = Progress()
        self._everyone = local.meeting_point(Block(0, self.num_ranks))

    def prepare(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self.local.meeting_point(block)

    def comm(self, block: Block | None) -> _LocalComm | None:
        return None if block is None else _LocalComm(block, self.rank - block.lo, self.local.meeting_point(block))

    def gather_ints(self, values: Sequence[int]) -> list[list[int]]:
        gathered: list[list[int]] = self._everyone.swap(self.rank, list(values))
        return gathered

    def all_reduce(self, tensor: Tensor) -> None:
        values = self._everyone.swap(self.rank, tensor.clone())
        tensor.copy_(torch.stack(values).sum(0))
