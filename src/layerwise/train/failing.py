"""How a run ends when a rank cannot go on: each rank says where it was, and whom the others do not hear of.

Ranks write their last words into the store in which they met. One that waited in vain reads those of the ranks that it
waited for: the rank without a word is the one to look at.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from typing import TypeVar

import torch.distributed as dist

from layerwise.errors import CollectiveError, LayerwiseError
from layerwise.exchange import first_line, waiting
from layerwise.groups import ProcessWorld
from layerwise.labels import ranks_label
from layerwise.traffic import Block

ValueT = TypeVar("ValueT")
# How long a rank listens for the last words of others, which fail a little later than it does.
LISTEN_S = 2.0
_POLL_S = 0.05
_TOLD_TO_END = "was told to end (SIGTERM): another rank has failed, or somebody, such as a scheduler, ended the run"


@dataclass(frozen=True, kw_only=True)
class LastWord:
    """Where a rank was and why it could not go on; `waited`: for other ranks, so that the fault is not its own."""

    where: str
    why: str
    waited: bool

    def of(self, rank: int) -> str:
        """For people."""
        return f"{', '.join([f'rank {rank}', *([self.where] if self.where else [])])}: {self.why}"


class LastWords:
    """The last words of all ranks, in a store."""

    def __init__(self, store: dist.Store) -> None:
        self._store = dist.PrefixStore("layerwise/last_word", store)

    def say(self, rank: int, word: LastWord) -> None:
        """Tell the other ranks. Raises RuntimeError where the store is gone."""
        self._store.set(str(rank), json.dumps(asdict(word)))

    def exchange(self, rank: int, word: LastWord, others: Sequence[int]) -> dict[int, LastWord] | None:
        """Say ours, and hear what the others say, until one was at fault or for LISTEN_S; None: the store is mute."""
        heard: dict[int, LastWord] = {}
        # A store on a host that cannot be reached answers neither yes nor no, for many minutes.
        thread = threading.Thread(target=self._exchange, args=(rank, word, others, heard), daemon=True)
        thread.start()
        thread.join(LISTEN_S + 1)
        return dict(heard) if rank in heard else None

    def _exchange(self, rank: int, word: LastWord, others: Sequence[int], heard: dict[int, LastWord]) -> None:
        with suppress(RuntimeError):
            self.say(rank, word)
            until = time.monotonic() + LISTEN_S
            missing = {*others, rank}
            while missing and all(word.waited for word in heard.values()) and time.monotonic() < until:
                for other in sorted(missing):
                    if self._store.check([str(other)]):
                        heard[other] = LastWord(**json.loads(self._store.get(str(other))))
                missing -= set(heard)
                time.sleep(_POLL_S)


def run_to_the_end(
    main: Callable[[], None], world: ProcessWorld, store: dist.Store, timeout_s: float
) -> LastWord | None:
    """main(), after which all ranks meet; None, or why it did not come to that, which the other ranks are told too.

    To be called on the main thread. A rank that is told to end by SIGTERM says where it was.
    """
    # The listener does what is to be done; and nothing is while a failure is being explained, which takes seconds.
    words = LastWords(store)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with _last_word_at_sigterm(world, words):
            main()
            world.progress.at = "the end of the run"
            with waiting(world.progress, world.rank, Block(0, world.num_ranks)):
                dist.barrier()
    except (Exception, SystemExit) as error:  # to leave in mid-run fails the others
        return _explain(error, world, words, timeout_s)
    finally:
        signal.signal(signal.SIGTERM, handler)
    return None


def _explain(error: BaseException, world: ProcessWorld, words: LastWords, timeout_s: float) -> LastWord:
    where = world.progress.where()
    if isinstance(error, CollectiveError):
        peers, reason = error.peers, error.reason
    elif _lost_a_peer(error):
        # A collective of torch's own, of FSDP for instance, which does not say among whom it is.
        peers = [rank for rank in range(world.num_ranks) if rank != world.rank]
        where = f"after {where}" if where else "before the first step"
        reason = f"a collective failed: {first_line(error)}"
    else:
        known = isinstance(error, LayerwiseError)
        why = f"{type(error).__name__}: {error}" if known else "".join(traceback.format_exception(error)).strip()
        short = LastWord(where=where, why=f"{type(error).__name__}: {first_line(error)}", waited=False)
        words.exchange(world.rank, short, [])
        return LastWord(where=where, why=why, waited=False)
    heard = words.exchange(world.rank, LastWord(where=where, why="waited for others", waited=True), peers)
    return LastWord(where=where, why="\n".join([reason, *_tell(heard, world.rank, peers, timeout_s)]), waited=True)


def _lost_a_peer(error: BaseException) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error).lower())


def _tell(heard: dict[int, LastWord] | None, rank: int, peers: Sequence[int], timeout_s: float) -> Iterator[str]:
    """What is known of the ranks that one waited for, those at fault first."""
    if heard is None:
        yield (
            f"  {ranks_label(peers)}: unknown, for the store in which all ranks met does not answer either: its host "
            "is down, or the link to it is"
        )
        return
    at_fault = [peer for peer in peers if peer in heard and not heard[peer].waited]
    for peer in at_fault:
        yield f"  {heard[peer].of(peer)}"
    if silent := [peer for peer in peers if peer not in heard]:
        advice = (
            f"; ended, stopped, cut off, slower than timeout_s={timeout_s:g} allows, or waiting for one that is: look "
            "at its log and its host, and raise timeout_s if it was only slow"
        )
        yield f"  {ranks_label(silent)}: no word{' yet' if at_fault else advice}"
    for where, ranks in by_value({peer: heard[peer].where for peer in peers if peer in heard and heard[peer].waited}):
        yield f"  {ranks_label(ranks)}: waited{' there, too' if where == heard[rank].where else f' {_at(where)}'}"


def _at(where: str) -> str:
    return where if where.startswith(("after ", "before ")) else f"at {where}"


def by_value(values: dict[int, ValueT]) -> list[tuple[ValueT, list[int]]]:
    """Equal values once, each with its ranks, in order of the first of them."""
    groups: dict[ValueT, list[int]] = {}
    for rank in sorted(values):
        groups.setdefault(values[rank], []).append(rank)
    return list(groups.items())


@contextmanager
def _last_word_at_sigterm(world: ProcessWorld, words: LastWords) -> Iterator[None]:
    """A thread that listens for SIGTERM: the rank may be inside a collective, where Python handles no signal."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)

    def listen() -> None:
        while numbers := reader.recv(1):
            if numbers[0] == signal.SIGTERM:
                word = LastWord(where=world.progress.where(), why=_TOLD_TO_END, waited=False)
                sys.stderr.write(f"layerwise: {word.of(world.rank)}\n")
                sys.stderr.flush()
                words.exchange(world.rank, word, [])
                os._exit(1)

    thread = threading.Thread(target=listen, name="layerwise-sigterm", daemon=True)
    thread.start()
    wakeup_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_fd)
        writer.close()
        thread.join()
        reader.close()
