"""Rows of Hugging Face datasets, map-style or streaming."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from layerwise.data.config import SourceConfig
from layerwise.data.sources.rows import Row, Source
from layerwise.errors import DataError, SpecError, UnsupportedError


def dataset_source(config: SourceConfig) -> Source:
    """The rows of a folder that save_to_disk wrote, or of what load_dataset finds. Raises SpecError, DataError."""
    split = config.split or "train"
    dataset = _load(config, split)
    name = f"{config.source}[{split}]"

    def read() -> Iterator[Row]:
        number = 0
        try:
            for number, content in enumerate(dataset, start=1):
                yield Row(file=0, number=number, where=f"{name}, row {number}", content=content)
        except Exception as error:  # whatever the reader of some format raises; the rows after it are lost
            reason = f"{name}: rows after {number} cannot be read: {type(error).__name__}: {error}"
            yield Row(file=0, number=0, where=name, content=DataError(reason))

    fingerprint = None if config.streaming else getattr(dataset, "_fingerprint", None)
    return Source(files=(name,), fingerprint=fingerprint, ignored=0, read=read)


def _load(config: SourceConfig, split: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise UnsupportedError(
            f"source={config.source!r}: format 'huggingface' needs the package `datasets`: "
            "pip install 'layerwise[data]'"
        ) from None
    folder = Path(config.source)
    try:
        if not any((folder / file).is_file() for file in ("state.json", "dataset_dict.json")):
            return datasets.load_dataset(config.source, config.subset, split=split, streaming=config.streaming)
        if config.subset is not None:
            raise SpecError(f"subset={config.subset!r} has no effect: {config.source!r} was written by save_to_disk")
        saved = datasets.load_from_disk(config.source)
    except SpecError:
        raise
    except Exception as error:  # of many kinds: no such name, no network, no such split, a broken file
        raise DataError(
            f"source={config.source!r} (subset={config.subset!r}, split={split!r}): datasets cannot load it: "
            f"{type(error).__name__}: {error}"
        ) from None
    return _split_of(saved, config, split)


def _split_of(saved: Any, config: SourceConfig, split: str) -> Any:
    """One dataset out of a folder that holds it alone, or several by the names of their splits."""
    if isinstance(saved, dict):
        if split not in saved:
            raise SpecError(f"split={split!r}: {config.source!r} holds {', '.join(saved)}")
        saved = saved[split]
    elif config.split is not None:
        raise SpecError(f"split={split!r} has no effect: {config.source!r} holds one dataset; leave it out")
    return saved.to_iterable_dataset() if config.streaming else saved
