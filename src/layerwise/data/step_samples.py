"""The samples of one step: their lengths and one hash of them all at once, their tokens when asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from layerwise.data.ids import IGNORED_LABEL, check_ids, check_whole, read_sample
from layerwise.errors import DataError
from layerwise.plan import Ints


@runtime_checkable
class KnowsItsSamples(Protocol):
    """A map-style dataset that says what its samples are without reading them.

    lengths: int64 [samples], in tokens. digests: uint64 [samples]; samples with equal digests have equal tokens and
    labels.
    """

    lengths: Ints
    digests: Any

    def __getitem__(self, index: int) -> Any:
        """The sample."""


@dataclass(frozen=True, eq=False)
class SampleTokens:
    """One sample: int64 [L] input ids, and the label of each position: the next token or -100."""

    input_ids: Ints
    shift_labels: Ints

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepSamples:
    """ids: of the dataset; lengths: in tokens; content: 56 bits over ids and tokens, which ranks must agree on.

    tokens: reads a sample by its place in the step, or has it already.
    """

    ids: tuple[int, ...]
    lengths: list[int]
    content: int
    tokens: Callable[[int], SampleTokens]


def known_samples(dataset: KnowsItsSamples, ids: tuple[int, ...], vocab_size: int | None) -> StepSamples:
    """Samples of a dataset that need not be read to be known."""
    chosen = np.array(ids, dtype=np.int64)
    lengths = dataset.lengths[chosen].tolist()

    def tokens(place: int) -> SampleTokens:
        sample = read_tokens(dataset[ids[place]], ids[place], vocab_size)
        if len(sample) != lengths[place]:
            raise DataError(
                f"sample {ids[place]} has {len(sample)} tokens, but its dataset's lengths say {lengths[place]}"
            )
        return sample

    state = hashlib.blake2b(chosen.tobytes(), digest_size=7)
    state.update(np.asarray(dataset.digests[chosen], dtype=np.uint64).tobytes())
    return StepSamples(ids=ids, lengths=lengths, content=int.from_bytes(state.digest(), "big"), tokens=tokens)


def read_samples(ids: tuple[int, ...], samples: Sequence[SampleTokens]) -> StepSamples:
    """Samples that were read."""
    state = hashlib.blake2b(np.array(ids, dtype=np.int64).tobytes(), digest_size=7)
    for sample in samples:
        state.update(sample.input_ids.tobytes() + sample.shift_labels.tobytes())
    return StepSamples(
        ids=ids,
        lengths=[len(sample) for sample in samples],
        content=int.from_bytes(state.digest(), "big"),
        tokens=samples.__getitem__,
    )


def read_tokens(item: Any, sample_id: int, vocab_size: int | None) -> SampleTokens:
    """Tokens and labels of a dataset's item: token ids, or a mapping or record with input_ids. Raises DataError."""
    where = f"sample {sample_id}"
    if isinstance(item, dict) and "input_ids" not in item:
        raise DataError(f"{where}: a sample that is a mapping needs 'input_ids'; this one has {sorted(item)}")
    field = item.get if isinstance(item, dict) else lambda name, default: getattr(item, name, default)
    ids, labels = read_sample(field("input_ids", item), field("labels", None), where)
    check_ids(ids, labels, vocab_size, where)
    check_whole(len(ids), field("attention_mask", None), field("position_ids", None), where)
    return SampleTokens(ids, np.append((ids if labels is None else labels)[1:], IGNORED_LABEL))
