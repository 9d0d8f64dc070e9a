"""From text to token ids: raw bytes by default, or a Hugging Face `tokenizers` JSON file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import DataError, SpecError, UnsupportedError
from layerwise.plan import Ints

TokenIds = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Every id is in [0, vocab_size)."""

    @property
    def fingerprint(self) -> str:
        """Changes where ids may change."""

    def encode(self, texts: Sequence[str | bytes]) -> list[TokenIds]:
        """Token ids of whole documents, integers [tokens] each, with the special tokens that frame them.

        Bytes are text that need not be UTF-8.
        """

    def encode_rendered(self, text: str) -> tuple[TokenIds, Ints]:
        """Token ids of a text that holds its special tokens already, and the character where each token starts."""


class ByteTokenizer:
    """One token per UTF-8 byte: ids 0-255 are the bytes, then begin of text, end of text and padding."""

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259
    fingerprint = "bytes"

    def encode(self, texts: Sequence[str | bytes]) -> list[TokenIds]:
        """uint16 [bytes + 2] each: begin of text, the bytes, end of text."""
        return [self._frame(text.encode() if isinstance(text, str) else text) for text in texts]

    def encode_rendered(self, text: str) -> tuple[TokenIds, Ints]:
        """The bytes, uint8 [bytes], and int64 [bytes]."""
        widths = [len(character.encode()) for character in text]
        return np.frombuffer(text.encode(), dtype=np.uint8), np.repeat(np.arange(len(text)), widths)

    def _frame(self, data: bytes) -> TokenIds:
        ids = np.empty(len(data) + 2, dtype=np.uint16)
        ids[0], ids[1:-1], ids[-1] = self.bos_id, np.frombuffer(data, dtype=np.uint8), self.eos_id
        return ids


class HuggingFaceTokenizer:
    """A `tokenizer.json` file as the Hugging Face `tokenizers` library writes it.

    Raises SpecError where the file is missing, DataError where it is not a tokenizer, and UnsupportedError
    where the `tokenizers` package is not installed.
    """

    def __init__(self, path: str | Path) -> None:
        try:
            from tokenizers import Tokenizer as Backend
        except ImportError:
            raise UnsupportedError(
                f"tokenizer={str(path)!r} needs the package `tokenizers`: pip install 'layerwise[train]'"
            ) from None
        if not Path(path).is_file():
            raise SpecError(
                f"tokenizer={str(path)!r}: no such file; give a tokenizer.json, or leave it out to use bytes"
            )
        try:
            self._backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault
            raise DataError(f"{path}: not a readable tokenizer file: {error}") from None
        self._backend.no_padding()
        self._backend.no_truncation()
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=0)
        self.fingerprint = hashlib.blake2b(Path(path).read_bytes(), digest_size=16).hexdigest()

    def encode(self, texts: Sequence[str | bytes]) -> list[TokenIds]:
        """int64 [tokens] each, with the special tokens that the file's post-processor adds."""
        whole = [text if isinstance(text, str) else text.decode("utf-8", "replace") for text in texts]
        return [np.array(found.ids, dtype=np.int64) for found in self._backend.encode_batch_fast(whole)]

    def encode_rendered(self, text: str) -> tuple[TokenIds, Ints]:
        """int64 [tokens] each."""
        found = self._backend.encode(text, add_special_tokens=False)
        return np.array(found.ids, dtype=np.int64), np.array([start for start, _ in found.offsets], dtype=np.int64)


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The byte tokenizer for None, else the tokenizer in a `tokenizer.json` file."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)
