"""Samples to train on: token ids with lengths known before training, in the same order on every rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerwise.data.config import STDLIB, DataConfig
from layerwise.data.sources import SourceFiles, find_files, read_bytes, read_rows, read_text
from layerwise.data.tokenizer import ByteTokenizer, TokenIds, Tokenizer, load_tokenizer
from layerwise.errors import DataError, SpecError
from layerwise.plan import Ints

IGNORED_LABEL = -100


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


@dataclass(frozen=True, kw_only=True)
class Document:
    """What the corpus holds of one sample: its tokens, or the file whose bytes they are."""

    name: str
    num_tokens: int
    tokens: TokenIds | None = None
    labels: TokenIds | None = None
    path: Path | None = None


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """What became of the source's files and documents."""

    files: int
    ignored_files: int  # another extension, or a link that leads out of the folder
    samples: int
    tokens: int
    skipped: int  # longer than max_tokens_per_sample
    truncated: int
    empty: int
    not_chosen: int  # beyond max_samples

    def __str__(self) -> str:
        text = f"{self.samples:,} samples, {self.tokens:,} tokens from {self.files:,} files"
        counts = (
            (self.skipped, "skipped as too long"),
            (self.truncated, "truncated"),
            (self.empty, "empty, skipped"),
            (self.not_chosen, "beyond max_samples"),
            (self.ignored_files, "other files ignored"),
        )
        return text + "".join(f"; {count:,} {what}" for count, what in counts if count)


class Corpus(Sequence[Sample]):
    """A map-style dataset. `lengths` is int64 [samples], in tokens; `report` counts what was left out."""

    def __init__(
        self, documents: Sequence[Document], *, lengths: Ints, vocab_size: int | None, report: CorpusReport
    ) -> None:
        self._documents = documents
        self._vocab_size = vocab_size
        self.lengths = lengths
        self.report = report

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: Any) -> Any:
        """The sample at an int. Raises DataError where its file changed or a token is out of vocabulary."""
        document, length = self._documents[index], int(self.lengths[index])
        tokens = _read_byte_tokens(document) if document.tokens is None else document.tokens
        check_vocabulary(tokens[:length], document.name, self._vocab_size)
        return Sample(
            name=document.name,
            input_ids=tokens[:length].astype(np.int64),
            labels=None if document.labels is None else document.labels[:length].astype(np.int64),
        )


def load_corpus(config: DataConfig, *, vocab_size: int | None = None) -> Corpus:
    """The corpus that a config describes; tokens must be in the model's `vocab_size` where that is given.

    Standard library files are not read as bytes before they are asked for, since their sizes tell their
    lengths; everything else is read and checked here. Raises SpecError for settings, DataError for data.
    """
    files = find_files(config)
    counts: Counter[str] = Counter()
    documents = list(_keep(_documents(files, config, load_tokenizer(config.tokenizer)), config, counts))
    chosen = _choose(documents, config)
    if not chosen:
        raise DataError(
            f"source={config.source!r}: no samples in {len(files.paths)} files ({files.ignored} ignored, "
            f"{counts['empty']} documents empty, {counts['skipped']} over max_tokens_per_sample="
            f"{config.max_tokens_per_sample}); change source, extensions or max_tokens_per_sample"
        )
    for document in chosen:
        _check_document(document, config.max_tokens_per_sample, vocab_size)
    limit = config.max_tokens_per_sample
    full = np.array([document.num_tokens for document in chosen], dtype=np.int64)
    lengths = full if limit is None else np.minimum(full, limit)
    report = CorpusReport(
        files=len(files.paths),
        ignored_files=files.ignored,
        samples=len(chosen),
        tokens=int(lengths.sum()),
        skipped=counts["skipped"],
        truncated=int((lengths < full).sum()),
        empty=counts["empty"],
        not_chosen=len(documents) - len(chosen),
    )
    return Corpus(chosen, lengths=lengths, vocab_size=vocab_size, report=report)


def _check_document(document: Document, limit: int | None, vocab_size: int | None) -> None:
    """Of a file that is not read yet, the special tokens can be checked."""
    tokens = ByteTokenizer().encode(b"") if document.tokens is None else document.tokens[:limit]
    check_vocabulary(tokens, document.name, vocab_size)
    if document.labels is not None:
        labels = document.labels[:limit]
        check_vocabulary(np.where(labels == IGNORED_LABEL, 0, labels), f"{document.name} (labels)", vocab_size)


def check_vocabulary(tokens: NDArray[Any], name: str, vocab_size: int | None) -> None:
    """Raise DataError unless every token, an integer array, is in [0, vocab_size)."""
    bad = (tokens < 0) if vocab_size is None else (tokens < 0) | (tokens >= vocab_size)
    if bad.any():
        position = int(np.argmax(bad))
        legal = "0 or more" if vocab_size is None else f"[0, {vocab_size}) (the model's vocab_size)"
        raise DataError(f"sample {name!r}: token {int(tokens[position])} at position {position} is outside {legal}")


