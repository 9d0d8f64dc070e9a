"""Samples to train on: token ids with lengths known before training, in the same order on every rank."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerwise.data.cache import cached_store
from layerwise.data.config import DataConfig, SourceConfig, WeightedSource
from layerwise.data.documents import DocumentReader, refused
from layerwise.data.ids import IGNORED_LABEL, check_ids
from layerwise.data.limits import Limit
from layerwise.data.report import CorpusReport, SourceReport
from layerwise.data.sources import Rows, Source, open_source
from layerwise.data.store import Save, StoreWriter, TokenStore, store_in_memory
from layerwise.errors import DataError, SpecError
from layerwise.plan import Ints

__all__ = ["IGNORED_LABEL", "Corpus", "Part", "Sample", "load_corpus"]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One document: `input_ids` int64 [tokens], `labels` int64 [tokens] or None.

    labels[i] belongs to token i, unshifted, and -100 is ignored; None: the labels are the input_ids.
    """

    name: str
    input_ids: Ints
    labels: Ints | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """What a corpus holds of one source: which samples of its store, and how many tokens of each."""

    name: str
    weight: float
    store: TokenStore
    kept: Ints
    lengths: Ints

    def sample_name(self, index: int) -> str:
        """The place in the source, behind the source's name in a mixture."""
        name = self.store.name(int(self.kept[index]))
        return f"{self.name}: {name}" if self.name else name

    def read(self, index: int) -> Sample:
        """The sample, cut to its length. Raises DataError where the cache is damaged."""
        tokens, labels = self.store.read(int(self.kept[index]))
        length = int(self.lengths[index])
        return Sample(
            name=self.sample_name(index),
            input_ids=tokens[:length],
            labels=None if labels is None else labels[:length],
        )


