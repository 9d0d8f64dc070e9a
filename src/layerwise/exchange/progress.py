"""Where a rank is in its training: written by a few assignments per exchange, read when something fails."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from layerwise.errors import CollectiveError, LayerwiseError
from layerwise.labels import ranks_label
from layerwise.traffic import Block

_OWN_FAULTS = (torch.OutOfMemoryError, torch.AcceleratorError)  # RuntimeErrors, both


class Point(NamedTuple):
    """A part of a layer, such as "exchange_in of full_attention", in a micro-batch; layer -1: before layer 0."""

    microbatch: int | None
    layer: int
    part: str
    backward: bool = False

    def __str__(self) -> str:
        layer = f"layer {self.layer}" if self.layer >= 0 else "before layer 0"
        where = [layer, "backward" if self.backward else "forward", self.part]
        return ", ".join(where if self.microbatch is None else [f"micro-batch {self.microbatch}", *where])


class Progress:
    """How far a rank has come.

    step: of training, None where nobody tells. microbatch and layer: of the forward pass (or recompute) under way.
    at: the last thing begun, a Point or, outside of micro-batches, its name.
    """

    __slots__ = ("at", "layer", "microbatch", "step")

    def __init__(self) -> None:
        self.step: int | None = None
        self.microbatch: int | None = None
        self.layer = -1
        self.at: Point | str = ""

    def enter_layer(self, microbatch: int, layer: int | None) -> None:
        """A layer begins, in a forward pass or a recompute; None: the next one."""
        self.microbatch, self.layer = microbatch, self.layer + 1 if layer is None else layer

    def point(self, part: str, *, backward: bool = False) -> Point:
        """A part of the layer under way."""
        return Point(self.microbatch, self.layer, part, backward)

    def where(self) -> str:
        """For messages; empty before anything began."""
        return ", ".join(([] if self.step is None else [f"step {self.step}"]) + ([str(self.at)] if self.at else []))


@contextmanager
def waiting(progress: Progress, rank: int, block: Block) -> Iterator[None]:
    """Around a wait of `rank` for the others of a block. Raises CollectiveError, with place and time.

    A fault of the rank's own, of its GPU for instance, stays what it is.
    """
    begin_s = time.monotonic()
    try:
        yield
    except (LayerwiseError, *_OWN_FAULTS):
        raise
    except RuntimeError as error:
        peers = [other for other in range(block.lo, block.hi) if other != rank]
        waited = f"waited {time.monotonic() - begin_s:.1f} s for {ranks_label(peers)}"
        raise CollectiveError(progress.where(), f"{waited}: {first_line(error)}", rank=rank, peers=peers) from error


def first_line(error: BaseException) -> str:
    """What an error of torch says, without source files, call stacks and general advice."""
    lines = str(error).splitlines() or [type(error).__name__]
    return re.sub(r"^\[\S+:\d+\] ", "", lines[0]).partition(". This is typically")[0]
