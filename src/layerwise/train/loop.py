"""The training loop: planned steps, token-weighted loss, summed gradients, AdamW."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from layerwise.cost import predict
from layerwise.data.corpus import Corpus
from layerwise.data.loader import PlannedLoader, Step
from layerwise.data.sampler import StepSampler
from layerwise.errors import DivergedError
from layerwise.groups import World
from layerwise.loss import balance_loss, reduce_gradients, token_loss
from layerwise.model import HybridLM, ModelOptions
from layerwise.planners import Planner
from layerwise.runtime import MOVES
from layerwise.train.config import TrainConfig
from layerwise.train.metrics import plan_numbers, sum_over_ranks

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
    return StepSampler(corpus.lengths, config.tokens_per_step, seed=config.data.seed, num_steps=config.num_steps)


class Watcher(Protocol):
    """Who is told about the training: on rank 0 one that writes files and shows progress."""

    def step(self, row: dict[str, Any]) -> None:
        """A step is done; `row` is documented in docs/metrics.md and equal on every rank but for its seconds."""


def train(config: TrainConfig, corpus: Corpus, world: World, device: torch.device, watcher: Watcher) -> None:
    """Train on this rank.

    Raises LayerwiseError for settings, data and plans that cannot be used.
    """
    planner = build_planner(config)
    options = ModelOptions(
        rope_theta=config.rope_theta,
        dtype=DTYPES[config.dtype],
        seed=config.seed,
        activation_checkpointing=config.activation_checkpointing,
    )
    model = HybridLM(config.model, options).to(device)
    opt = config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=opt.learning_rate, betas=opt.betas, weight_decay=opt.weight_decay
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / (opt.warmup_steps + 1)))
    loader = PlannedLoader(
        dataset=corpus,
        planner=planner,
        world=world,
        steps=build_sampler(config, corpus),
        vocab_size=config.model.vocab_size,
        prefetch=config.prefetch_steps,
        backend=config.attention_backend,
        device=device,
    )
    started = time.perf_counter()
    for step in loader:
        losses = _accumulate_gradients(model, step, config)
        reduce_gradients(model.parameters(), world)
        grad_norm = clip_grad_norm_(model.parameters(), opt.clip_grad_norm or torch.inf)
        if not math.isfinite(grad_norm):
            raise DivergedError(
                f"step {step.index}: the gradient norm is {float(grad_norm)}, so the weights were not changed; lower "
                f"optimizer.learning_rate={opt.learning_rate}, set optimizer.clip_grad_norm, or look for bad samples"
            )
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        kinds = (*config.model.kinds, *((MOVES,) if any(m.shards_by_kind for m in step.plan.microbatches) else ()))
        totals, exchange = sum_over_ranks(step, losses, kinds, world)
        now = time.perf_counter()
        watcher.step(_row(step, totals, exchange, float(grad_norm), now - started, config))
        started = now


def _accumulate_gradients(model: HybridLM, step: Step, config: TrainConfig) -> dict[str, Tensor]:
    """Forward and backward of every micro-batch; this rank's share of the step's losses."""
    device = next(model.parameters()).device
    low = torch.autocast(device.type, dtype=torch.bfloat16) if config.dtype == "bfloat16" else nullcontext()
    totals = {name: torch.zeros((), dtype=torch.float64, device=device) for name in ("loss", "balance_loss")}
    for microbatch in step.microbatches:
        with microbatch.routes(), low:
            output = model(microbatch.input_ids, microbatch.position_ids)
            loss = token_loss(output.logits, microbatch.shift_labels, step.num_valid_tokens)
            totals["loss"] += loss.detach()
            if config.balance_coef and output.router is not None:
                balance = balance_loss(
                    output.router.counts,
                    output.router.prob_sums,
                    experts_per_token=config.model.experts_per_token,
                    num_tokens=step.num_tokens,
                )
                totals["balance_loss"] += balance.detach()
                loss = loss + config.balance_coef * balance
        loss.backward()
    return totals


def _row(
    step: Step,
    losses: dict[str, float],
    exchange: dict[str, Any],
    grad_norm: float,
    step_s: float,
    config: TrainConfig,
) -> dict[str, Any]:
    return {
        "step": step.index,
        **losses,
        "grad_norm": grad_norm,
        "num_samples": len(step.plan.lengths),
        "num_tokens": step.num_tokens,
        "num_valid_tokens": step.num_valid_tokens,
        "step_s": step_s,
        "plan_s": step.plan_s,
        "wait_s": step.wait_s,
        "predicted_s": predict(step.plan, config.cluster, config.model).seconds,
        **plan_numbers(step.plan),
        "exchange": exchange,
    }
