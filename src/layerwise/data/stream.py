"""Samples as they are read, for data that is too large to tokenise before training, or has no end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from layerwise.data.config import DataConfig
from layerwise.data.corpus import Sample
from layerwise.data.documents import Document, DocumentReader, refused
from layerwise.data.ids import check_ids
from layerwise.data.limits import Limit
from layerwise.data.sources import Rows, open_source
from layerwise.data.sources.rows import Row
from layerwise.errors import DataError, SpecError


class SampleStream:
    """An iterable dataset for `PlannedLoader(dataset=..., tokens_per_step=...)`: rows tokenised as they are read.

    The order is that of the source. `counts` says what became of the rows of the current pass: samples, bad_files,
    bad_rows, skipped, truncated, empty. Arguments and errors are those of load_corpus; what needs all rows at once is
    refused: mixture, max_samples, cache_dir, and planning_window_steps, which PlannedLoader has for streams.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        vocab_size: int | None = None,
        budget_tokens: int | None = None,
        rows: Rows | None = None,
    ) -> None:
        for key in ("mixture", "max_samples", "cache_dir", "planning_window_steps"):
            if getattr(config, key) != DataConfig.model_fields[key].default:
                raise SpecError(
                    f"{key}={getattr(config, key)!r} has no effect on a stream; leave it out, or load_corpus"
                )
        self._source = open_source(config, rows)
        self._reader = DocumentReader.of(config).for_column(config.text_field)
        self._limit = Limit.of(config, budget_tokens)
        self._vocab_size, self._skip_bad = vocab_size, config.bad_rows == "skip"
        self.counts: Counter[str] = Counter()

    def __iter__(self) -> Iterator[Sample]:
        self.counts.clear()
        for row, document in self._reader.read(self._source.read()):
            sample = self._sample(row, document)
            if sample is not None:
                self.counts["samples"] += 1
                yield sample

    def _sample(self, row: Row, document: Document | DataError) -> Sample | None:
        """The sample of a row; None for a row that is counted and left out."""
        if isinstance(document, DataError):
            if not self._skip_bad:
                raise refused(document)
            self.counts["bad_rows" if row.number else "bad_files"] += 1
            return None
        name, length = self._source.name_of(row.file, row.number), len(document.tokens)
        if not length or not self._limit.fits(length, name):
            self.counts["skipped" if length else "empty"] += 1
            return None
        kept = self._limit.cut(length)
        self.counts["truncated"] += kept < length
        tokens, labels = document.tokens[:kept], None if document.labels is None else document.labels[:kept]
        check_ids(tokens, labels, self._vocab_size, f"sample {name!r}")
        return Sample(name=name, input_ids=tokens.astype("int64"), labels=labels)
