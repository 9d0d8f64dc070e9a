"""Tokenised samples as a few flat arrays, in memory or mapped from files: what each rank reads is what it needs.

tokens   smallest unsigned [tokens of all samples]
labels   the same, or absent where every sample learns every token; coded: 0 ignored, 1 the token itself, else n + 2
offsets  int64 [samples + 1], where each sample's tokens start
places   int64 [samples, 2], file and row (0: a whole file) of each sample
digests  uint64 [samples], over a sample's tokens and label codes
"""

from __future__ import annotations

import hashlib
import io
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import IO, Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from layerwise.data.ids import IGNORED_LABEL
from layerwise.errors import DataError
from layerwise.plan import Ints

Array = NDArray[Any]
Save = Callable[[str, tuple[int, ...], DTypeLike, Iterable[Array]], Array]

IGNORED_CODE, TOKEN_CODE, FIRST_LABEL_CODE = 0, 1, 2
_CHUNK_TOKENS = 2**20
_WIDE = np.dtype("<u4")


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenStore:
    """Samples of one source. `files` name their origin; `counts` and `first_fault` say what was left out, and why."""

    arrays: Mapping[str, Array]
    files: tuple[str, ...]
    counts: Mapping[str, int]
    first_fault: str | None
    largest_id: int  # of all tokens and labels

    def __len__(self) -> int:
        return len(self.digests)

    @cached_property
    def lengths(self) -> Ints:
        """Tokens of each sample, int64 [samples]."""
        return np.diff(self.arrays["offsets"])

    @property
    def digests(self) -> NDArray[np.uint64]:
        """One hash per sample."""
        return self.arrays["digests"]

    def name(self, index: int) -> str:
        """The path within the source, and the line or row."""
        file, row = self.arrays["places"][index].tolist()
        return f"{self.files[file]}:{row}" if row else self.files[file]

    def read(self, index: int) -> tuple[Ints, Ints | None]:
        """input_ids and labels (None: the input_ids) of a sample, int64 [tokens]. Raises DataError where damaged."""
        span = slice(*self.arrays["offsets"][index : index + 2].tolist())
        tokens = np.array(self.arrays["tokens"][span])
        codes = np.array(self.arrays["labels"][span]) if "labels" in self.arrays else None
        if _digest(tokens, codes) != int(self.digests[index]):
            raise DataError(
                f"sample {self.name(index)!r}: its cached tokens are not those that were written; the disk or another "
                "program changed the cache_dir: delete it, and it is built anew"
            )
        tokens = tokens.astype(np.int64)
        if codes is None or (codes == TOKEN_CODE).all():
            return tokens, None
        labels = np.where(codes == TOKEN_CODE, tokens, codes.astype(np.int64) - FIRST_LABEL_CODE)
        return tokens, np.where(codes == IGNORED_CODE, IGNORED_LABEL, labels)


class StoreWriter:
    """Collects samples and then makes a store of them; memory holds a few numbers per sample.

    `scratch` opens the temporary binary files in which tokens wait for their final width.
    """

    def __init__(self, scratch: Callable[[], IO[bytes]]) -> None:
        self._scratch = scratch
        self._tokens = scratch()
        self._codes: IO[bytes] | None = None
        self._offsets, self._places, self._digests = array("q", [0]), array("q"), array("Q")
        self._largest_token = self._largest_code = 0

    def __len__(self) -> int:
        return len(self._digests)

    def add(self, file: int, row: int, tokens: Array, labels: Array | None) -> None:
        """One sample of at least one token; tokens and labels were checked."""
        wide = tokens.astype(_WIDE)
        codes = None if labels is None else _encode_labels(tokens, labels)
        if codes is not None and self._codes is None and (codes != TOKEN_CODE).any():
            self._codes = self._scratch()
            _write_ones(self._codes, self._offsets[-1])
        self._tokens.write(wide.tobytes())
        if self._codes is not None:
            self._codes.write((np.full_like(wide, TOKEN_CODE) if codes is None else codes).tobytes())
        self._offsets.append(self._offsets[-1] + len(wide))
        self._places.extend((file, row))
        self._digests.append(_digest(wide, codes))
        self._largest_token = max(self._largest_token, int(wide.max()))
        self._largest_code = max(self._largest_code, 0 if codes is None else int(codes.max()))

    def finish(
        self, save: Save, *, files: tuple[str, ...], counts: Mapping[str, int], first_fault: str | None
    ) -> TokenStore:
        """The store; `save(name, shape, dtype, pieces)` keeps an array that comes in pieces, and returns it."""
        kept = {
            "offsets": np.array(self._offsets, dtype=np.int64),
            "places": np.array(self._places, dtype=np.int64).reshape(-1, 2),
            "digests": np.array(self._digests, dtype=np.uint64),
        }
        arrays = {name: save(name, values.shape, values.dtype, [values]) for name, values in kept.items()}
        scratched = [("tokens", self._tokens, self._largest_token), ("labels", self._codes, self._largest_code)]
        for name, file, largest in scratched:
            if file is not None:
                narrow = np.min_scalar_type(largest)
                arrays[name] = save(name, (self._offsets[-1],), narrow, _pieces(file, narrow))
        return TokenStore(
            arrays=arrays,
            files=files,
            counts=dict(counts),
            first_fault=first_fault,
            largest_id=max(self._largest_token, self._largest_code - FIRST_LABEL_CODE),
        )

    def close(self) -> None:
        """Delete what waits in temporary files."""
        for file in (self._tokens, self._codes):
            if file is not None:
                file.close()


def _encode_labels(tokens: Array, labels: Array) -> Array:
    codes = np.where(labels == tokens, TOKEN_CODE, labels + FIRST_LABEL_CODE)
    return np.where(labels == IGNORED_LABEL, IGNORED_CODE, codes).astype(_WIDE)


def _digest(tokens: Array, codes: Array | None) -> int:
    """64 bits over the values, whatever width they came in; no codes are the same as codes of the token itself."""
    state = hashlib.blake2b(digest_size=8)
    for values in (tokens,) if codes is None or (codes == TOKEN_CODE).all() else (tokens, codes):
        narrow = values.astype(np.min_scalar_type(int(values.max())))
        state.update(narrow.dtype.str.encode() + narrow.tobytes())
    return int.from_bytes(state.digest(), "little")


def _write_ones(file: IO[bytes], count: int) -> None:
    for start in range(0, count, _CHUNK_TOKENS):
        file.write(np.full(min(_CHUNK_TOKENS, count - start), TOKEN_CODE, dtype=_WIDE).tobytes())


def _pieces(file: IO[bytes], dtype: DTypeLike) -> Iterator[Array]:
    """The numbers of a scratch file, as `dtype`."""
    file.seek(0)
    while data := file.read(_CHUNK_TOKENS * _WIDE.itemsize):
        yield np.frombuffer(data, dtype=_WIDE).astype(dtype)


def store_in_memory(build: Callable[[StoreWriter, Save], TokenStore]) -> TokenStore:
    """The store that `build` makes with a writer, held in memory."""
    return build(StoreWriter(io.BytesIO), _save_in_memory)


def _save_in_memory(name: str, shape: tuple[int, ...], dtype: DTypeLike, pieces: Iterable[Array]) -> Array:
    values, start = np.empty(shape, dtype=dtype), 0
    for piece in pieces:
        values[start : start + len(piece)] = piece
        start += len(piece)
    return values
