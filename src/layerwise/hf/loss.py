"""The loss of a Hugging Face model over a whole optimizer step, whatever the layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from layerwise.errors import SpecError, UnsupportedError
from layerwise.hf.batches import Batch
from layerwise.hf.calls import check_follows_routes
from layerwise.hf.families import AUX_LOSS_FAMILIES
from layerwise.hf.spec import dense_layers, layer_kinds
from layerwise.loss import balance_loss, token_loss
from layerwise.runtime import Routes, current_routes


def loss(model: Any, batch: Batch) -> Tensor:
    """This rank's part of the step's mean cross-entropy, to be called inside `batch.routes()`.

    A float32-or-better scalar; the sum over ranks and micro-batches is the loss, and gradients are summed likewise.
    With `output_router_logits` in the config it includes the family's load-balancing loss, per sample and weighted by
    tokens. On a rank without tokens every parameter still gets a gradient, of zeros.
    Raises SpecError for a batch that is not one of `batches`, in the routes of another one, and for models without
    `apply` or logits of every token.
    """
    if not isinstance(batch, Batch):
        raise SpecError(
            f"loss() takes a Batch of layerwise.hf.batches(loader), got {type(batch).__name__}: the step's plan comes "
            "with it"
        )
    config = _config(model)
    with_router = bool(getattr(config, "output_router_logits", False))
    if with_router and config.model_type not in AUX_LOSS_FAMILIES:
        raise UnsupportedError(
            f"{config.model_type}: output_router_logits=True has no effect, since the family has no router loss of its "
            "own; set it to False"
        )
    routes = current_routes()
    with batch.routes() as own:
        if routes is not own:
            raise SpecError(
                "loss() was called in the routes of another micro-batch, where samples may be split otherwise: use "
                "`with batch.routes():` of the same batch"
            )
    output = model(input_ids=batch.input_ids, position_ids=batch.position_ids)
    logits = getattr(output, "logits", None)
    if logits is None or logits.shape[:2] != batch.input_ids.shape:
        shape = None if logits is None else tuple(logits.shape)
        raise SpecError(
            f"{type(model).__name__} gives logits of shape {shape}, expected [1, local tokens, vocabulary]: a hook "
            "or wrapper changed the output of the model; remove it"
        )
    total = token_loss(logits[0], batch.shift_labels[0], batch.step.num_valid_tokens)
    if with_router:
        router = _router_loss(output.router_logits, config, batch.step.num_tokens, routes)
        total = total + config.router_aux_loss_coef * router
    return total


def _config(model: Any) -> Any:
    """The text config of a model that follows routes, under wrappers or not. Raises SpecError for any other model."""
    bare = model.module if isinstance(model, DistributedDataParallel) else model
    if not hasattr(bare, "config"):
        raise SpecError(
            f"loss() takes the model that apply() was given, alone or wrapped by PEFT, FSDP, DDP or torch.compile; got "
            f"{type(model).__name__} of {type(bare).__name__}: compile before wrapping with DDP"
        )
    config = bare.config.get_text_config()
    check_follows_routes(config)
    return config


def _router_loss(router_logits: tuple[Tensor, ...], config: Any, num_tokens: int, routes: Routes) -> Tensor:
    """transformers' `load_balancing_loss_func` of each sample, by its share of the step's tokens.

    That function pools layers: E * sum_e f_e * P_e with f and P averaged over tokens and layers, f summing to k. Hence
    `balance_loss` of the pooled sums, which averages choices too, times k / layers.
    """
    topk, num_layers = config.num_experts_per_tok, len(router_logits)
    kinds = [kind for kind, dense in zip(layer_kinds(config), dense_layers(config), strict=True) if not dense]
    counts: list[Tensor] = []
    prob_sums: list[Tensor] = []
    for kind, layer in zip(kinds, router_logits, strict=True):
        pieces = routes.tokens_at(kind).piece_index
        logits = layer[: len(pieces)]  # without the padding token of an empty rank
        probs = logits.softmax(-1, dtype=torch.promote_types(logits.dtype, torch.float32))
        chosen = torch.zeros_like(probs, dtype=torch.int64).scatter_(1, probs.topk(topk, dim=-1).indices, 1)
        for total, part in ((counts, chosen), (prob_sums, probs)):
            total.append(part.new_zeros(routes.num_pieces, part.shape[1]).index_add(0, pieces, part))
    pooled = balance_loss(
        torch.stack(counts).sum(0, keepdim=True),
        torch.stack(prob_sums).sum(0, keepdim=True),
        experts_per_token=topk,
        num_tokens=num_tokens,
        routes=routes,
    )
    return pooled * (topk / num_layers)
