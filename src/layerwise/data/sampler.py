"""Which samples each optimizer step holds: shuffled, mixed, and cut into steps of about equally many tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

import numpy as np

from layerwise.data.window import exchange_within_windows
from layerwise.errors import DataError, SpecError
from layerwise.plan import Ints

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Visits:
    """How often a run comes to one source: samples and tokens in its steps, and how many epochs that makes."""

    samples: int
    tokens: int
    epochs: float


class StepSampler:
    """Steps of at most `tokens_per_step` tokens, as lists of sample indices; endless without `num_steps`.

    The order depends on the lengths and the arguments only, so every rank of every world size sees the same steps.
    Each epoch visits every sample once, in an order drawn by the seed. A step in which an epoch ends goes on with the
    next one. A sample longer than `tokens_per_step` is a step of its own. Iterating starts from `first_step` each time.

    sources: (number of samples, weight) of each source of a mixture, which follow one another in `lengths`. The next
        sample is always from the source that has the fewest tokens drawn for its weight, so each source has its share
        of the tokens at any time, to within a sample; a source that is used up begins its next epoch by itself.
    window_steps: in every window of so many steps, counted from step 0, samples change places so that the steps are
        alike; a sample moves by at most window_steps - 1 steps.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Ints,
        tokens_per_step: int,
        *,
        seed: int = 0,
        num_steps: int | None = None,
        first_step: int = 0,
        sources: Sequence[tuple[int, float]] | None = None,
        window_steps: int = 1,
    ) -> None:
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.sources = [(len(self.lengths), 1.0)] if sources is None else list(sources)
        _check_sources(self.sources, len(self.lengths))
        self.tokens_per_step, self.seed = tokens_per_step, seed
        self.num_steps, self.first_step = num_steps, first_step
        self.window_steps = window_steps

    def __iter__(self) -> Iterator[list[int]]:
        length = self.lengths.__getitem__
        steps = group_stream(self._indices(), self.tokens_per_step, length=length)
        steps = exchange_within_windows(
            steps, self.window_steps, self.tokens_per_step, length=length, first_step=self.first_step
        )
        return islice(steps, self.num_steps)

    def after(self, num_steps: int) -> StepSampler:
        """The steps behind the first `num_steps`."""
        later = copy(self)
        later.first_step += num_steps
        later.num_steps = None if self.num_steps is None else max(0, self.num_steps - num_steps)
        return later

    def visits(self) -> list[Visits]:
        """Of each source, from first_step on. Raises SpecError without num_steps."""
        if self.num_steps is None:
            raise SpecError("num_steps=None: an endless run has no number of visits; give num_steps")
        drawn = np.array([index for step in self for index in step], dtype=np.int64)
        ends = np.cumsum([size for size, _ in self.sources])
        source = np.searchsorted(ends, drawn, side="right")
        samples = np.bincount(source, minlength=len(ends)).tolist()
        tokens = np.bincount(source, weights=self.lengths[drawn], minlength=len(ends)).tolist()
        return [
            Visits(samples=count, tokens=int(total), epochs=count / size)
            for count, total, (size, _) in zip(samples, tokens, self.sources, strict=True)
        ]

    def _indices(self) -> Iterator[int]:
        starts = np.cumsum([0, *(size for size, _ in self.sources)]).tolist()
        streams = [self._epochs(source, starts[source], size) for source, (size, _) in enumerate(self.sources)]
        weights = [weight for _, weight in self.sources]
        drawn_tokens = [0] * len(streams)
        while True:
            source = min(range(len(streams)), key=lambda source: drawn_tokens[source] / weights[source])
            index = next(streams[source])
            drawn_tokens[source] += int(self.lengths[index])
            yield index

    def _epochs(self, source: int, start: int, size: int) -> Iterator[int]:
        epoch = 0
        while True:
            random = np.random.default_rng([self.seed, epoch, source])
            yield from (start + random.permutation(size)).tolist()
            epoch += 1


def _check_sources(sources: Sequence[tuple[int, float]], num_samples: int) -> None:
    if not all(size for size, _ in sources):
        raise DataError("no samples to train on; give at least one length for each source")
    if sum(size for size, _ in sources) != num_samples:
        raise SpecError(
            f"sources= have {sum(size for size, _ in sources)} samples, but there are {num_samples} lengths"
        )
    if not all(weight > 0 for _, weight in sources):
        raise SpecError(f"weights are greater than 0; got {[weight for _, weight in sources]}")


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
