"""All ranks of a run have the same settings, or none begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from layerwise.agreement import first_difference
from layerwise.errors import SpecError
from layerwise.groups import World

# Where something lies, under `data`, may differ from host to host; what lies there is compared as a hash.
_PLACES = ("source", "tokenizer", "chat_template", "cache_dir")


def agree_on_settings(settings: dict[str, Any], world: World) -> None:
    """Compare settings over all ranks. Every rank calls this.

    Raises SpecError, on every rank, where two ranks have different ones; it names the first of them and both values.
    """
    world.progress.at = "agreement on the settings"
    if difference := first_difference(dict(_flat(settings)), world):
        raise SpecError(
            f"{difference}: all ranks of a run need the same settings, data and version; start them with the same "
            "config file and options"
        )


def _flat(settings: dict[str, Any], *path: str) -> Iterator[tuple[str, str]]:
    """Names as in `--set`, with their values."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, *path, name)
        elif not (path[:1] == ("data",) and name in _PLACES):
            yield ".".join((*path, name)), repr(value)
