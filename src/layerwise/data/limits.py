"""How long a sample may be, and what becomes of a longer one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from layerwise.data.config import DataConfig
from layerwise.errors import DataError, InfeasibleError, SpecError


@dataclass(frozen=True, kw_only=True)
class Limit:
    """At most `max_tokens` (None: any number), for the reason `rule`."""

    max_tokens: int | None
    rule: str
    overlong: Literal["skip", "truncate", "error"]

    @classmethod
    def of(cls, config: DataConfig, budget_tokens: int | None) -> Limit:
        """The smaller of the configured limit and what a plan can place. Raises SpecError where there is neither."""
        limits = [
            (config.max_tokens_per_sample, f"max_tokens_per_sample={config.max_tokens_per_sample}; raise it"),
            (budget_tokens, f"a plan can place {budget_tokens}; raise max_tokens_per_rank"),
        ]
        known = [(limit, rule) for limit, rule in limits if limit is not None]
        if not known and config.overlong != "error":
            raise SpecError(
                f"overlong={config.overlong!r} has no effect without max_tokens_per_sample; set both or neither"
            )
        limit, rule = min(known, default=(None, ""))
        return cls(max_tokens=limit, rule=rule, overlong=config.overlong)

    def fits(self, num_tokens: int, name: str) -> bool:
        """Whether to keep a sample of this length. Raises DataError at a longer one if that is the policy."""
        if self.max_tokens is None or num_tokens <= self.max_tokens or self.overlong == "truncate":
            return True
        if self.overlong == "skip":
            return False
        raise DataError(
            f"sample {name!r} has {num_tokens} tokens, {self.rule}, or set overlong to 'skip' or 'truncate'"
        )

    def cut(self, num_tokens: int) -> int:
        """The length after truncation."""
        return num_tokens if self.max_tokens is None else min(num_tokens, self.max_tokens)


def placeable_tokens(planner: Callable[[Sequence[int]], Any], *, at_most: int) -> int:
    """The longest sample, alone in its step, that a planner can place: at most `at_most` tokens, 0 where none fits."""
    low, high = 0, at_most + 1  # low can be placed, high cannot
    while high - low > 1:
        middle = (low + high) // 2
        try:
            planner([middle])
            low = middle
        except InfeasibleError:
            high = middle
    return low
