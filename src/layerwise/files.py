"""Files that people name on the command line: checked before work is spent on them, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from layerwise.errors import SpecError


def check_target(path: Path, option: str) -> None:
    """Raise SpecError where no file can be, before time is spent on what goes into it; `option` named the path."""
    if os.path.exists(path) and not os.path.isfile(path):  # Path's own raise for a name that is too long
        raise SpecError(f"{option} {path}: is there already and is no file; name a file")
    if not os.path.isdir(path.parent):
        raise SpecError(f"{option} {path}: no such folder {str(path.parent)!r}; make it, or name another file")


def check_targets(paths: Mapping[str, Path | None]) -> None:
    """`check_target` for the path of each option that is given. Raises SpecError, also where two name one file."""
    named: dict[str, str] = {}
    for option, path in paths.items():
        if path is None:
            continue
        check_target(path, option)
        other = named.setdefault(os.path.realpath(path), option)
        if other != option:
            raise SpecError(f"{other} and {option} name the same file, {path}; name two")


@contextmanager
def whole_file(path: Path, option: str) -> Iterator[Path]:
    """The path of a hidden neighbour to write to, which becomes `path` at the end; a failure leaves neither.

    The neighbour keeps the suffix, which libraries read the format from. Raises SpecError where it cannot be written.
    """
    part = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        raise SpecError(f"{option} {path}: cannot be written: {error.strerror or error}") from None
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def write_whole(path: Path, text: str | Iterable[str], option: str) -> None:
    """Write text, or pieces of it as they are made, then swap. Raises SpecError."""
    with whole_file(path, option) as part, part.open("w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)
