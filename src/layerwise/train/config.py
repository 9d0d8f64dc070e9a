"""Settings of a training run: one YAML file, overridden by `--set a.b=c`, resolved into one frozen record."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from layerwise.data.config import DataConfig
from layerwise.errors import SpecError
from layerwise.spec import (
    ClusterSpec,
    ModelSpec,
    Record,
    load_cluster,
    load_model,
    read_settings,
    read_yaml,
    record_from,
)


class OptimizerConfig(Record):
    """AdamW with linear warm-up, then constant."""

    learning_rate: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = Field(default=5, ge=0)
    clip_grad_norm: float | None = Field(default=1.0, gt=0)


class TrainConfig(Record):
    """Everything that decides what a run computes. `docs/train.md` describes each key."""

    model: ModelSpec
    cluster: ClusterSpec
    strategy: str = "repack+parents"
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    data: DataConfig = Field(default_factory=DataConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    num_steps: int = Field(default=20, ge=1)
    tokens_per_step: int = Field(ge=1, description="samples are added to a step until the next would exceed this")
    max_tokens_per_rank: int = Field(ge=1, description="of one micro-batch; what a rank's memory holds")
    balance_coef: float = Field(default=0.01, ge=0, description="weight of the router balance loss")
    dtype: Literal["float32", "float64", "bfloat16"] = Field(
        default="float32", description="bfloat16: float32 weights, autocast compute"
    )
    device: Literal["auto", "cpu", "cuda"] = "auto"
    attention_backend: str = "auto"
    activation_checkpointing: bool = False
    rope_theta: float = Field(default=10_000.0, gt=0)
    seed: int = Field(default=0, ge=0)
    prefetch_steps: int = Field(default=2, ge=1)
    timeout_s: float = Field(default=300.0, gt=0, description="a collective that waits longer ends the run")

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.balance_coef and not self.model.num_experts and "balance_coef" in self.model_fields_set:
            raise ValueError("balance_coef has no effect on a dense model; leave it out")
        if self.max_tokens_per_rank * self.cluster.num_ranks < 1:
            raise ValueError("no room for tokens")
        return self

    def to_yaml(self) -> str:
        """The resolved settings; reading them back gives an equal record."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False)


def load_config(path: str | Path | None, overrides: list[str], **replacements: Any) -> TrainConfig:
    """Read a YAML file, apply `a.b=c` overrides (values are YAML), then keyword replacements that are not None.

    `model` and `cluster` are a preset name, a YAML file, or a mapping; the latter two may start from another with
    `base`.
    Raises SpecError naming every unknown key and illegal value.
    """
    source = "--set (no --config FILE given)" if path is None else str(path)
    data = {} if path is None else read_yaml(Path(path))
    for override in overrides:
        _apply(data, override)
    data |= {key: value for key, value in replacements.items() if value is not None}
    for key, load in (("model", load_model), ("cluster", load_cluster)):
        given = data.get(key)
        if isinstance(given, str):
            data[key] = load(given)
        elif isinstance(given, dict):
            data[key] = read_settings(given, key)
    return record_from(TrainConfig, data, source)


def parse_setting(setting: str) -> tuple[str, Any]:
    """(key, value) of `key=value`, whose value is YAML. Raises SpecError."""
    key, separator, text = setting.partition("=")
    if not separator or not key:
        raise SpecError(f"--set {setting!r}: expected key=value, as in --set sp_degree=8")
    try:
        return key, _number(yaml.safe_load(text))
    except yaml.YAMLError:
        raise SpecError(f"--set {setting!r}: the value is not valid YAML") from None


def _apply(data: dict[str, Any], override: str) -> None:
    key, value = parse_setting(override)
    *parents, last = key.split(".")
    for parent in parents:
        child = data.get(parent, {})
        # `--set cluster.num_nodes=1` changes one number of the preset or file that `cluster` names.
        data[parent] = {"base": child} if isinstance(child, str) else dict(child) if isinstance(child, dict) else None
        if data[parent] is None:
            raise SpecError(f"--set {override!r}: {parent!r} is a single value, not a group of settings")
        data = data[parent]
    data[last] = value


def _number(value: Any) -> Any:
    """YAML 1.1 reads 1e-3 as text; people mean the number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value
