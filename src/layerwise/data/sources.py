"""Finding the files of a data source, and reading rows out of them."""

from __future__ import annotations

import json
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layerwise.data.config import STDLIB, TEXT_EXTENSIONS, DataConfig
from layerwise.data.lengths import decode_utf8
from layerwise.errors import DataError, SpecError, UnsupportedError

Format = Literal["text", "jsonl", "parquet"]
_ROW_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".parquet": "parquet"}
_FOREIGN_FOLDERS = ("site-packages", "dist-packages", "__pycache__")


@dataclass(frozen=True, kw_only=True)
class SourceFiles:
    """The files to read, sorted by their path within `root`; `ignored` counts files that were left aside."""

    root: Path
    format: Format
    paths: tuple[Path, ...]
    ignored: int

    def name_of(self, path: Path) -> str:
        """The path within the source, with forward slashes."""
        return path.relative_to(self.root).as_posix()


def find_files(config: DataConfig) -> SourceFiles:
    """The files of a source, in the same order on every machine.

    Raises SpecError where the source does not exist, is ambiguous, or an option would have no effect on it.
    """
    if config.source == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        found = _walk(root)
        paths = tuple(path for path in found if path.suffix == ".py" and not path.is_symlink())
        return SourceFiles(root=root, format="text", paths=paths, ignored=0)

    source = Path(config.source)
    if source.is_file():
        if config.extensions:
            raise SpecError(f"extensions={list(config.extensions)} has no effect: source {config.source!r} is one file")
        root, found = source.parent, [source]
    elif source.is_dir():
        root, found = source, _walk(source)
    else:
        raise SpecError(f"source={config.source!r}: no such file or folder; legal: 'stdlib', a file, a folder")

    format = _format_of(config, found)
    _refuse_unused(config, format)
    paths = tuple(path for path in found if _belongs(path, format, config, only_one=source.is_file()))
    inside = tuple(path for path in paths if source.is_file() or _stays_inside(path, root))
    return SourceFiles(root=root, format=format, paths=inside, ignored=len(found) - len(inside))


def _walk(root: Path) -> list[Path]:
    """Files below root, sorted by path; hidden ones, caches and installed packages are not looked at."""

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read: {error.strerror}") from None

    found = []
    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if name not in _FOREIGN_FOLDERS and not name.startswith(".")]
        found += [Path(folder, name) for name in files if not name.startswith(".")]
    return sorted(found, key=lambda path: path.relative_to(root).parts)


def _format_of(config: DataConfig, found: list[Path]) -> Format:
    if config.format != "auto":
        return config.format
    if config.extensions:
        return "text"
    formats = {_ROW_FORMATS.get(path.suffix, "text") for path in found}
    if len(formats) > 1:
        raise SpecError(
            f"source={config.source!r} holds files of several formats ({', '.join(sorted(formats))}); "
            "set format to the one to read, or extensions to read text files"
        )
    return formats.pop() if formats else "text"


def _refuse_unused(config: DataConfig, format: Format) -> None:
    if config.extensions and format != "text":
        raise SpecError(f"extensions={list(config.extensions)} has no effect with format={format!r}; it selects texts")
    if config.text_field and format == "text":
        raise SpecError(f"text_field={config.text_field!r} has no effect with format='text'; it names a column of rows")


def _belongs(path: Path, format: Format, config: DataConfig, *, only_one: bool) -> bool:
    if only_one:
        return True
    if format == "text":
        return path.suffix in (config.extensions or TEXT_EXTENSIONS)
    return _ROW_FORMATS.get(path.suffix) == format


def _stays_inside(path: Path, root: Path) -> bool:
    return not path.is_symlink() or path.resolve().is_relative_to(root.resolve())


def read_bytes(path: Path) -> bytes:
    """A whole file. Raises DataError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """A whole UTF-8 file. Raises DataError naming the file and the place."""
    return decode_utf8(read_bytes(path), str(path))


def read_rows(path: Path, format: Format) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows of a .jsonl or .parquet file with their line or row number, from 1. Raises DataError."""
    return _jsonl_rows(path) if format == "jsonl" else _parquet_rows(path)


def _jsonl_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_bytes(path).split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except UnicodeDecodeError:
            raise DataError(f"{path}, line {number}: not UTF-8 text; convert the file to UTF-8") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise DataError(
                f"{path}, line {number}: not a whole JSON object ({error}); is the file half-written?"
            ) from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object per line, got {type(row).__name__}")
        yield number, row


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise UnsupportedError(
            f"{path}: .parquet files need the package `pyarrow`: pip install 'layerwise[train]'"
        ) from None
    try:
        with parquet.ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches() for row in batch.to_pylist())
            yield from enumerate(rows, start=1)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable parquet file ({error}); is it half-written?") from None
