"""The list of a checkpoint's files with their sizes and SHA-256, written last: what it vouches for is whole."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from layerwise.errors import CheckpointError

MANIFEST_FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class FileDigest:
    """A file in the folder of the manifest: its name, its size and its SHA-256 in hexadecimal digits."""

    name: str
    num_bytes: int
    sha256: str


def digest_file(path: Path) -> FileDigest:
    """Size and SHA-256 of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileDigest(name=path.name, num_bytes=file.tell(), sha256=digest.hexdigest())


def write_manifest(folder: Path, files: list[FileDigest]) -> None:
    """Write the manifest and bring it, and the names in the folder, to the disk."""
    text = json.dumps({"format": FORMAT, "files": [asdict(file) for file in files]}, indent=1)
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
    sync(folder / MANIFEST_FILE)
    sync(folder)


def read_manifest(folder: Path) -> tuple[FileDigest, ...]:
    """The files that make up a checkpoint. Raises CheckpointError for a manifest that is missing or not whole."""
    path = folder / MANIFEST_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        files = tuple(FileDigest(**entry) for entry in content["files"])
        known = content["format"] == FORMAT
        # A name is never a path: what a manifest says cannot lead out of its folder.
        plain = all(file.name == Path(file.name).name and file.name not in ("", "..") for file in files)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{path}: not a whole manifest ({type(error).__name__}: {error})") from None
    if not known or not plain or not files:
        raise CheckpointError(f"{path}: not a manifest of format {FORMAT}: it must list plain file names")
    return files


def verify_file(folder: Path, expected: FileDigest) -> None:
    """Compare a file with the manifest, before anything else reads it. Raises CheckpointError."""
    path = folder / expected.name
    try:
        num_bytes = path.stat().st_size
        if num_bytes != expected.num_bytes:
            raise CheckpointError(f"{path}: {num_bytes:,} bytes, its manifest says {expected.num_bytes:,}: truncated?")
        sha256 = digest_file(path).sha256
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if sha256 != expected.sha256:
        raise CheckpointError(
            f"{path}: SHA-256 {sha256[:12]}..., its manifest says {expected.sha256[:12]}...: changed since it was saved"
        )


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
