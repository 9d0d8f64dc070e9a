"""One step of a Hugging Face model over threads as ranks, and the same step one sample at a time."""

from __future__ import annotations

import copy
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from math import inf, isnan
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import layerwise.hf as lwhf
from layerwise import LocalWorld, PlannedLoader
from layerwise.exchange import Count
from layerwise.groups import World
from layerwise.plan import StepPlan
from tests.hf.models import VOCAB, InFloat64
from tests.planners.builders import tiny_wide_planner

MASKED = -100
STRATEGIES = ("static", "dynamic", "halo", "redistribute", "repack+parents", "joint")
Samples = list[dict[str, Any]]


def make_samples(lengths: Sequence[int], seed: int = 0) -> Samples:
    """Random tokens; every fifth label is masked."""
    rng = np.random.default_rng(seed)
    ids = [rng.integers(0, VOCAB, length) for length in lengths]
    return [{"input_ids": i, "labels": np.where(np.arange(len(i)) % 5 == 3, MASKED, i)} for i in ids]


def planner_for(
    strategy: str, num_ranks: int, config: Any, lengths: Sequence[int], microbatches: int = 1
) -> Callable[[Sequence[int]], StepPlan]:
    """A planner whose groups are wide although the samples are tiny; the plan is made once for all ranks."""
    planner = tiny_wide_planner(
        strategy, num_ranks, lwhf.model_spec(config), lengths, microbatches=microbatches, spare=4
    )
    plan = planner(list(lengths))
    return lambda sizes: plan


def applied(model: Any) -> Any:
    """A copy of the model that follows routes."""
    model = copy.deepcopy(model)
    lwhf.apply(model)
    return model


def recomputing(model: Any) -> Any:
    """The model, in training with gradient checkpointing."""
    # Renamed in transformers 5.2x.
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    return model.train()


def trained(model: Any) -> list[Tensor]:
    """The parameters that want a gradient."""
    return [p for p in model.parameters() if p.requires_grad]


class Result:
    """Loss, gradients by parameter, and the logits [L, V] of every sample."""

    def __init__(self, loss: Tensor, grads: list[Tensor], logits: list[Tensor]) -> None:
        self.loss, self.grads, self.logits = loss, grads, logits


def _around(model: Any, low: torch.dtype | None) -> AbstractContextManager[object]:
    """What a forward pass runs in: `low` is the dtype of autocast, if any."""
    if next(model.parameters()).dtype == torch.float64:
        return InFloat64()
    return torch.autocast("cpu", low, enabled=low is not None)


def one_at_a_time(model: Any, samples: Samples, aux_coef: float = 0.0, autocast: torch.dtype | None = None) -> Result:
    """By definition: every sample alone, on the untouched model, each token counting once."""
    num_valid = sum(int((s["labels"][1:] != MASKED).sum()) for s in samples)
    num_tokens = sum(len(s["labels"]) for s in samples)
    total: Any = 0.0
    all_logits = []
    for sample in samples:
        ids, labels = (torch.from_numpy(sample[name]) for name in ("input_ids", "labels"))
        with _around(model, autocast):
            output = model(input_ids=ids[None], use_cache=False, output_router_logits=bool(aux_coef))
        logits = output.logits[0]
        all_logits.append(logits.detach())
        total = total + F.cross_entropy(logits[:-1], labels[1:], reduction="sum", ignore_index=MASKED) / num_valid
        if aux_coef:
            total = total + aux_coef * output.aux_loss * (len(ids) / num_tokens)
    grads = torch.autograd.grad(total, trained(model), allow_unused=True, materialize_grads=True)
    return Result(total.detach(), list(grads), all_logits)


def sent_by_ranks(model: Any, plan: StepPlan, kind: str) -> list[Count]:
    """What each rank sends at the sites of a kind, or in moves, in one step, forward and backward."""

    def rank_main(world: World) -> Count:
        samples, steps = make_samples(plan.lengths), [range(len(plan.lengths))]
        loader = PlannedLoader(dataset=samples, planner=lambda lengths: plan, world=world, steps=steps)
        for batch in lwhf.batches(loader):
            with batch.routes():
                loss = lwhf.loss(model, batch)
            torch.autograd.grad(loss, list(model.parameters()))
        return batch.step.meter.counts.get(kind, Count())

    return LocalWorld(plan.num_ranks, plan.ranks_per_node).run(rank_main)


def on_ranks(
    model: Any,
    samples: Samples,
    planner: Callable[[Sequence[int]], StepPlan],
    num_ranks: int,
    autocast: torch.dtype | None = None,
) -> tuple[Result, StepPlan]:
    """One planned step; `model` follows routes and is shared by all ranks."""
    params = trained(model)
    seen: defaultdict[int, list[Tensor]] = defaultdict(list)
    hook = model.register_forward_hook(lambda _m, _i, out: seen[threading.get_ident()].append(out.logits[0].detach()))

    def rank_main(world: World) -> tuple[Tensor, list[Tensor], list[Tensor], StepPlan]:
        loader = PlannedLoader(dataset=samples, planner=planner, world=world, steps=[range(len(samples))])
        loss, grads = torch.zeros((), dtype=torch.float64), [torch.zeros_like(p) for p in params]
        for batch in lwhf.batches(loader):
            with batch.routes(), _around(model, autocast):
                part = lwhf.loss(model, batch)
            # No gradient may be missing, whatever the rank holds. Recompute happens here, outside of routes().
            for grad, more in zip(grads, torch.autograd.grad(part, params), strict=True):
                grad += more
            loss = loss + part.detach()
        return loss, grads, seen[threading.get_ident()], batch.step.plan

    results = LocalWorld(num_ranks, max(1, num_ranks // 2)).run(rank_main)
    hook.remove()
    plan = results[0][3]
    whole = [torch.full((len(s["input_ids"]), VOCAB), torch.nan, dtype=autocast or params[0].dtype) for s in samples]
    for rank, (_, _, parts, _) in enumerate(results):
        for microbatch, rows in zip(plan.microbatches, parts, strict=True):
            shards = [shard for shard in microbatch.shards if shard.rank == rank]
            offset = 0
            for shard in shards:
                whole[shard.sample][shard.lo : shard.hi] = rows[offset : offset + shard.hi - shard.lo]
                offset += shard.hi - shard.lo
    grads = [sum(r[1][i] for r in results) for i in range(len(params))]
    return Result(sum(r[0] for r in results), grads, whole), plan


def largest_error(model: Any, ours: Result, expected: Result) -> tuple[float, str]:
    """The largest relative error, each tensor by its norm, and where it is."""
    pairs = {"loss": (ours.loss, expected.loss)}
    pairs |= {f"logits of sample {i}": pair for i, pair in enumerate(zip(ours.logits, expected.logits, strict=True))}
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    pairs |= dict(zip(names, zip(ours.grads, expected.grads, strict=True), strict=True))
    errors = {name: float((a - b).norm() / b.norm() if b.norm() > 0 else a.norm()) for name, (a, b) in pairs.items()}
    return max((inf if isnan(error) else error, name) for name, error in errors.items())


def assert_equal(model: Any, ours: Result, expected: Result, tolerance: float) -> None:
    """Loss, logits and every gradient."""
    error, name = largest_error(model, ours, expected)
    assert error <= tolerance, f"{name}: relative error {error:.1e}"
