"""Token stores on disk: built once, whole or not at all, by one of the processes that ask for them at once.

A store is a folder `<key>` in the cache folder, with one .npy file per array and a manifest that holds their sizes and
digests. It is written beside that name and renamed, so that a folder with the name is complete. Whoever builds holds a
lock, which the system drops when its holder dies; where a file system has no locks, several build and the first to
rename wins.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike

from layerwise.data.store import Array, Save, StoreWriter, TokenStore
from layerwise.errors import DataError, LayerwiseError

MANIFEST_FILE = "manifest.json"
# Token files up to here are read whole when they are opened; of larger ones each sample is checked when it is read.
CHECKED_AT_OPEN_BYTES = 2**30
_FORMAT = 1

Build = Callable[[StoreWriter, Save], TokenStore]
_log = logging.getLogger("layerwise.data")


def cached_store(folder: Path, key: str, build: Build) -> TokenStore:
    """The store with this key, from the folder, or built and put there. Raises DataError."""
    target = folder / f"{key}-{_FORMAT}"
    with suppress(_DamagedError):
        return _open(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f".{target.name}.lock") as alone:
            return _open_or_build(target, build, alone)
    except OSError as error:
        raise DataError(
            f"cache_dir {folder}: cannot be used: {error.strerror or error}; make room or permit writing there, name "
            "another folder, or leave cache_dir out to hold tokens in memory"
        ) from None


class _DamagedError(LayerwiseError):
    """A cache folder is not as it was written, or not there."""


def _open_or_build(target: Path, build: Build, alone: bool) -> TokenStore:
    """What another process built while this one waited, else a new store."""
    if target.exists():
        try:
            return _open(target)
        except _DamagedError as damage:
            _log.warning("the token cache %s is damaged (%s); it is built anew", target, damage)
            _discard(target)
    if alone:
        for abandoned in target.parent.glob(f".{target.name}.*.part"):
            shutil.rmtree(abandoned, ignore_errors=True)
    return _build_at(target, build)


def _build_at(target: Path, build: Build) -> TokenStore:
    part = _neighbour(target)

    def scratch() -> IO[bytes]:
        return tempfile.TemporaryFile(dir=part)

    def save(name: str, shape: tuple[int, ...], dtype: DTypeLike, pieces: Iterable[Array]) -> Array:
        header = {"shape": shape, "fortran_order": False, "descr": np.lib.format.dtype_to_descr(np.dtype(dtype))}
        with (part / f"{name}.npy").open("wb") as file:  # not mapped: a full disk would end the process
            np.lib.format.write_array_header_2_0(file, header)
            for piece in pieces:
                file.write(piece.tobytes())
        return _load(part, name)

    writer = StoreWriter(scratch)
    try:
        _write_manifest(part, build(writer, save))
        try:
            part.rename(target)
        except OSError:
            if not target.exists():
                raise
        return _open(target)  # where another process was first, what it built
    finally:
        writer.close()
        shutil.rmtree(part, ignore_errors=True)


def _neighbour(target: Path) -> Path:
    """A new folder beside the target that no other process uses."""
    part = target.with_name(f".{target.name}.{uuid.uuid4().hex}.part")
    part.mkdir()
    return part


def _load(folder: Path, name: str) -> Array:
    values: Array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    return values


def _write_manifest(folder: Path, store: TokenStore) -> None:
    manifest = {
        "arrays": {name: _identity(folder / f"{name}.npy") for name in store.arrays},
        "files": store.files,
        "counts": store.counts,
        "first_fault": store.first_fault,
        "largest_id": store.largest_id,
    }
    body = json.dumps(manifest)
    digest = hashlib.blake2b(body.encode(), digest_size=16).hexdigest()
    (folder / MANIFEST_FILE).write_text(json.dumps({"digest": digest, "body": body}))


def _open(folder: Path) -> TokenStore:
    """A store whose files are those that were written. Raises _DamagedError."""
    try:
        outer = json.loads((folder / MANIFEST_FILE).read_text())
        if hashlib.blake2b(outer["body"].encode(), digest_size=16).hexdigest() != outer["digest"]:
            raise _DamagedError(f"{MANIFEST_FILE} was changed")
        manifest = json.loads(outer["body"])
        for name, expected in manifest["arrays"].items():
            _check(folder / f"{name}.npy", expected)
        arrays = {name: _load(folder, name) for name in manifest["arrays"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"{type(error).__name__}: {error}") from None
    return TokenStore(
        arrays=arrays,
        files=tuple(manifest["files"]),
        counts=manifest["counts"],
        first_fault=manifest["first_fault"],
        largest_id=manifest["largest_id"],
    )


def _check(path: Path, expected: dict[str, Any]) -> None:
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise _DamagedError(f"{path.name} has {size} bytes, {expected['bytes']} were written")
    if size <= CHECKED_AT_OPEN_BYTES and _identity(path) != expected:
        raise _DamagedError(f"{path.name} holds other bytes than were written")


def _identity(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"bytes": path.stat().st_size, "digest": digest}


def _discard(target: Path) -> None:
    """Renamed first, so that no other process opens a half-deleted folder."""
    aside = _neighbour(target)
    with suppress(FileNotFoundError):
        target.rename(aside / target.name)
    shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Hold the lock, waiting for it; False where the file system has none."""
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
