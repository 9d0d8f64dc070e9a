"""The workload that strategies are judged on: whose samples, how long, and how many of them make a step.

A workload is a frozen record read from YAML, so that a table can be computed again from it. Lengths come from
parametric distributions, fitted to public length files, or from such files themselves. docs/evaluate.md says how the
constants of the shipped workload were chosen.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from pydantic import Field, model_validator

from layerwise.cost import Floats
from layerwise.data.lengths import MAX_SAMPLE_TOKENS, read_lengths
from layerwise.errors import SpecError
from layerwise.plan import Ints
from layerwise.spec import ClusterSpec, ModelSpec, Record, read_settings, record_from
from layerwise.spec.records import Tokens

# Quantiles that the mean of a distribution is summed from: exact to 0.1% for tails as heavy as those fitted here.
_MEAN_POINTS = 20_000
_DRAWN_AT_ONCE = 4096


class LengthDistribution(Record):
    """Sample lengths in tokens: a log-normal body, and a Pareto tail that holds `tail_share` of the samples.

    The quantile function is `median_tokens * exp(sigma * z(u))` with the normal quantile z, up to `u = 1 - tail_share`;
    from the length `t` reached there on it is `t * ((1 - u) / tail_share) ** (-1 / tail_index)`. Lengths are clipped to
    [min_tokens, max_tokens].
    """

    median_tokens: float = Field(ge=1)
    sigma: float = Field(gt=0)
    tail_share: float = Field(gt=0, lt=0.5)
    tail_index: float = Field(gt=0)
    min_tokens: int = Field(default=1, ge=1)
    max_tokens: int = Field(default=MAX_SAMPLE_TOKENS, ge=1, le=MAX_SAMPLE_TOKENS)

    @model_validator(mode="after")
    def _check(self) -> LengthDistribution:
        if self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} exceeds max_tokens={self.max_tokens}")
        return self

    def quantile(self, shares: Floats) -> Ints:
        """Length in tokens below which each share of the samples lies; shares in [0, 1), int64 of their shape."""
        normal = NormalDist()
        body = np.clip(shares, 1e-12, 1 - self.tail_share)
        z = np.array([normal.inv_cdf(u) for u in body.ravel().tolist()]).reshape(body.shape)
        beyond = np.minimum((1 - shares) / self.tail_share, 1.0)
        tokens = self.median_tokens * np.exp(self.sigma * z) * beyond ** (-1 / self.tail_index)
        return np.clip(np.rint(tokens), self.min_tokens, self.max_tokens).astype(np.int64)


class Workload(Record):
    """Steps to plan: a cluster, a model, and samples from a mixture of sources.

    cluster, model: preset names, YAML files, or mappings that may name a `base` and override some of its settings.
    mixture: share of the tokens that comes from each source; shares add up to 1.
    lengths: what each source is: a LengthDistribution as a mapping, or the path of a file of lengths.
    cap_tokens: longer samples are cut to this length, as a trainer's maximum sequence length does.
    fill: share of a step's budget, ranks x max_tokens_per_rank, up to which samples are added.
    """

    name: str = "workload"
    cluster: str | dict[str, Any]
    model: str | dict[str, Any]
    max_tokens_per_rank: Tokens
    num_steps: int = Field(default=200, ge=1)
    seed: int = Field(default=0, ge=0)
    mixture: dict[str, float] = Field(min_length=1)
    lengths: dict[str, str | dict[str, Any]]
    cap_tokens: int = Field(ge=1, le=MAX_SAMPLE_TOKENS)
    fill: float = Field(default=0.95, gt=0, le=1)

    @model_validator(mode="after")
    def _check(self) -> Workload:
        unknown = sorted(set(self.mixture) - set(self.lengths))
        if unknown:
            raise ValueError(f"mixture names {unknown}, but lengths has {sorted(self.lengths)}")
        if min(self.mixture.values()) <= 0 or abs(sum(self.mixture.values()) - 1) > 1e-6:
            raise ValueError(f"the shares of mixture are positive and add up to 1, got {self.mixture}")
        return self

    @cached_property
    def cluster_spec(self) -> ClusterSpec:
        """The cluster planned for. Raises SpecError."""
        return _spec(ClusterSpec, self.cluster, "cluster", self.name)

    @cached_property
    def model_spec(self) -> ModelSpec:
        """The model planned for. Raises SpecError."""
        return _spec(ModelSpec, self.model, "model", self.name)

    @property
    def step_tokens(self) -> int:
        """Tokens that a step holds at most."""
        return int(self.fill * self.cluster_spec.num_ranks * self.max_tokens_per_rank)

    def change(self, **settings: Any) -> Workload:
        """A workload with some settings replaced, validated again. Raises SpecError."""
        return record_from(Workload, self.model_dump() | settings, self.name)

    def draw_steps(self, num_steps: int | None = None) -> list[Ints]:
        """Sample lengths of each step in tokens, int64 [samples]; the same for the same workload, always.

        Samples are drawn one after the other: a source, then a length. The one that would overflow a step opens the
        next, so long samples are not rarer than in their source. Raises SpecError or DataError.
        """
        if self.cap_tokens > self.step_tokens:
            raise SpecError(
                f"{self.name}: cap_tokens={self.cap_tokens} exceeds the {self.step_tokens} tokens of a step "
                f"(fill={self.fill} x {self.cluster_spec.num_ranks} ranks x max_tokens_per_rank="
                f"{self.max_tokens_per_rank}); lower cap_tokens or raise one of the others"
            )
        draw = _Sampler(self)
        steps: list[Ints] = []
        waiting = np.zeros(0, dtype=np.int64)
        while len(steps) < (self.num_steps if num_steps is None else num_steps):
            total = np.cumsum(waiting)
            if len(total) == 0 or total[-1] <= self.step_tokens:
                waiting = np.concatenate([waiting, draw(_DRAWN_AT_ONCE)])
                continue
            end = int(np.searchsorted(total, self.step_tokens, side="right"))
            steps.append(waiting[:end])
            waiting = waiting[end:]
        return steps


class _Sampler:
    """Draws lengths from the mixture; sources are drawn so that their tokens, not samples, have the given shares."""

    def __init__(self, workload: Workload) -> None:
        self.cap_tokens = workload.cap_tokens
        self.random = np.random.default_rng(workload.seed)
        self.sources = [_read_source(workload, name) for name in workload.mixture]
        means = np.array([_mean_tokens(source, self.cap_tokens) for source in self.sources])
        rates = np.array(list(workload.mixture.values())) / means
        self.shares = rates / rates.sum()

    def __call__(self, count: int) -> Ints:
        source_of = self.random.choice(len(self.sources), size=count, p=self.shares)
        uniform = self.random.random(count)
        lengths = np.zeros(count, dtype=np.int64)
        for index, source in enumerate(self.sources):
            chosen = source_of == index
            lengths[chosen] = _quantile(source, uniform[chosen])
        return np.minimum(lengths, self.cap_tokens)


Source = LengthDistribution | Ints


def _read_source(workload: Workload, name: str) -> Source:
    source = workload.lengths[name]
    if isinstance(source, str):
        return np.sort(np.array(read_lengths(Path(source)), dtype=np.int64))
    return record_from(LengthDistribution, source, f"{workload.name}: lengths.{name}")


def _quantile(source: Source, shares: Floats) -> Ints:
    """Quantiles of a distribution, or of the lengths in a file: each line is equally likely."""
    if isinstance(source, LengthDistribution):
        return source.quantile(shares)
    return source[(shares * len(source)).astype(np.int64)]


def _mean_tokens(source: Source, cap_tokens: int) -> float:
    middle = (np.arange(_MEAN_POINTS) + 0.5) / _MEAN_POINTS
    lengths = source.quantile(middle) if isinstance(source, LengthDistribution) else source
    return float(np.minimum(lengths, cap_tokens).mean())


def _spec(cls: type[Any], source: str | dict[str, Any], prefix: str, name: str) -> Any:
    shown = source if isinstance(source, str) else f"{name}: {prefix}"
    return record_from(cls, read_settings(source, prefix), shown)


def load_workload(source: str | Path) -> Workload:
    """A Workload from a YAML file or a preset name. Raises SpecError."""
    return record_from(Workload, read_settings(source, "workload"), str(source))
