"""Whether a folder is the same one on all hosts: rank 0 leaves a token there, the others look for it."""

from __future__ import annotations

import shutil
import time
import uuid
from contextlib import suppress
from pathlib import Path

from layerwise.doctor.words import gather_texts
from layerwise.groups import World
from layerwise.spec import Record

# Network file systems remember for a while that a file was not there.
PATIENCE_S = 5.0
_POLL_S = 0.1


class FolderFacts(Record):
    """A folder as one rank sees it.

    path: the folder asked for, or the first above it that is there on rank 0. error: why nothing can be written there.
    """

    path: str
    sees_token: bool
    error: str | None
    free_bytes: int


def look_at_folder(world: World, folder: Path, patience_s: float = PATIENCE_S) -> list[FolderFacts]:
    """What every rank sees of the folder, by rank; it need not be there. Every rank calls this, and nothing is left."""
    name = f".layerwise-doctor-{uuid.uuid4().hex}"
    path = Path(gather_texts(world, str(_existing(folder.absolute())))[0])
    token = path / gather_texts(world, name)[0]
    error = _try_to_write(path / name)
    if world.rank == 0 and error is None:
        token.write_text(token.name)
    gather_texts(world, "written")
    sees_token = _wait_for(token, patience_s)
    facts = FolderFacts(path=str(path), sees_token=sees_token, error=error, free_bytes=_free_bytes(path))
    gathered = gather_texts(world, facts.model_dump_json())
    if world.rank == 0:
        with suppress(OSError):
            token.unlink(missing_ok=True)
    return [FolderFacts.model_validate_json(text) for text in gathered]


def _existing(folder: Path) -> Path:
    """The folder, or the first above it that is there."""
    return next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))


def _try_to_write(path: Path) -> str | None:
    try:
        path.write_text(path.name)
        path.unlink()
    except OSError as error:
        return str(error.strerror or error)
    return None


def _wait_for(token: Path, patience_s: float) -> bool:
    until = time.monotonic() + patience_s
    while True:
        with suppress(OSError):
            if token.read_text() == token.name:
                return True
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)


def _free_bytes(path: Path) -> int:
    try:
        return shutil.disk_usage(path).free
    except OSError:
        return 0
