"""Where all ranks wait for the slowest, at no cost on the links: a socket in the file system, which all hosts share.

It stands for the collectives of experts and sharded parameters, of which the cost model counts nothing but the wait.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_TIME_BYTES = 8


@contextmanager
def serve_meetings(path: Path, num_ranks: int) -> Iterator[None]:
    """Let `num_ranks` processes meet at `path`, again and again, until the block ends."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(num_ranks)
        threading.Thread(target=_serve, args=(listener, num_ranks), daemon=True).start()
        yield


def _serve(listener: socket.socket, num_ranks: int) -> None:
    ranks: list[socket.socket] = []
    try:
        while len(ranks) < num_ranks:
            ranks.append(listener.accept()[0])
        while all(rank.recv(1) for rank in ranks):
            now = time.monotonic_ns().to_bytes(_TIME_BYTES)
            for rank in ranks:
                rank.sendall(now)
    except OSError:
        pass  # a rank ended, or the run did: the others learn it from their closed sockets
    finally:
        for rank in ranks:
            rank.close()


@contextmanager
def meeting_point(path: Path) -> Iterator[MeetingPoint]:
    """One rank's end of the meetings at `path`."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        yield MeetingPoint(connection)


class MeetingPoint:
    """A rank's end. Times are of the clock that all processes of a machine share, `time.monotonic`."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    def meet(self) -> float:
        """Wait for all ranks; seconds at which the last one came, the same on every rank.

        Raises ConnectionError where another rank has ended.
        """
        self._socket.sendall(b".")
        now = self._socket.recv(_TIME_BYTES, socket.MSG_WAITALL)
        if len(now) < _TIME_BYTES:
            raise ConnectionError("another rank has ended")
        return int.from_bytes(now) / 1e9
