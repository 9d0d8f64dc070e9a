"""Cutting a stream of samples into optimizer steps of about equally many tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from layerwise.errors import DataError, SpecError
from layerwise.plan import Ints

T = TypeVar("T")


class StepSampler:
    """Steps of at most `tokens_per_step` tokens, as lists of sample indices; endless without `num_steps`.

    Each epoch visits every sample once, in an order that depends on the seed and the epoch only, so every
    rank of every world size sees the same steps. A step in which an epoch ends goes on with the next one. A
    sample longer than `tokens_per_step` is a step of its own. Iterating starts from `first_step` each time.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Ints,
        tokens_per_step: int,
        *,
        seed: int = 0,
        num_steps: int | None = None,
        first_step: int = 0,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        if not len(self.lengths):
            raise DataError("no samples to train on; give at least one length")
        self.tokens_per_step, self.seed = tokens_per_step, seed
        self.num_steps, self.first_step = num_steps, first_step

    def __iter__(self) -> Iterator[list[int]]:
        steps = group_stream(self._indices(), self.tokens_per_step, length=self.lengths.__getitem__)
        last = None if self.num_steps is None else self.first_step + self.num_steps
        return islice(steps, self.first_step, last)

    def _indices(self) -> Iterator[int]:
        epoch = 0
        while True:
            yield from np.random.default_rng([self.seed, epoch]).permutation(len(self.lengths)).tolist()
            epoch += 1


def group_stream(
    samples: Iterable[T], tokens_per_step: int, *, length: Callable[[Any], int] = len
) -> Iterator[list[T]]:
    """Cut samples, in their order, into lists of at most `tokens_per_step` tokens, or of one longer sample.

    `length` gives the tokens of a sample; the last list may be short. Raises DataError at an empty sample.
    """
    if tokens_per_step < 1:
        raise SpecError(f"tokens_per_step={tokens_per_step}; it must be at least 1")
    step: list[T] = []
    num_tokens = 0
    for position, sample in enumerate(samples):
        added = int(length(sample))
        if added < 1:
            raise DataError(f"sample {position} of the stream has {added} tokens; a sample has at least one")
        if step and num_tokens + added > tokens_per_step:
            yield step
            step, num_tokens = [], 0
        step.append(sample)
        num_tokens += added
    if step:
        yield step
