"""The training loop: planned steps, token-weighted loss, summed gradients, AdamW, checkpoints."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from layerwise import __version__
from layerwise.cost import model_flops
from layerwise.data.corpus import Corpus
from layerwise.data.loader import Microbatch, PlannedLoader, Step
from layerwise.data.sampler import StepSampler
from layerwise.errors import DivergedError
from layerwise.groups import ProcessWorld
from layerwise.labels import counted
from layerwise.loss import balance_loss, reduce_gradients
from layerwise.model import HybridLM, ModelOptions
from layerwise.model.moe import EXPERTS
from layerwise.planners import Planner
from layerwise.runtime import MOVES
from layerwise.train.agreement import agree_on_settings
from layerwise.train.checkpoint import Checkpoints, RunState, check_resumable
from layerwise.train.config import TrainConfig
from layerwise.train.forecast import Forecast, Forecaster
from layerwise.train.metrics import Totals, peak_bytes, plan_numbers, sum_over_ranks
from layerwise.train.nonfinite import first_not_finite
from layerwise.train.profile import NUM_BEFORE, StepProfiler
from layerwise.train.sharding import build_mesh, clip_gradients, shard_model, sync_gradients_at

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}


def build_planner(config: TrainConfig) -> Planner:
    """The planner of a run. Raises SpecError for an unknown strategy or strategy option."""
    return Planner(
        strategy=config.strategy,
        cluster=config.cluster,
        model=config.model,
        max_tokens_per_rank=config.max_tokens_per_rank,
        options=config.strategy_options,
    )


def build_sampler(config: TrainConfig, corpus: Corpus) -> StepSampler:
    """Which samples each step holds: the same for every strategy and number of ranks."""
    return StepSampler(
        corpus.lengths,
        config.tokens_per_step,
        seed=config.data.seed,
        num_steps=config.num_steps,
        sources=corpus.sources,
        window_steps=config.data.planning_window_steps,
    )


def build_model(config: TrainConfig, world: ProcessWorld, device: torch.device) -> HybridLM:
    """The model with its initial weights, this rank's parts of them where they are sharded. Every rank calls this."""
    options = ModelOptions(
        rope_theta=config.rope_theta,
        dtype=DTYPES[config.dtype],
        seed=config.seed,
        activation_checkpointing=config.activation_checkpointing,
    )
    model = HybridLM(config.model, options, device="meta")
    if config.sharding != "replicate":
        mesh = build_mesh(
            config.sharding,
            num_ranks=world.num_ranks,
            ranks_per_node=world.ranks_per_node,
            expert_parallel=config.expert_parallel,
            device_type=device.type,
        )
        shard_model(model, mesh, param_dtype=torch.bfloat16 if config.dtype == "bfloat16" else None)
    model.materialize(device)
    return model


def build_optimizer(config: TrainConfig, model: HybridLM) -> torch.optim.AdamW:
    """AdamW of the parameters as they are sharded; `update` sets its learning rate."""
    opt = config.optimizer
    return torch.optim.AdamW(model.parameters(), lr=opt.learning_rate, betas=opt.betas, weight_decay=opt.weight_decay)


class Watcher(Protocol):
    """Who is told about the training: on rank 0 one that writes files and shows progress."""

    def start(self, first_step: int) -> None:
        """The first step to come; not 0 in a run that goes on from a checkpoint."""

    def step(self, row: dict[str, Any]) -> None:
        """A step is done; `row` is documented in docs/metrics.md. Only rank 0 is told."""

    def say(self, text: str) -> None:
        """Something that people must know and that is no error."""


