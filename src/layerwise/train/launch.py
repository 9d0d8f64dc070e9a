"""Starting ranks: join what torchrun started, or fork local ranks from one warmed process.

Forking has 16 gloo ranks up in well under a second, where starting 16 interpreters takes half a minute. The parent
never
computes, so no thread pool is inherited. It watches its children: the first that ends badly ends the others, and the
parent raises one RankFailedError that says which rank and why.
"""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from layerwise.errors import LayerwiseError, RankFailedError, SpecError
from layerwise.groups import ProcessWorld
from layerwise.train.rendezvous import fresh_store

RankMain = Callable[[ProcessWorld, torch.device], None]
PR_SET_PDEATHSIG = 1  # prctl(2): the child gets a signal when its parent dies


def under_torchrun() -> bool:
    """True where torchrun, or anything that sets the same variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def pick_device(name: str) -> torch.device:
    """The device of this rank for "auto", "cpu" or "cuda". Raises SpecError where CUDA is asked for and missing."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SpecError("device=cuda, but torch sees no CUDA device; use device=cpu or device=auto")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))


def launch(main: RankMain, *, num_ranks: int, ranks_per_node: int, device: str, timeout_s: float) -> None:
    """Run main(world, device) on every rank and return when all are done.

    Raises SpecError where torchrun's world is not num_ranks, RankFailedError where one of several ranks fails or dies.
    """
    if under_torchrun():
        _join(main, num_ranks, ranks_per_node, device, timeout_s)
    elif num_ranks == 1:
        _alone(main, device)
    else:
        _fork(main, num_ranks, ranks_per_node, device, timeout_s)


def _alone(main: RankMain, device: str) -> None:
    torch_device = pick_device(device)
    dist.init_process_group(_backend(torch_device), store=dist.HashStore(), rank=0, world_size=1)
    try:
        main(ProcessWorld(1, torch_device), torch_device)
    finally:
        dist.destroy_process_group()


def _backend(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def _join(main: RankMain, num_ranks: int, ranks_per_node: int, device: str, timeout_s: float) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != num_ranks:
        raise SpecError(
            f"torchrun started {world_size} ranks, the cluster spec has {num_ranks}: start {num_ranks}, or set "
            "cluster.num_nodes and cluster.ranks_per_node to what runs"
        )
    torch_device = pick_device(device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    timeout = timedelta(seconds=timeout_s)
    shared_store, rank, _ = next(dist.rendezvous("env://", timeout=timeout))
    store = fresh_store(shared_store, rank, world_size, timeout_s)
    dist.init_process_group(_backend(torch_device), store=store, rank=rank, world_size=world_size, timeout=timeout)
    try:
        main(ProcessWorld(ranks_per_node, torch_device), torch_device)
        dist.barrier()
    except LayerwiseError as error:
        raise RankFailedError(f"rank {dist.get_rank()}: {type(error).__name__}: {error}") from error
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """What a forked rank needs to start."""

    main: RankMain
    rank: int
    num_ranks: int
    ranks_per_node: int
    timeout_s: float
    store: Path

    def run(self) -> None:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.store}",
            rank=self.rank,
            world_size=self.num_ranks,
            timeout=timedelta(seconds=self.timeout_s),
        )
        self.main(ProcessWorld(self.ranks_per_node), torch.device("cpu"))
        dist.barrier()
        dist.destroy_process_group()


def _fork(main: RankMain, num_ranks: int, ranks_per_node: int, device: str, timeout_s: float) -> None:
    if device == "cuda":
        raise SpecError("device=cuda needs torchrun, one process per GPU; ranks that are forked here use the CPU")
    # Optimizers import torch._dynamo when first used: 800 modules, in every rank unless the parent has them already.
    importlib.import_module("torch._dynamo")
    with tempfile.TemporaryDirectory(prefix="layerwise-") as folder:
        settings: dict[str, Any] = {"main": main, "num_ranks": num_ranks, "ranks_per_node": ranks_per_node}
        settings |= {"timeout_s": timeout_s, "store": Path(folder) / "store"}
        children: dict[int, _Child] = {}
        try:
            for rank in range(num_ranks):
                children[rank] = _Child(_Rank(rank=rank, **settings))
            _watch(children)
        finally:
            for child in children.values():
                child.process.kill()
                child.process.join()


class _Child:
    """A forked rank and the pipe on which it says why it failed."""

    def __init__(self, rank: _Rank) -> None:
        context = multiprocessing.get_context("fork")
        self.said, end = context.Pipe(duplex=False)
        self.process = context.Process(target=_child_main, args=(rank, end, os.getpid()), name=f"rank-{rank.rank}")
        self.process.start()
        end.close()

    def failure(self) -> tuple[bool, str] | None:
        """(was the rank's own fault, message), or None for a rank that ended well or still runs."""
        if self.said.poll():
            try:
                own_fault, message = self.said.recv()
                return own_fault, message
            except EOFError:
                pass
        code = self.process.exitcode
        if code is None or code == 0:
            return None
        return True, f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def _watch(ranks: dict[int, _Child]) -> None:
    """Wait for all children; on a failure let the others say theirs for a moment, and raise the likeliest cause."""
    running = dict(ranks)
    while running:
        ended = wait([child.process.sentinel for child in running.values()])
        done = [rank for rank, child in running.items() if child.process.sentinel in ended]
        for rank in done:
            running.pop(rank).process.join()
        if any(ranks[rank].process.exitcode for rank in done):
            wait([child.process.sentinel for child in running.values()], timeout=1.0)
            raise RankFailedError(_explain(ranks))


def _explain(ranks: dict[int, _Child]) -> str:
    failures = [(rank, child.failure()) for rank, child in ranks.items()]
    found = [(rank, *failure) for rank, failure in failures if failure is not None]
    # A rank that lost its peer is a consequence; name the cause.
    rank, _, message = min(found, key=lambda item: (not item[1], item[0]))
    same = sum(other == message for _, _, other in found)
    where = f"rank {rank}" if same == 1 else f"rank {rank} and {same - 1} more"
    return f"{where}: {message}" + ("" if len(ranks) == 1 else "\nThe other ranks were stopped.")


def _child_main(rank: _Rank, said: Connection, parent_pid: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    status = 1
    try:
        rank.run()
        status = 0
    except LayerwiseError as error:
        said.send((True, f"{type(error).__name__}: {error}"))
    except Exception as error:
        lost_peer = isinstance(error, (dist.DistError, RuntimeError)) and "gloo" in str(error).lower()
        text = "".join(traceback.format_exception(error)) if not lost_peer else f"lost a peer: {error}"
        said.send((not lost_peer, text.strip()))
    finally:
        said.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
