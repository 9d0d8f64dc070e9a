"""What every rank does in a micro-batch, from which its seconds follow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from functools import reduce
from operator import add
from typing import NamedTuple

import numpy as np

from layerwise.cost.flops import Floats
from layerwise.cost.layer import LayerCost
from layerwise.cost.prediction import LayerTimes
from layerwise.plan import Ints


class Sent(NamedTuple):
    """What crosses links in one exchange: `sent_bytes[i]` from rank `src[i]` to rank `dst[i]`, each pair once."""

    src: Ints
    dst: Ints
    sent_bytes: Floats


class Moved(NamedTuple):
    """`times` passes of hidden states from one place (a layer kind or HOME) to another, and what each sends forward."""

    source: str
    target: str
    times: int
    sent: Sent


class Work(NamedTuple):
    """A micro-batch's work, or that of a part of it that shares no rank and no sample with the rest.

    tokens: at every place, int64 [num_ranks] each. times: of one layer of each kind.
    """

    tokens: dict[str, Ints]
    times: dict[str, LayerTimes]
    moves: list[Moved]


def join_works(works: Sequence[Work], layers: Iterable[LayerCost]) -> Work:
    """The work of a micro-batch from that of its parts, which are as it would be in the whole."""
    if len(works) == 1:
        return works[0]
    tokens = {place: reduce(add, [work.tokens[place] for work in works]) for place in works[0].tokens}
    times: dict[str, LayerTimes] = {
        layer.kind: _join_times([work.times[layer.kind] for work in works], layer, tokens[layer.kind])
        for layer in layers
    }
    passes: dict[tuple[str, str, int], list[Sent]] = {}
    for moved in (moved for work in works for moved in work.moves):
        passes.setdefault(moved[:3], []).append(moved.sent)
    moves = [Moved(*key, Sent(*map(np.concatenate, zip(*sent, strict=True)))) for key, sent in passes.items()]
    return Work(tokens, times, moves)


def _join_times(times: Sequence[LayerTimes], layer: LayerCost, tokens: Ints) -> LayerTimes:
    joined = LayerTimes(**{f.name: reduce(add, [getattr(part, f.name) for part in times]) for f in fields(LayerTimes)})
    # What is exposed on a rank follows from all that it does: idle parts would count it again.
    return replace(joined, exposed_s=layer.exposed_s(joined.compute_s, tokens))
