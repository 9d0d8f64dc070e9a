"""Settings of a training run: one YAML file, overridden by `--set a.b=c`, resolved into one frozen record."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

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

MIN_TIMEOUT_S = 0.1  # ranks that are well need some of it

_Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Record):
    """AdamW with linear warm-up, then constant."""

    learning_rate: float = Field(default=3e-3, gt=0)
    weight_decay: float = Field(default=0.1, ge=0)
    betas: tuple[_Beta, _Beta] = (0.9, 0.95)
    warmup_steps: int = Field(default=5, ge=0)
    clip_grad_norm: float | None = Field(default=1.0, gt=0)


class CheckpointConfig(Record):
    """When to save, and how many checkpoints stay; docs/checkpoints.md.

    `every_steps` None: never. `folder` None: `checkpoints` in the folder of the run. `asynchronous`: training goes on
    while the files are written. `timeout_s`: how long ranks wait for the slowest that writes, or reads one to go on.
    """

    every_steps: int | None = Field(default=None, ge=1)
    keep: int = Field(default=2, ge=1)
    folder: str | None = Field(default=None, min_length=1)
    asynchronous: bool = True
    timeout_s: float = Field(default=1800.0, ge=MIN_TIMEOUT_S, le=1e6)

    @model_validator(mode="after")
    def _check(self) -> CheckpointConfig:
        without_effect = self.model_fields_set - {"every_steps", "timeout_s"}  # --resume waits for as long, too
        if self.every_steps is None and any(
            getattr(self, key) != type(self).model_fields[key].default for key in without_effect
        ):
            raise ValueError("has no effect without every_steps; set it too, or leave the others out")
        return self

    def is_due(self, steps_taken: int, num_steps: int) -> bool:
        """Whether to save now: every so many steps, and at the end."""
        every = self.every_steps
        return every is not None and (steps_taken % every == 0 or steps_taken == num_steps)


class WandbConfig(Record):
    """Metrics to Weights & Biases, beside the files of the run; needs the extra `wandb`. `name` None: made up there."""

    project: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1)
    mode: Literal["online", "offline"] = "online"


class TrainConfig(Record):
    """Everything that decides what a run computes. `docs/train.md` describes each key."""

    model: ModelSpec
    cluster: ClusterSpec
    strategy: str = "repack+parents"
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    data: DataConfig = Field(default_factory=DataConfig)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig)
    wandb: WandbConfig | None = None
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
    sharding: Literal["replicate", "fsdp", "hsdp"] = Field(
        default="replicate", description="fsdp: over all ranks; hsdp: within nodes, with a copy on each node"
    )
    expert_parallel: int = Field(default=1, ge=1, description="consecutive ranks that share the experts of a layer")
    rope_theta: float = Field(default=10_000.0, gt=0)
    seed: int = Field(default=0, ge=0, lt=2**63)
    prefetch_steps: int = Field(default=2, ge=1)
    timeout_s: float = Field(
        default=300.0, ge=MIN_TIMEOUT_S, le=1e6, description="a collective that waits longer ends the run"
    )

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        if self.balance_coef and not self.model.num_experts and "balance_coef" in self.model_fields_set:
            raise ValueError("balance_coef has no effect on a dense model; leave it out")
        if self.expert_parallel > 1:
            self._check_expert_parallel()
        return self

    def _check_expert_parallel(self) -> None:
        degree, experts = self.expert_parallel, self.model.num_experts
        sharded = self.cluster.num_ranks if self.sharding == "fsdp" else self.cluster.ranks_per_node
        if not experts:
            raise ValueError(f"expert_parallel={degree} has no effect on a dense model; leave it out")
        if self.sharding == "replicate":
            raise ValueError(f"expert_parallel={degree} needs sharding=fsdp or sharding=hsdp, which know its groups")
        if experts % degree or sharded % degree:
            legal = [n for n in range(1, experts + 1) if experts % n == 0 and sharded % n == 0]
            raise ValueError(
                f"expert_parallel={degree} must divide the {experts} experts and the {sharded} ranks that "
                f"sharding={self.sharding} shards over; legal values: {legal}"
            )

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
