"""Finding the files of a source: in one order on every machine, and never outside the source's own folder."""

from __future__ import annotations

import hashlib
import os
import stat
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from layerwise.data.config import STDLIB, TEXT_EXTENSIONS, SourceConfig
from layerwise.data.lengths import decode_utf8
from layerwise.data.sources.rows import ROW_FORMATS, Format, Row, Source, read_rows
from layerwise.errors import DataError, SpecError

MANIFEST = ".manifest"
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip")
_FOREIGN_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class _Files:
    """The files to read, by their path within `root`; `ignored` counts files that were left aside."""

    root: Path
    format: Format
    paths: tuple[Path, ...]
    ignored: int


def file_source(config: SourceConfig) -> Source:
    """The rows of a file, of a folder's or a manifest's files, or of the standard library.

    Raises SpecError where the source does not exist, is ambiguous, or an option would have no effect on it, and
    DataError where a path leads out of the folder.
    """
    files = _standard_library() if config.source == STDLIB else _find(config)
    names = [path.relative_to(files.root).as_posix() for path in files.paths]
    as_bytes = config.source == STDLIB  # it holds a few files that are not UTF-8 on purpose

    def read() -> Iterator[Row]:
        for file, path in enumerate(files.paths):
            if not _is_regular(path):
                reason = DataError(f"{path}: cannot be read: not a file, or a link to nothing")
                yield Row(file=file, number=0, where=str(path), content=reason)
            elif files.format == "text":
                yield Row(file=file, number=0, where=str(path), content=_read_text(path, as_bytes))
            else:
                yield from read_rows(path, files.format, file)

    return Source(files=tuple(names), fingerprint=_fingerprint(files, names), ignored=files.ignored, read=read)


def _standard_library() -> _Files:
    root = Path(sysconfig.get_path("stdlib"))
    paths = tuple(path for path in _walk(root) if path.suffix == ".py" and not path.is_symlink())
    return _Files(root=root, format="text", paths=paths, ignored=0)


def _find(config: SourceConfig) -> _Files:
    source = Path(config.source)
    named = source.suffix == MANIFEST or not source.is_dir()  # named one by one, not found in a folder
    if source.is_file():
        if source.suffix in _COMPRESSED:
            raise SpecError(f"source={config.source!r} is compressed, which is not read; decompress it first")
        if config.extensions:
            raise SpecError(f"extensions={list(config.extensions)} has no effect: source {config.source!r} is one file")
        root, found = source.parent, _listed(source) if source.suffix == MANIFEST else [source]
    elif source.is_dir():
        root, found = source, _walk(source)
    else:
        raise SpecError(f"source={config.source!r}: no such file or folder; legal: 'stdlib', a file, a folder")
    format = _format_of(config, found)
    _refuse_unused(config, format)
    paths = tuple(path for path in found if named or _belongs(path, format, config))
    if found != [source]:
        for path in paths:
            _refuse_outside(path, root)
    return _Files(root=root, format=format, paths=paths, ignored=len(found) - len(paths))


def _walk(root: Path) -> list[Path]:
    """Files below root, sorted by path; hidden ones, caches and installed packages are not looked at.

    A link to a folder within root is not followed, since its files are found where they are.
    """

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None

    found = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in _FOREIGN_FOLDERS and not name.startswith(".")]
        for name in folders:
            _refuse_outside(Path(folder, name), root)
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _listed(manifest: Path) -> list[Path]:
    """The files that a manifest names, one path per line within its own folder, in its order."""
    lines = decode_utf8(_read_bytes(manifest), str(manifest)).splitlines()
    names = [name for line in lines if (name := line.partition("#")[0].strip())]
    paths = [manifest.parent / name for name in names]
    for name, path in zip(names, paths, strict=True):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise DataError(f"{manifest}: {name!r} leads out of the manifest's folder; list paths within it")
        if paths.count(path) > 1:
            raise DataError(f"{manifest}: {name!r} is listed twice; a sample is seen once per epoch")
    return paths


def _refuse_outside(path: Path, root: Path) -> None:
    """Data must not make a program read what its owner did not name."""
    target = path.resolve()
    if not target.is_relative_to(root.resolve()):
        raise DataError(
            f"{path}: a link to {target}, outside the source {str(root)!r}; links may lead within the source only: "
            "copy the file, or name the folder that holds both as source"
        )


def _format_of(config: SourceConfig, found: list[Path]) -> Format:
    if config.format != "auto" and config.format != "huggingface":
        return config.format
    if config.extensions:
        return "text"
    formats = {ROW_FORMATS.get(path.suffix, "text") for path in found}
    if len(formats) > 1:
        raise SpecError(
            f"source={config.source!r} holds files of several formats ({', '.join(sorted(formats))}); "
            "set format to the one to read, or extensions to read text files"
        )
    return formats.pop() if formats else "text"


def _refuse_unused(config: SourceConfig, format: Format) -> None:
    if config.extensions and format != "text":
        raise SpecError(f"extensions={list(config.extensions)} has no effect with format={format!r}; it selects texts")
    if config.text_field and format == "text":
        raise SpecError(f"text_field={config.text_field!r} has no effect with format='text'; it names a column of rows")


def _belongs(path: Path, format: Format, config: SourceConfig) -> bool:
    if format == "text":
        return path.suffix in (config.extensions or TEXT_EXTENSIONS)
    return ROW_FORMATS.get(path.suffix) == format


def _fingerprint(files: _Files, names: list[str]) -> str:
    """Of every file its path, size and time of change; a file that is not there counts as such."""
    state = hashlib.blake2b(
        f"{files.root.resolve()}\n{files.format}\n".encode("utf-8", "surrogateescape"), digest_size=16
    )
    for name, path in zip(names, files.paths, strict=True):
        try:
            found = path.stat()
            state.update(f"{name}\0{found.st_size}\0{found.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
        except OSError:
            state.update(f"{name}\0none\n".encode("utf-8", "surrogateescape"))
    return state.hexdigest()


def _is_regular(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)  # a pipe would be waited for
    except OSError:
        return False


def _read_text(path: Path, as_bytes: bool) -> str | bytes | DataError:
    try:
        data = _read_bytes(path)
        return data if as_bytes else decode_utf8(data, str(path))
    except DataError as error:
        return error


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None
