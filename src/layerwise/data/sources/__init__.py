"""Where rows come from: files and folders, Hugging Face datasets, or any iterable that a program holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from layerwise.data.config import SourceConfig
from layerwise.data.sources.files import file_source
from layerwise.data.sources.huggingface import dataset_source
from layerwise.data.sources.rows import Row, Source

Rows = Iterable[Mapping[str, Any] | str]


def open_source(config: SourceConfig, rows: Rows | None = None) -> Source:
    """What a config describes, or `rows` in its place; nothing of it is read yet. Raises SpecError, DataError."""
    if rows is not None:
        return _given_rows(rows)
    return dataset_source(config) if config.format == "huggingface" else file_source(config)


def _given_rows(rows: Rows) -> Source:
    def read() -> Iterator[Row]:
        for number, content in enumerate(rows, start=1):
            yield Row(file=0, number=number, where=f"row {number}", content=content)

    return Source(files=("row",), fingerprint=getattr(rows, "_fingerprint", None), ignored=0, read=read)