def train(
    config: TrainConfig,
    corpus: Corpus,
    world: ProcessWorld,
    device: torch.device,
    watcher: Watcher,
    *,
    folder: Path,
    resume: bool,
    profile: Path | None = None,
) -> None:
    """Train on this rank, with checkpoints in `folder`, from the newest of them on where `resume` is set.

    profile: a folder for what the profiler sees of a few steps.
    Raises LayerwiseError for settings, data, plans and checkpoints that cannot be used.
    """
    agree_on_settings(_run_settings(config, corpus, folder, resume=resume, profile=profile is not None), world)
    world.progress.at = "building the model"
    model = build_model(config, world, device)
    optimizer = build_optimizer(config, model)
    saving = config.checkpoint
    checkpoints = Checkpoints(folder, world, keep=saving.keep, timeout_s=saving.timeout_s, warn=watcher.say)
    first_step = _resume(checkpoints, model, optimizer, config, corpus, watcher) if resume else 0
    watcher.start(first_step)
    planner = build_planner(config)
    forecaster = Forecaster(planner) if world.rank == 0 else None  # only rank 0 tells
    loader = PlannedLoader(
        dataset=corpus,
        planner=forecaster or planner,
        world=world,
        steps=build_sampler(config, corpus),
        vocab_size=config.model.vocab_size,
        prefetch=config.prefetch_steps,
        first_step=first_step,
        backend=config.attention_backend,
        device=device,
    )
    profiler = StepProfiler(profile, world, device, config.model.kinds) if profile else None
    started = time.perf_counter()
    for step in loader:
        losses = accumulate_gradients(model, step, config)
        world.progress.at = "the sums of gradients and losses"
        totals = sum_over_ranks(step, losses, _exchange_kinds(step, config), world)
        try:
            _check_finite("loss", totals.losses["loss"], step.index, config)
            grad_norm = update(model, optimizer, step.index, config, world)
        except DivergedError as error:
            found = first_not_finite(model, step, partial(_loss, model, step=step, config=config), world)
            world.progress.at = "the check for finite numbers"
            raise DivergedError(f"{error}\n  {found}") from None
        world.progress.at = "the figures of the step"
        peak = peak_bytes(world, device)
        now = time.perf_counter()
        if forecaster is not None:
            timing = _timing(step, now - started, forecaster.of(step.plan), config)
            watcher.step(_row(step, totals) | timing | {"grad_norm": grad_norm, "peak_bytes_max": peak})
        started = now
        if profiler is not None:
            profiler.step()
            started = time.perf_counter()  # it may have written a trace
        if config.checkpoint.is_due(step.index + 1, config.num_steps):
            state = _run_state(step.index + 1, config, corpus, world)
            checkpoints.save(model, optimizer, state, wait=not config.checkpoint.asynchronous)
    checkpoints.close()
    if profiler is not None and not profiler.finish():
        watcher.say(f"--profile: nothing to show, since it begins after {NUM_BEFORE} steps; take more steps")


def _run_settings(config: TrainConfig, corpus: Corpus, folder: Path, *, resume: bool, profile: bool) -> dict[str, Any]:
    """What must be the same on all ranks."""
    settings = config.model_dump(mode="json") | {"--resume": resume, "--profile": profile, "layerwise": __version__}
    if resume or config.checkpoint.every_steps:
        settings["the folder of checkpoints"] = str(folder)
    data = {"the number of samples": len(corpus), "the number of their tokens": int(corpus.lengths.sum())}
    return settings | data | {"the hash of all samples": corpus.fingerprint}


def _resume(
    checkpoints: Checkpoints,
    model: HybridLM,
    optimizer: torch.optim.Optimizer,
    config: TrainConfig,
    corpus: Corpus,
    watcher: Watcher,
) -> int:
    """Load the newest whole checkpoint; the number of steps that were taken, 0 without a checkpoint."""
    found = checkpoints.newest()
    if found is None:
        watcher.say("no complete checkpoint to go on from: starting at step 0")
        return 0
    path, state = found
    check_resumable(state, _run_state(state.step, config, corpus, checkpoints.world), path)
    checkpoints.load(path, model, optimizer, state)
    watcher.say(f"going on from {path}: {counted(state.step, 'step')} taken, by {counted(state.num_ranks, 'rank')}")
    if state.step >= config.num_steps:
        watcher.say(f"nothing to do: num_steps={config.num_steps}, and {state.step} steps are taken; raise num_steps")
    return state.step


def _run_state(steps_taken: int, config: TrainConfig, corpus: Corpus, world: ProcessWorld) -> RunState:
    return RunState(
        step=steps_taken,
        num_ranks=world.num_ranks,
        data={
            "samples": corpus.fingerprint,
            "data.mixture": [list(source) for source in corpus.sources],
            "data.seed": config.data.seed,
            "data.planning_window_steps": config.data.planning_window_steps,
            "tokens_per_step": config.tokens_per_step,
        },
        config=config.model_dump(mode="json"),
    )


