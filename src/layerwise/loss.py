"""Losses and gradients that equal one process's, whatever the layout.

Each rank adds up its local tokens and divides by counts of the whole optimizer step, so gradients are summed over ranks
and micro-batches, never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from layerwise.errors import SpecError
from layerwise.groups import World
from layerwise.runtime import Routes, current_routes


def token_loss(logits: Tensor, shift_labels: Tensor, num_valid_tokens: int) -> Tensor:
    """This rank's part of the step's mean cross-entropy: a float32-or-better scalar; the sum over ranks is the loss.

    logits: [T, V]; shift_labels: int64 [T], the next token of the same sample or -100; num_valid_tokens: labels
    that are not -100 in the whole optimizer step, over all ranks. A step without any has loss 0 and zero gradients.
    Raises SpecError for other shapes.
    """
    if logits.dim() != 2 or shift_labels.shape != logits.shape[:1]:
        raise SpecError(
            f"logits {tuple(logits.shape)} and shift_labels {tuple(shift_labels.shape)} must be [tokens, vocabulary] "
            "and [tokens]: packed rows without a batch dimension"
        )
    return _cross_entropy(logits, shift_labels) / max(num_valid_tokens, 1)


def head_loss(
    hidden: Tensor, weight: Tensor, shift_labels: Tensor, num_valid_tokens: int, *, chunk_tokens: int = 1024
) -> Tensor:
    """`token_loss` of the logits hidden @ weight.T, of which no more than `chunk_tokens` rows exist at once.

    hidden: [T, C]; weight: [V, C]. The logits of a chunk are made once for the loss and once more in backward; those of
    T <= chunk_tokens only once.
    """
    rows, labels = hidden.split(chunk_tokens), shift_labels.split(chunk_tokens)
    if len(rows) == 1:
        return token_loss(F.linear(hidden, weight), shift_labels, num_valid_tokens)
    parts = [
        checkpoint(_head_cross_entropy, *chunk, weight, use_reentrant=False, preserve_rng_state=False)
        for chunk in zip(rows, labels, strict=True)
    ]
    return torch.stack(parts).sum() / max(num_valid_tokens, 1)


def _head_cross_entropy(hidden: Tensor, shift_labels: Tensor, weight: Tensor) -> Tensor:
    return _cross_entropy(F.linear(hidden, weight), shift_labels)


def _cross_entropy(logits: Tensor, shift_labels: Tensor) -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(wide, shift_labels, reduction="sum")  # ignores -100


def balance_loss(
    counts: Tensor,
    prob_sums: Tensor,
    *,
    experts_per_token: int,
    num_tokens: int,
    routes: Routes | None = None,
) -> Tensor:
    """This rank's part of the router balance loss of a step, a scalar; the sum over ranks is the loss.

    counts: int64 [layers, pieces, E], tokens of each local piece that chose each expert; prob_sums: [layers,
    pieces, E],
    sums of router probabilities; num_tokens: of the whole step. Per layer and sample the loss is E * sum_e f_e * P_e
    (the sequence-wise form of DeepSeek-V3, arXiv 2412.19437, section 2.1.2), weighted by the sample's tokens and
    averaged
    over layers. Being a sum over samples it does not depend on who shares a micro-batch. Counts of samples that several
    ranks hold are added up in one small all-reduce among them.
    """
    routes = routes or current_routes()
    num_layers, _, num_experts = counts.shape
    totals = _sum_over_shards(counts, routes)
    # sum_s L_s/N * E * sum_e (count_es / (L_s * topk)) * (prob_es / L_s): one L_s cancels.
    lengths = (totals.sum(-1, keepdim=True) / experts_per_token).clamp(min=1)
    per_piece = (totals / (lengths * experts_per_token)).to(prob_sums.dtype) * prob_sums
    return per_piece.sum() * (num_experts / (max(num_tokens, 1) * max(num_layers, 1)))


def _sum_over_shards(counts: Tensor, routes: Routes) -> Tensor:
    """counts [layers, pieces, E] with every piece's row replaced by the sum over all shards of its sample."""
    comm = routes.world.comm(routes.shard_block)
    if comm is None:
        return counts
    slots = np.searchsorted(routes.shared_samples, routes.piece_samples)
    is_shared = np.isin(routes.piece_samples, routes.shared_samples)
    pieces = torch.from_numpy(np.flatnonzero(is_shared)).to(counts.device)
    slot_of_piece = torch.from_numpy(slots[is_shared]).to(counts.device)
    table = counts.new_zeros(counts.shape[0], len(routes.shared_samples), counts.shape[2])
    table.index_add_(1, slot_of_piece, counts[:, pieces])
    comm.all_reduce(table)
    totals = counts.clone()
    totals[:, pieces] = table[:, slot_of_piece]
    return totals


@torch.no_grad()
def reduce_gradients(parameters: Iterable[torch.nn.Parameter], world: World) -> None:
    """Sum gradients over all ranks in one float32-or-better all-reduce; a missing gradient counts as zero.

    Every rank ends with the same bits, so replicated weights stay equal.
    Raises SpecError for weights that FSDP has sharded, which sums their gradients itself, and for sparse gradients.
    Where only some are sharded, give it the others.
    """
    trained = [p for p in parameters if p.requires_grad]
    for p in trained:
        if isinstance(p, DTensor):
            raise SpecError(
                f"a weight of shape {tuple(p.shape)} is sharded: FSDP reduces its gradient in backward; give "
                "reduce_gradients only those that are not DTensors, and let FSDP sum and not average "
                "(layerwise.sum_gradients)"
            )
        if p.grad is not None and p.grad.is_sparse:
            raise SpecError(f"the gradient of a weight of shape {tuple(p.shape)} is sparse: use sparse=False")
    if world.num_ranks == 1 or not trained:
        return
    wide = reduce(torch.promote_types, (p.dtype for p in trained), torch.float32)
    flat = torch.cat(
        [p.new_zeros(p.numel(), dtype=wide) if p.grad is None else p.grad.flatten().to(wide) for p in trained]
    )
    world.progress.at = "the sum of gradients"
    world.all_reduce(flat)
    for p, grad in zip(trained, flat.split([p.numel() for p in trained]), strict=True):
        p.grad = grad.view_as(p).to(p.dtype)
