"""From text to token ids: raw bytes by default, or a Hugging Face `tokenizers` JSON file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import DataError, SpecError, UnsupportedError

TokenIds = NDArray[np.integer[Any]]


class Tokenizer(Protocol):
    """What the corpus needs of a tokenizer."""

    @property
    def vocab_size(self) -> int:
        """Every id is in [0, vocab_size)."""

    def encode(self, text: str) -> TokenIds:
        """Token ids of one whole document, integers [tokens], with the special tokens that frame it."""


class ByteTokenizer:
    """One token per UTF-8 byte: ids 0-255 are the bytes, then begin of text, end of text and padding."""

    bos_id = 256
    eos_id = 257
    pad_id = 258
    vocab_size = 259
    num_framing_tokens = 2

    def encode(self, text: str | bytes) -> TokenIds:
        """uint16 [bytes + 2]: begin of text, the bytes, end of text."""
        data = text.encode() if isinstance(text, str) else text
        ids = np.empty(len(data) + self.num_framing_tokens, dtype=np.uint16)
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
        self.vocab_size: int = self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> TokenIds:
        """int64 [tokens], with the special tokens that the file's post-processor adds."""
        return np.array(self._backend.encode(text).ids, dtype=np.int64)


def load_tokenizer(path: str | Path | None) -> Tokenizer:
    """The byte tokenizer for None, else the tokenizer in a `tokenizer.json` file."""
    return ByteTokenizer() if path is None else HuggingFaceTokenizer(path)
