"""From rows to tokens: text is tokenised, chats go through their template, token ids are checked."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from layerwise.data.chat import ChatTemplate, load_template
from layerwise.data.config import DataConfig
from layerwise.data.ids import check_ids, check_whole, encodable, read_sample
from layerwise.data.sources.rows import Row
from layerwise.data.tokenizer import TokenIds, Tokenizer, load_tokenizer
from layerwise.errors import DataError, SpecError
from layerwise.plan import Ints

# Texts that are tokenised in one call, which uses all cores; a batch is in memory at once.
TEXTS_AT_ONCE = 256
_VERSION = 2  # of what this module makes out of equal rows


@dataclass(frozen=True, kw_only=True)
class Document:
    """Tokens of one row, integers [tokens], none where its text is empty; labels int64 [tokens] or None."""

    tokens: TokenIds
    labels: Ints | None = None
    is_chat: bool = False


def refused(fault: DataError | str) -> DataError:
    """What ends a run that does not skip bad rows."""
    return DataError(f"{fault}; or set bad_rows to 'skip', which leaves out and counts what cannot be used")


@dataclass(frozen=True, kw_only=True)
class DocumentReader:
    """What rows become with one tokenizer, chat template and choice of column."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    has_tokenizer_file: bool
    text_field: str | None = None

    @classmethod
    def of(cls, config: DataConfig) -> DocumentReader:
        """The reader that a config asks for. Raises SpecError, DataError."""
        return cls(
            tokenizer=load_tokenizer(config.tokenizer),
            template=load_template(config.chat_template, config.tokenizer),
            has_tokenizer_file=config.tokenizer is not None,
        )

    def for_column(self, text_field: str | None) -> DocumentReader:
        """The same reader for rows whose text stands in another column."""
        return replace(self, text_field=text_field)

    @property
    def fingerprint(self) -> str:
        """Changes where equal rows may become other tokens."""
        template = None if self.template is None else self.template.fingerprint
        parts = [_VERSION, self.tokenizer.fingerprint, template, self.text_field]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def read(self, rows: Iterable[Row]) -> Iterator[tuple[Row, Document | DataError]]:
        """Each row with its document, or with what is wrong with it. Raises SpecError where settings are."""
        waiting = iter(rows)
        while batch := list(islice(waiting, TEXTS_AT_ONCE)):
            found = [self._content(row) for row in batch]
            texts = [content for content in found if isinstance(content, str | bytes) and content]
            tokens = iter(self.tokenizer.encode(texts) if texts else ())
            for row, content in zip(batch, found, strict=True):
                if isinstance(content, str | bytes):
                    content = Document(tokens=next(tokens) if content else np.zeros(0, dtype=np.uint8))
                yield row, content

    def _content(self, row: Row) -> str | bytes | Document | DataError:
        """A text to tokenise, or what is known already."""
        try:
            if isinstance(row.content, Mapping):
                return self._of_mapping(row.content, row.where)
            return encodable(row.content, row.where) if isinstance(row.content, str) else row.content
        except DataError as error:
            return error

    def _of_mapping(self, columns: Mapping[str, Any], where: str) -> str | Document:
        if self.text_field is None and "input_ids" in columns:
            return self._of_ids(columns, where)
        if self.text_field is None and "messages" in columns:
            return self._of_chat(columns, where)
        field = self.text_field or "text"
        text = columns.get(field)
        if not isinstance(text, str):
            found = type(text).__name__ if field in columns else "missing"
            raise DataError(
                f"{where}: {field!r} should be a string, but is {found}; fields: {sorted(columns)}; "
                "set text_field, or give input_ids or messages"
            )
        return encodable(text, where)

    def _of_ids(self, columns: Mapping[str, Any], where: str) -> Document:
        if self.has_tokenizer_file:
            raise SpecError(f"tokenizer has no effect, since {where} holds input_ids; drop it, or set text_field")
        tokens, labels = read_sample(columns["input_ids"], columns.get("labels"), where)
        check_ids(tokens, labels, None, where)
        check_whole(len(tokens), columns.get("attention_mask"), columns.get("position_ids"), where)
        return Document(tokens=tokens, labels=labels)

    def _of_chat(self, columns: Mapping[str, Any], where: str) -> Document:
        if self.template is None:
            raise SpecError(
                f"{where} holds messages, but there is no chat template: give chat_template, a file, or a tokenizer "
                "with a chat_template.jinja or a tokenizer_config.json that has one beside it"
            )
        tokens, labels = self.template.encode(columns, self.tokenizer, where)
        return Document(tokens=tokens, labels=labels, is_chat=True)