def _keep(documents: Iterator[Document], config: DataConfig, counts: Counter[str]) -> Iterator[Document]:
    """The documents that are neither empty nor to be skipped for their length; the others are counted."""
    limit = config.max_tokens_per_sample
    for document in documents:
        if document.num_tokens == 0:
            counts["empty"] += 1
        elif limit is None or document.num_tokens <= limit or config.overlong == "truncate":
            yield document
        elif config.overlong == "skip":
            counts["skipped"] += 1
        else:
            raise DataError(
                f"sample {document.name!r} has {document.num_tokens} tokens, max_tokens_per_sample={limit}; "
                "raise it, or set overlong to 'skip' or 'truncate'"
            )


def _choose(documents: list[Document], config: DataConfig) -> list[Document]:
    if config.max_samples is None or len(documents) <= config.max_samples:
        return documents
    random = np.random.default_rng(config.seed)
    return [documents[i] for i in np.sort(random.choice(len(documents), config.max_samples, replace=False))]


def _documents(files: SourceFiles, config: DataConfig, tokenizer: Tokenizer) -> Iterator[Document]:
    """Every document of the files, empty ones with num_tokens = 0."""
    unit = "line" if files.format == "jsonl" else "row"
    for path in files.paths:
        name = files.name_of(path)
        if files.format != "text":
            for number, row in read_rows(path, files.format):
                yield _row_document(row, f"{name}:{number}", f"{path}, {unit} {number}", config, tokenizer)
        elif config.source == STDLIB:
            yield _stdlib_document(path, name, tokenizer)
        else:
            yield _text_document(read_text(path), name, tokenizer)


def _stdlib_document(path: Path, name: str, tokenizer: Tokenizer) -> Document:
    """The library ships a few files that are not UTF-8 on purpose; as bytes they are as good as any."""
    if not isinstance(tokenizer, ByteTokenizer):
        return _text_document(read_bytes(path).decode("utf-8", errors="replace"), name, tokenizer)
    num_bytes = path.stat().st_size
    return Document(name=name, num_tokens=num_bytes + tokenizer.num_framing_tokens if num_bytes else 0, path=path)


def _read_byte_tokens(document: Document) -> TokenIds:
    assert document.path is not None
    tokens = ByteTokenizer().encode(read_bytes(document.path))
    if len(tokens) != document.num_tokens:
        raise DataError(
            f"{document.path}: gives {len(tokens)} tokens now, but gave {document.num_tokens} when "
            "the corpus was loaded; files must not change while they are trained on"
        )
    return tokens


def _text_document(text: str, name: str, tokenizer: Tokenizer) -> Document:
    tokens = _compact(tokenizer.encode(text)) if text else np.zeros(0, dtype=np.uint8)
    return Document(name=name, num_tokens=len(tokens), tokens=tokens)


def _row_document(row: dict[str, Any], name: str, where: str, config: DataConfig, tokenizer: Tokenizer) -> Document:
    if config.text_field is None and "input_ids" in row:
        if config.tokenizer is not None:
            raise SpecError(
                f"tokenizer={config.tokenizer!r} has no effect, since {where} holds input_ids; "
                "drop it, or set text_field"
            )
        return _token_document(row, name, where)
    field = config.text_field or "text"
    if not isinstance(row.get(field), str):
        found = type(row[field]).__name__ if field in row else "missing"
        raise DataError(
            f"{where}: {field!r} should be a string, but is {found}; fields: {sorted(row)}; "
            "set text_field, or give input_ids"
        )
    return _text_document(row[field], name, tokenizer)


def _token_document(row: dict[str, Any], name: str, where: str) -> Document:
    tokens = _int_list(row["input_ids"], "input_ids", where)
    if not len(tokens):
        raise DataError(f"{where}: input_ids is empty; a sample has at least one token")
    labels = row.get("labels")
    if labels is not None:
        labels = _int_list(labels, "labels", where)
        if len(labels) != len(tokens):
            raise DataError(
                f"{where}: {len(labels)} labels for {len(tokens)} input_ids; give one each, {IGNORED_LABEL} to ignore"
            )
    return Document(
        name=name,
        num_tokens=len(tokens),
        tokens=_compact(tokens),
        labels=None if labels is None else _compact(labels),
    )


def _int_list(value: Any, field: str, where: str) -> Ints:
    if not isinstance(value, list) or not all(type(item) is int and abs(item) < 2**31 for item in value):
        raise DataError(f"{where}: {field} is not a list of whole numbers")
    return np.array(value, dtype=np.int64)


def _compact(tokens: TokenIds) -> TokenIds:
    """The same integers in the smallest dtype that holds them, since every process keeps them in memory."""
    return tokens.astype(np.promote_types(np.min_scalar_type(tokens.min()), np.min_scalar_type(tokens.max())))