def accumulate_gradients(model: HybridLM, step: Step, config: TrainConfig) -> dict[str, Tensor]:
    """Forward and backward of every micro-batch; this rank's share of the step's losses."""
    device = step.microbatches[0].input_ids.device
    totals = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("loss", "balance_loss")}
    for index, microbatch in enumerate(step.microbatches):
        sync_gradients_at(model, index == len(step.microbatches) - 1)
        losses = _forward(model, microbatch, step, config)
        for name, loss in losses.items():
            totals[name] += loss.detach()
        _total(losses, config).backward()
    return totals


def _loss(model: HybridLM, microbatch: Microbatch, step: Step, config: TrainConfig) -> Tensor:
    return _total(_forward(model, microbatch, step, config), config)


def _total(losses: dict[str, Tensor], config: TrainConfig) -> Tensor:
    return losses["loss"] + config.balance_coef * losses.get("balance_loss", 0.0)


def _forward(model: HybridLM, microbatch: Microbatch, step: Step, config: TrainConfig) -> dict[str, Tensor]:
    device = microbatch.input_ids.device
    low = torch.autocast(device.type, dtype=torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()
    with microbatch.routes(), low:
        output = model(
            microbatch.input_ids,
            microbatch.position_ids,
            shift_labels=microbatch.shift_labels,
            num_valid_tokens=step.num_valid_tokens,
        )
        losses = {"loss": output.loss}
        if config.balance_coef and output.router is not None:
            losses["balance_loss"] = balance_loss(
                output.router.counts,
                output.router.prob_sums,
                experts_per_token=config.model.experts_per_token,
                num_tokens=step.num_tokens,
            )
    return losses


def update(
    model: HybridLM, optimizer: torch.optim.Optimizer, step: int, config: TrainConfig, world: ProcessWorld
) -> float:
    """One optimizer step with the gradients of all ranks; their norm before clipping. Raises DivergedError."""
    opt = config.optimizer
    if config.sharding == "replicate":
        reduce_gradients(model.parameters(), world)
    grad_norm = float(clip_gradients(model.parameters(), opt.clip_grad_norm or math.inf))
    _check_finite("gradient norm", grad_norm, step, config)
    world.progress.at = "the optimizer's step"
    for group in optimizer.param_groups:
        group["lr"] = opt.learning_rate * min(1.0, (step + 1) / (opt.warmup_steps + 1))
    optimizer.step()
    optimizer.zero_grad()
    return grad_norm


def _check_finite(name: str, value: float, step: int, config: TrainConfig) -> None:
    if not math.isfinite(value):
        raise DivergedError(
            f"step {step}: the {name} is {value}, so the weights were not changed; lower "
            f"optimizer.learning_rate={config.optimizer.learning_rate}, set optimizer.clip_grad_norm, or look for bad "
            "samples"
        )


def _exchange_kinds(step: Step, config: TrainConfig) -> tuple[str, ...]:
    moves = (MOVES,) if any(m.shards_by_kind for m in step.plan.microbatches) else ()
    experts = (EXPERTS,) if config.expert_parallel > 1 else ()
    return (*config.model.kinds, *moves, *experts)


def _row(step: Step, totals: Totals) -> dict[str, Any]:
    return {
        "step": step.index,
        **totals.losses,
        "num_samples": len(step.plan.lengths),
        "num_tokens": step.num_tokens,
        "num_valid_tokens": step.num_valid_tokens,
        **plan_numbers(step.plan),
        "exchange": totals.exchange,
        "exchange_wait_s": totals.exchange_wait_s,
    }


def _timing(step: Step, step_s: float, forecast: Forecast, config: TrainConfig) -> dict[str, Any]:
    peak_flops = config.cluster.num_ranks * config.cluster.peak_flops_per_s * step_s
    return {
        "step_s": step_s,
        "mfu": model_flops(config.model, np.asarray(step.plan.lengths)) / peak_flops,
        "plan_s": step.plan_s - forecast.took_s,
        "wait_s": step.wait_s,
        "predicted_s": forecast.step_s,
        "predicted_saving": forecast.saving,
    }
