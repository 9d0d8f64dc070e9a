"""Starting ranks: join what torchrun started, or fork local ranks from one warmed process.

Forking has 16 gloo ranks up in well under a second, where starting 16 interpreters takes half a minute. The parent
never computes, so no thread pool is inherited, and children never destroy what it used before. It watches them: when
one ends badly it lets the others say their last words, ends them, and raises one RankFailedError that says which rank
was at fault and where the others were.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import math
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from layerwise.errors import CollectiveError, RankFailedError, SpecError
from layerwise.groups import ProcessWorld
from layerwise.labels import ranks_label
from layerwise.train.failing import LISTEN_S, LastWord, LastWords, by_value, run_to_the_end
from layerwise.train.rendezvous import connect, meet, open_store

RankMain = Callable[[ProcessWorld, torch.device], None]
# Beyond the time for last words, for a rank to notice that others have failed.
_SLACK_S = 2.0
# Forked ranks share one machine: more are a mistake that would fill it with processes.
MAX_LOCAL_RANKS = 512
# The parent reads a last word when the rank has ended, so it must fit into a pipe, of 64 KiB.
_MAX_WHY = 12_000
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

    Raises SpecError where torchrun's world is not num_ranks and for too many local ranks, RankFailedError where one of
    several ranks fails or dies.
    """
    if under_torchrun():
        _join(main, num_ranks, ranks_per_node, device, timeout_s)
    elif num_ranks == 1:
        _alone(main, device)
    elif num_ranks > MAX_LOCAL_RANKS:
        raise SpecError(
            f"{num_ranks} ranks on this machine: at most {MAX_LOCAL_RANKS} are started here; ask for fewer, or start "
            "them on their own machines with torchrun"
        )
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
    rank, world_size = _rank_and_world_size()
    if world_size != num_ranks:
        raise SpecError(
            f"torchrun started {world_size} ranks, the cluster spec has {num_ranks}: start {num_ranks}, or set "
            "cluster.num_nodes and cluster.ranks_per_node to what runs"
        )
    torch_device = pick_device(device)
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    shared_store = open_store(rank, world_size, timeout_s)
    store = dist.PrefixStore(meet(shared_store, rank, world_size, timeout_s), shared_store)
    connect(store, rank, world_size, backend=_backend(torch_device), timeout_s=timeout_s)
    world = ProcessWorld(ranks_per_node, torch_device)
    word = run_to_the_end(lambda: main(world, torch_device), world, store, timeout_s)
    if word is None or torch_device.type == "cpu":
        dist.destroy_process_group()  # after a fault NCCL would wait here for ranks that wait for this one
    if word is not None:
        raise RankFailedError(word.of(rank))


def _rank_and_world_size() -> tuple[int, int]:
    texts = os.environ["RANK"], os.environ["WORLD_SIZE"]
    if not all(text.isdecimal() for text in texts) or not int(texts[0]) < int(texts[1]):
        raise SpecError(
            "RANK={!r} and WORLD_SIZE={!r} are set, but ranks are whole numbers from 0 to WORLD_SIZE - 1; start ranks "
            "with torchrun, or unset both to start them here".format(*texts)
        )
    return int(texts[0]), int(texts[1])


@dataclass(frozen=True, kw_only=True)
class _Rank:
    """What a forked rank needs to start."""

    main: RankMain
    rank: int
    num_ranks: int
    ranks_per_node: int
    timeout_s: float
    store: Path

    def run(self) -> LastWord | None:
        torch.set_num_threads(1)
        store, device = dist.FileStore(str(self.store), self.num_ranks), torch.device("cpu")
        meet(store, self.rank, self.num_ranks, self.timeout_s)
        connect(store, self.rank, self.num_ranks, backend="gloo", timeout_s=self.timeout_s)
        world = ProcessWorld(self.ranks_per_node, device)
        return run_to_the_end(lambda: self.main(world, device), world, store, self.timeout_s)


