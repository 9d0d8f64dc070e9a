"""What the ranks of a run hold, compared."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from layerwise.groups import World

_MAX_BYTES = 400  # of a text in a message


def first_difference(held: Mapping[str, str], world: World) -> str | None:
    """Compare texts by name over all ranks: the first that differs, for people, and None where all are the same.

    Every rank calls this, with its texts in the same order, and gets the same answer.
    """
    texts = [f"{name} is {text}" for name, text in held.items()]
    digests = [int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") for text in texts]
    most = max(row[0] for row in world.gather_ints([len(digests)]))
    table = np.array(world.gather_ints([*digests, *[-1] * (most - len(digests))]))
    ranks, places = np.nonzero(table != table[0])
    if not len(places):
        return None
    place = int(places.min())
    rank = int(ranks[places == place].min())
    ours = texts[place] if place < len(texts) else "nothing more is known"
    known = _gather_text(ours, world)
    return f"{known[0]} on rank 0, but {known[rank]} on rank {rank}"


def _gather_text(text: str, world: World) -> list[str]:
    """Every rank's text, by rank."""
    encoded = text.encode()[:_MAX_BYTES]
    sizes = [row[0] for row in world.gather_ints([len(encoded)])]
    rows = world.gather_ints([*encoded, *[0] * (max(sizes) - len(encoded))])
    return [bytes(row[:size]).decode(errors="ignore") for row, size in zip(rows, sizes, strict=True)]
