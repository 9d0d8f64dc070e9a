"""Token ids, labels and text as they should be, or an error that names the sample."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerwise.errors import DataError
from layerwise.plan import Ints

IGNORED_LABEL = -100
MAX_TOKEN_ID = 2**31 - 1


def whole_numbers(values: Any, where: str) -> Ints:
    """int64 of values that are whole numbers already; floats and yes/no are not rounded, text is not parsed."""
    types = set(map(type, values)) if isinstance(values, list | tuple) else set()
    try:
        array = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise DataError(f"{where}: not a list of whole numbers: {error}") from None
    if array.size and (array.dtype.kind not in "iu" or bool in types or np.bool_ in types):
        found = "bool" if bool in types else array.dtype
        raise DataError(f"{where}: expected whole numbers that fit 64 bits, got {found}")
    if array.dtype == np.uint64 and array.size and array.max() > MAX_TOKEN_ID:
        raise DataError(f"{where}: {array.max()} is beyond the largest token id, {MAX_TOKEN_ID}")
    return array.astype(np.int64)


def read_sample(ids: Any, labels: Any, where: str) -> tuple[Ints, Ints | None]:
    """input_ids and labels of one sample, int64 [tokens] each; `labels` may be None. Raises DataError."""
    tokens = whole_numbers(ids, f"{where}: input_ids")
    if tokens.ndim != 1 or not len(tokens):
        raise DataError(f"{where}: expected a non-empty list of token ids, got shape {tokens.shape}")
    if labels is None:
        return tokens, None
    targets = whole_numbers(labels, f"{where}: labels")
    if targets.shape != tokens.shape:
        raise DataError(
            f"{where}: {len(tokens)} input_ids but labels of shape {targets.shape}; give one label per token, "
            f"{IGNORED_LABEL} where it is not to be learned"
        )
    return tokens, targets


def check_whole(num_tokens: int, mask: Any, positions: Any, where: str) -> None:
    """Raise DataError where a sample's attention_mask or position_ids, if any, tell of padding or packed documents."""
    for name, given, whole, rule, remedy in (
        ("attention_mask", mask, np.ones, "all ones", "remove the padding"),
        ("position_ids", positions, np.arange, "0, 1, 2, ...", "give each document as a sample of its own"),
    ):
        if given is None:
            continue
        expected = whole(num_tokens)
        try:
            values = np.asarray(given)
        except ValueError as error:
            raise DataError(f"{where}: {name} is not a list of numbers: {error}") from None
        if values.shape != expected.shape:
            found = f"has shape {values.shape}"
        elif (values != expected).any():
            position = int(np.argmax(values != expected))
            found = f"is {values[position]} at position {position}"
        else:
            continue
        raise DataError(
            f"{where}: {name} {found}, expected {rule} of shape {expected.shape}, since every token is trained on and "
            f"attends to all before it: {remedy}"
        )


def check_ids(tokens: NDArray[Any], labels: NDArray[Any] | None, vocab_size: int | None, where: str) -> None:
    """Raise DataError unless every token, and every label but -100, is in [0, vocab_size)."""
    _check_range(tokens, vocab_size, f"{where}: token")
    if labels is not None:
        _check_range(np.where(labels == IGNORED_LABEL, 0, labels), vocab_size, f"{where}: label")


def _check_range(values: NDArray[Any], vocab_size: int | None, what: str) -> None:
    end = MAX_TOKEN_ID + 1 if vocab_size is None else vocab_size
    if len(values) and not (values.min() >= 0 and values.max() < end):
        position = int(np.argmax((values < 0) | (values >= end)))
        legal = f"[0, {end})" if vocab_size is None else f"[0, vocab_size={end})"
        raise DataError(f"{what} {int(values[position])} at position {position} is not in {legal}")


def encodable(text: str, where: str) -> str:
    """The same text. Raises DataError for half of a surrogate pair, which JSON can write but is no text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: character {error.start} is no text, but half of a surrogate pair") from None
    return text