class Corpus(Sequence[Sample]):
    """A map-style dataset, the samples of its parts one after another.

    `lengths` int64 [samples], in tokens, and `digests` uint64 [samples] are known without reading tokens; `report`
    counts what was left out.
    """

    def __init__(self, parts: Sequence[Part], report: CorpusReport) -> None:
        self.parts, self.report = tuple(parts), report
        self.lengths: Ints = np.concatenate([part.lengths for part in parts])
        self.digests: NDArray[np.uint64] = np.concatenate([part.store.digests[part.kept] for part in parts])
        self._starts = np.cumsum([0, *(len(part.kept) for part in parts)])

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def sources(self) -> list[tuple[int, float]]:
        """Number of samples and weight of each part, as StepSampler takes them."""
        return [(len(part.kept), part.weight) for part in self.parts]

    @cached_property
    def fingerprint(self) -> str:
        """A hash over every sample's tokens, labels and length, and their order."""
        return hashlib.blake2b(self.lengths.tobytes() + self.digests.tobytes(), digest_size=8).hexdigest()

    def __getitem__(self, index: Any) -> Any:
        """The sample at an int. Raises IndexError, and DataError where its cache is damaged."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        part = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self.parts[part].read(int(index - self._starts[part]))


def load_corpus(
    config: DataConfig, *, vocab_size: int | None = None, budget_tokens: int | None = None, rows: Rows | None = None
) -> Corpus:
    """The corpus that a config describes, tokenised here or taken from its cache.

    vocab_size: of the model; every token and label must be in it. budget_tokens: the longest sample that a plan can
    place; longer ones are treated as `config.overlong` says. rows: to be read in place of `config.source`, such as a
    `datasets.Dataset`. Raises SpecError for settings, DataError for data.
    """
    limit = Limit.of(config, budget_tokens)
    if rows is not None and config.mixture is not None:
        raise SpecError("rows= has no effect with data.mixture; give one of them")
    reader = DocumentReader.of(config)
    parts, reports = [], []
    for name, source in config.sources.items():
        part, report = _load_part(name, source, config, limit, reader.for_column(source.text_field), rows)
        _check_vocabulary(part, vocab_size)
        parts.append(part)
        reports.append(report)
    if config.chat_template is not None and not any(part.store.counts["chats"] for part in parts):
        raise SpecError(f"chat_template={config.chat_template!r} has no effect: no row is a chat; leave it out")
    return Corpus(parts, CorpusReport(sources=tuple(reports)))


def _load_part(
    name: str, config: SourceConfig, data: DataConfig, limit: Limit, reader: DocumentReader, rows: Rows | None
) -> tuple[Part, SourceReport]:
    source = open_source(config, rows)
    store = _load_store(source, reader, data)
    if store.first_fault is not None and data.bad_rows == "error":
        raise refused(store.first_fault)
    fitting = _fitting(store, limit)
    kept = _choose(fitting, config.max_samples, data.seed)
    lengths = np.array([limit.cut(length) for length in store.lengths[kept].tolist()], dtype=np.int64)
    report = SourceReport(
        name=name,
        weight=config.weight if isinstance(config, WeightedSource) else None,
        files=len(source.files),
        ignored_files=source.ignored,
        bad_files=store.counts["bad_files"],
        bad_rows=store.counts["bad_rows"],
        samples=len(kept),
        tokens=int(lengths.sum()),
        skipped=len(store) - len(fitting),
        truncated=int((lengths < store.lengths[kept]).sum()),
        empty=store.counts["empty"],
        not_chosen=len(fitting) - len(kept),
    )
    if not len(kept):
        raise DataError(f"{_called(name, config)}: no samples ({report}); change source, extensions or limits")
    weight = config.weight if isinstance(config, WeightedSource) else 1.0
    return Part(name=name, weight=weight, store=store, kept=kept, lengths=lengths), report


def _called(name: str, config: SourceConfig) -> str:
    return f"mixture.{name}, source={config.source!r}" if name else f"source={config.source!r}"


def _load_store(source: Source, reader: DocumentReader, data: DataConfig) -> TokenStore:
    build = partial(_build_store, source, reader, skip=data.bad_rows == "skip")
    if data.cache_dir is None:
        return store_in_memory(build)
    if source.fingerprint is None:
        raise SpecError(
            f"cache_dir={data.cache_dir!r} has no effect: nothing tells whether rows= are still the same (a "
            "datasets.Dataset would); leave it out"
        )
    identity = f"{source.fingerprint}\n{reader.fingerprint}"
    key = hashlib.blake2b(identity.encode(), digest_size=12).hexdigest()
    return cached_store(Path(data.cache_dir), key, build)


def _build_store(source: Source, reader: DocumentReader, writer: StoreWriter, save: Save, *, skip: bool) -> TokenStore:
    """Read every row. Raises the first DataError unless `skip`."""
    counts: Counter[str] = Counter(bad_files=0, bad_rows=0, empty=0, chats=0)
    first_fault: str | None = None
    for row, document in reader.read(source.read()):
        if isinstance(document, DataError):
            if not skip:
                raise refused(document)
            first_fault = first_fault or str(document)
            counts["bad_rows" if row.number else "bad_files"] += 1
        elif not len(document.tokens):
            counts["empty"] += 1
        else:
            counts["chats"] += document.is_chat
            writer.add(row.file, row.number, document.tokens, document.labels)
    return writer.finish(save, files=source.files, counts=counts, first_fault=first_fault)


def _fitting(store: TokenStore, limit: Limit) -> Ints:
    """Indices of the samples that are to be kept. Raises the DataError of the first one that may not be there."""
    longer = np.flatnonzero(store.lengths > (limit.max_tokens or np.inf))
    left_out = [index for index in longer.tolist() if not limit.fits(int(store.lengths[index]), store.name(index))]
    return np.setdiff1d(np.arange(len(store)), left_out)


def _choose(fitting: Ints, max_samples: int | None, seed: int) -> Ints:
    if max_samples is None or len(fitting) <= max_samples:
        return fitting
    return fitting[np.sort(np.random.default_rng(seed).choice(len(fitting), max_samples, replace=False))]


def _check_vocabulary(part: Part, vocab_size: int | None) -> None:
    """Tokens are looked at only where the largest of the store is too large, to find the sample."""
    if vocab_size is not None and part.store.largest_id >= vocab_size:
        for index in range(len(part.kept)):
            sample = part.read(index)
            check_ids(sample.input_ids, sample.labels, vocab_size, f"sample {sample.name!r}")
