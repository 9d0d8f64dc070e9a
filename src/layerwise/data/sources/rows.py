"""Rows out of files: JSON lines, parquet, Arrow. A row that cannot be read is an error in its place, not an end."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from layerwise.errors import DataError, UnsupportedError

Format = Literal["text", "jsonl", "parquet", "arrow"]
ROW_FORMATS: dict[str, Format] = {".jsonl": "jsonl", ".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow"}
ROWS_AT_ONCE = 1024
# What a numbered row is called in messages.
UNITS: dict[Format, str] = {"jsonl": "line", "parquet": "row", "arrow": "row"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One row, or what is wrong with it.

    `file` counts in the source's files; `number` is the line or row from 1, or 0 for a whole file. `content` is a
    mapping of columns, or text; bytes are text that need not be UTF-8.
    """

    file: int
    number: int
    where: str
    content: Mapping[str, Any] | str | bytes | DataError


@dataclass(frozen=True, kw_only=True)
class Source:
    """Rows to read, again and again in the same order.

    `fingerprint` changes where the rows may have changed; None: unknown. `ignored` counts files that were left aside.
    """

    files: tuple[str, ...]
    fingerprint: str | None
    ignored: int
    read: Callable[[], Iterator[Row]]

    def name_of(self, file: int, number: int) -> str:
        """How a sample is called: the path within the source, and its line or row."""
        return f"{self.files[file]}:{number}" if number else self.files[file]


def read_rows(path: Path, format: Format, file: int) -> Iterator[Row]:
    """The rows of a file; one row that is an error where the file, or the rest of it, cannot be read."""
    number = 0
    contents = _json_lines(path) if format == "jsonl" else _record_batches(path, format)
    try:
        for number, content in contents:
            where = f"{path}, {UNITS[format]} {number}"
            fault = DataError(f"{where}: {content}") if isinstance(content, str) else None
            yield Row(file=file, number=number, where=where, content=fault or content)
    except OSError as error:
        reason = f"{path}: cannot be read: {error.strerror or error}"
        yield Row(file=file, number=0, where=str(path), content=DataError(reason))
    except DataError as error:
        yield Row(file=file, number=0, where=str(path), content=error)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Line numbers and objects, or what is wrong with a line."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, _json_object(line)


def _json_object(line: bytes) -> dict[str, Any] | str:
    try:
        row = json.loads(line)
    except UnicodeDecodeError:
        return "not UTF-8 text; convert the file to UTF-8"
    except (ValueError, RecursionError) as error:
        return f"not a whole JSON object ({error}); is the file half-written?"
    return row if isinstance(row, dict) else f"expected a JSON object per line, got {type(row).__name__}"


def _record_batches(path: Path, format: Format) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        import pyarrow
    except ImportError:
        raise UnsupportedError(
            f"{path}: {format} files need the package `pyarrow`: pip install 'layerwise[data]'"
        ) from None
    number = 0
    try:
        with ExitStack() as files:
            for batch in _open_parquet(path, files) if format == "parquet" else _open_arrow(path, files):
                for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                    for row in _python_rows(batch.slice(start, ROWS_AT_ONCE)):
                        number += 1
                        yield number, row
    except pyarrow.ArrowException as error:
        raise DataError(f"{path}: not a readable {format} file ({error}); is it half-written?") from None


def _open_parquet(path: Path, files: ExitStack) -> Iterator[Any]:
    from pyarrow import parquet

    yield from files.enter_context(parquet.ParquetFile(path)).iter_batches(batch_size=ROWS_AT_ONCE)


def _open_arrow(path: Path, files: ExitStack) -> Iterator[Any]:
    """Record batches of the Arrow file format (Feather 2) or stream format; offsets in it are not trusted."""
    import pyarrow
    from pyarrow import ipc

    data = files.enter_context(pyarrow.memory_map(str(path)))
    try:
        reader = files.enter_context(ipc.open_file(data))
        batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
    except pyarrow.ArrowInvalid:
        data.seek(0)
        batches = iter(files.enter_context(ipc.open_stream(data)))
    for batch in batches:
        batch.validate(full=False)
        yield batch


def _python_rows(batch: Any) -> Iterator[dict[str, Any] | str]:
    """A column may hold text that is not UTF-8; then the rows are taken one by one to find which."""
    try:
        batch.validate(full=True)
        yield from batch.to_pylist()
    except ValueError as error:
        if batch.num_rows == 1:
            yield f"not readable: {error}"
        else:
            for row in range(batch.num_rows):
                yield from _python_rows(batch.slice(row, 1))