def _fork(main: RankMain, num_ranks: int, ranks_per_node: int, device: str, timeout_s: float) -> None:
    if device == "cuda":
        raise SpecError("device=cuda needs torchrun, one process per GPU; ranks that are forked here use the CPU")
    # Optimizers import torch._dynamo when first used: 800 modules, in every rank unless the parent has them already.
    importlib.import_module("torch._dynamo")
    # A process group that is garbage ends its threads here; in a child, which has none of them, it would wait for ever.
    gc.collect()
    with tempfile.TemporaryDirectory(prefix="layerwise-") as folder:
        settings: dict[str, Any] = {"main": main, "num_ranks": num_ranks, "ranks_per_node": ranks_per_node}
        settings |= {"timeout_s": timeout_s, "store": Path(folder) / "store"}
        children: dict[int, _Child] = {}
        try:
            for rank in range(num_ranks):
                children[rank] = _Child(_Rank(rank=rank, **settings))
            _watch(children, settings["store"])
        finally:
            for child in children.values():
                child.process.kill()
                child.process.join()


class _Child:
    """A forked rank and the pipe on which it says its last word."""

    def __init__(self, rank: _Rank) -> None:
        context = multiprocessing.get_context("fork")
        self.said, end = context.Pipe(duplex=False)
        self.process = context.Process(target=_child_main, args=(rank, end, os.getpid()), name=f"rank-{rank.rank}")
        self.process.start()
        end.close()

    def last_word(self) -> LastWord | None:
        """Why the rank failed; None where it ended well or still runs."""
        if self.process.exitcode is None:
            return None
        with suppress(EOFError):
            if self.said.poll():
                word: LastWord | None = self.said.recv()
                return word
        code = self.process.exitcode
        early = f"ended with exit status {code} before the end of the run"
        why = f"was killed by {signal.Signals(-code).name}" if code < 0 else early
        return LastWord(where="", why=why, waited=False)


def _watch(ranks: dict[int, _Child], store: Path) -> None:
    """Wait for all children; after a failure no longer than others need to say their last words."""
    running, words, until = dict(ranks), dict[int, LastWord](), math.inf
    while running and (ended := _ended(running, until)):
        for rank in ended:
            running.pop(rank).process.join()
            word = ranks[rank].last_word()
            if word is None:
                continue
            # Those that waited for it notice when it ends, and listen, too, before they do.
            until = time.monotonic() + _SLACK_S + LISTEN_S
            words[rank] = word
            if not word.where and not word.waited:  # it could not tell the others itself
                LastWords(dist.FileStore(str(store), len(ranks))).say(rank, word)
    for rank in running:
        ranks[rank].process.terminate()  # those that can say where they are
    wait([child.process.sentinel for child in running.values()], _SLACK_S / 2)
    if words:
        raise RankFailedError("\n".join(_explain(words, len(ranks))))


def _ended(running: dict[int, _Child], until: float) -> list[int]:
    """The children that have ended, of which there is one at least, or none when it is too late."""
    timeout = None if until == math.inf else max(0.0, until - time.monotonic())
    ended = wait([child.process.sentinel for child in running.values()], timeout)
    return [rank for rank, child in running.items() if child.process.sentinel in ended]


def _explain(words: dict[int, LastWord], num_ranks: int) -> Iterator[str]:
    """The faults and where the other ranks waited; without a fault, what those that waited know."""
    at_fault = {rank: word for rank, word in words.items() if not word.waited}
    for word, ranks in by_value(at_fault):
        yield word.of(ranks[0]) + (f"\n  the same: {ranks_label(ranks[1:])}" if len(ranks) > 1 else "")
    for where, ranks in by_value({rank: word.where for rank, word in words.items() if word.waited}):
        yield f"{ranks_label(ranks)}, {where}: waited in vain" if at_fault else words[ranks[0]].of(ranks[0])
    if len(words) < num_ranks:
        yield f"{ranks_label(set(range(num_ranks)) - set(words))}: gave no reason in time, and was ended"


def _child_main(rank: _Rank, said: Connection, parent_pid: int) -> None:
    gc.freeze()  # what the parent used is never destroyed here
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    try:
        word = rank.run()
    except CollectiveError as error:  # others did not come
        word = LastWord(where=error.where, why=error.reason, waited=True)
    except BaseException as error:
        word = LastWord(where="", why="".join(traceback.format_exception(error)).strip(), waited=False)
    finally:
        said.send(None if word is None else replace(word, why=_cut(word.why)))
        said.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0 if word is None else 1)


def _cut(why: str) -> str:
    """A text's beginning and its end, where it is very long."""
    if len(why) <= _MAX_WHY:
        return why
    half = _MAX_WHY // 2
    return f"{why[:half]}\n[... {len(why) - 2 * half:,} characters ...]\n{why[-half:]}"
