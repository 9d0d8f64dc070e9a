"""The planning window: samples change places between a few consecutive steps, so that each is cheaper to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, TypeVar

from layerwise.errors import SpecError

T = TypeVar("T")
# A window is planned as a whole, before its first step; what is beyond this is a mistake.
MAX_WINDOW_STEPS = 1024


def exchange_within_windows(
    steps: Iterable[list[T]],
    window_steps: int,
    tokens_per_step: int,
    *,
    length: Callable[[Any], int] = len,
    first_step: int = 0,
) -> Iterator[list[T]]:
    """The steps from `first_step` on, after the samples of each window went to where those of like lengths are.

    A window is `window_steps` steps, counted from step 0. Long samples meet in few of them, whose wide groups are then
    well filled, and the others need none. The steps of a window get about equally many tokens, none more than
    `tokens_per_step` but for one longer sample alone; where that cannot be, the window stays as it is. Within a step
    samples keep their order. A sample moves by at most window_steps - 1 steps, and none is dropped or repeated.
    `length` gives the tokens of a sample. Raises SpecError.
    """
    if window_steps < 1:
        raise SpecError(f"planning_window_steps={window_steps}; it must be at least 1 (1: no sample moves)")
    waiting, start = iter(steps), 0
    while window := list(islice(waiting, window_steps)):
        if start + len(window) > first_step:
            yield from _regroup(window, tokens_per_step, length)[max(0, first_step - start) :]
        start += len(window)


def _regroup(window: list[list[T]], tokens_per_step: int, length: Callable[[Any], int]) -> list[list[T]]:
    """Longest first into the fullest step that stays below the mean, so that like lengths meet."""
    if len(window) == 1:
        return window
    samples = [sample for step in window for sample in step]
    lengths = [int(length(sample)) for sample in samples]
    mean_tokens = sum(lengths) / len(window)
    places: list[list[int]] = [[] for _ in window]
    tokens = [0] * len(window)
    for index in sorted(range(len(samples)), key=lambda index: -lengths[index]):
        below = [step for step in range(len(window)) if tokens[step] + lengths[index] <= mean_tokens]
        step = max(below, key=tokens.__getitem__) if below else tokens.index(min(tokens))
        if places[step] and tokens[step] + lengths[index] > tokens_per_step:
            return window
        places[step].append(index)
        tokens[step] += lengths[index]
    return [[samples[index] for index in sorted(step)] for step in places] if all(places) else window
