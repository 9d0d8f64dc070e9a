"""Planned micro-batches, shaped as Hugging Face models take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass

from torch import Tensor

from layerwise.data.corpus import IGNORED_LABEL
from layerwise.data.loader import Microbatch, Step
from layerwise.errors import SpecError
from layerwise.runtime import Routes


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """This rank's tokens of one micro-batch, as one packed row; a rank without tokens has one padding token.

    input_ids, position_ids, shift_labels: int64 [1, T]. shift_labels[0, t] is the token after t in the same sample, or
    -100: already shifted, unlike the `labels` of transformers.
    step: the optimizer step that it is a part of; ends_step: whether it is the last part.
    """

    input_ids: Tensor
    position_ids: Tensor
    shift_labels: Tensor
    step: Step
    ends_step: bool
    _microbatch: Microbatch

    def routes(self) -> AbstractContextManager[Routes]:
        """A context in which attention layers find this micro-batch's routes."""
        return self._microbatch.routes()


def batches(steps: Iterable[Step]) -> Iterator[Batch]:
    """The micro-batches of the steps that a PlannedLoader yields, one after another.

    Raises SpecError for other items than steps.
    """
    for step in steps:
        if not isinstance(step, Step):
            raise SpecError(f"batches() takes a PlannedLoader, or steps of one, got an item {type(step).__name__}")
        for number, microbatch in enumerate(step.microbatches, start=1):
            yield Batch(
                input_ids=_row(microbatch.input_ids, 0),
                position_ids=_row(microbatch.position_ids, 0),
                shift_labels=_row(microbatch.shift_labels, IGNORED_LABEL),
                step=step,
                ends_step=number == len(step.microbatches),
                _microbatch=microbatch,
            )


def _row(tokens: Tensor, padding: int) -> Tensor:
    """[T] -> [1, T], or [1, 1] of the padding."""
    return (tokens if len(tokens) else tokens.new_full((1,), padding))[None]
