"""Attention layers of a Hugging Face model that follow the routes of the current micro-batch.

transformers looks its attention up by name; `apply` registers ours and selects it. The name must not contain "flash",
at which transformers would build its own boundaries from position_ids. No mask function is registered under it, so no
mask is built. The routes travel as a keyword argument through the model's layers, so that activation checkpointing
replays each micro-batch with its own, on whatever thread.

A rank without tokens runs on one padding token, since models reshape by -1, which torch refuses for no tokens; its
attention is a zero, and no other token sees it.
"""

from __future__ import annotations

import inspect
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise import runtime
from layerwise.errors import SpecError, UnsupportedError
from layerwise.exchange import outside_graph
from layerwise.hf.calls import (
    NAME,
    PASS,
    ForwardPass,
    check_follows_routes,
    check_ignored,
    is_empty,
    padded_positions,
    routes_of_call,
)
from layerwise.hf.families import check_version
from layerwise.hf.mixers import wrap_mixers
from layerwise.hf.places import hook_layers, positions_of_places
from layerwise.hf.spec import layer_kinds, model_spec
from layerwise.runtime import Routes

_NO_CACHE = "plans are for training; leave it out, and to generate call model.set_attn_implementation('sdpa') first"
# Arguments of a model's forward that would be wrong on a part of the tokens, or have no effect.
_REFUSED_INPUTS = {
    "attention_mask": "the plan knows where samples begin and end, and nothing is padded; leave it out",
    "labels": "they would be shifted within the local tokens; use layerwise.hf.loss",
    "cache": _NO_CACHE,
    "past_key_values": _NO_CACHE,
    "logits_to_keep": "local tokens are not the end of a sample; leave it out",
    "output_attentions": "scores are never kept; leave it out",
    "use_cache": _NO_CACHE,
}


def apply(model: Any) -> None:
    """Make the layers of a transformers model follow `routes()`; the model is called as before.

    Weights, modules and checkpoints stay as they are, and `model.set_attn_implementation("sdpa")` undoes it.
    Raises UnsupportedError for model types and options that cannot be trained exactly, and without a language-model
    head.
    """
    check_version()
    from transformers import AttentionInterface, PreTrainedModel

    if not isinstance(model, PreTrainedModel) or model._compiled_call_impl is not None:
        compiled = " that is compiled" if isinstance(model, PreTrainedModel) else ""
        raise UnsupportedError(
            f"apply() takes a transformers PreTrainedModel, got {type(model).__name__}{compiled}: call it before "
            "wrapping or compiling the model"
        )
    config = model.config.get_text_config()
    if config is not model.config:
        raise UnsupportedError(
            f"{type(model).__name__} ({model.config.model_type}) is refused: it takes more than text, and only its "
            f"language model ({config.model_type}) was compared with its untouched self; apply() takes that model alone"
        )
    model_spec(config)
    if model.get_output_embeddings() is None:
        raise UnsupportedError(
            f"{type(model).__name__} is refused: it has no language-model head, and plans are for the loss of every "
            "token; take an AutoModelForCausalLM"
        )
    AttentionInterface.register(NAME, attention_function)
    model.set_attn_implementation(NAME)
    if config._attn_implementation != NAME:
        raise UnsupportedError(f"{type(model).__name__} does not look its attention up by name")
    wrap_mixers(model)
    hook_layers(model)
    if _prepare_inputs not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_prepare_inputs, with_kwargs=True)
        model.register_forward_hook(_check_sites, with_kwargs=True)


@outside_graph
def attention_function(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The contract of transformers' AttentionInterface: query [1, H, T, D] -> [1, T, H, Dv], and no scores."""
    others |= {"attention_mask": attention_mask, "dropout": dropout or None}
    kind = layer_kinds(module.config)[module.layer_idx]
    routes = routes_of_call(type(module).__name__, kind, others)
    num_padding = int(is_empty(routes, kind))
    query = _true_temperature(module, query, padded_positions(routes, kind))
    q, k, v = (x[0, :, num_padding:].transpose(0, 1) for x in (query, key, value))
    options = {"window": sliding_window, "scale": scaling, "sinks": s_aux, "layer": module.layer_idx}
    out = runtime.attention(q, k, v, kind=kind, routes=routes, **options)
    return F.pad(out, (0, 0, 0, 0, num_padding, 0))[None], None


def _true_temperature(module: Any, query: Tensor, positions: Tensor) -> Tensor:
    """Llama 4 scales the queries of layers without RoPE by their position, which it takes to be 0, 1, ... T - 1."""
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return query
    local = torch.arange(query.shape[2], device=query.device)
    true, assumed = (
        torch.log1p(torch.floor((p.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0
        for p in (positions, local)
    )
    return (query * (true.to(query.dtype) / assumed.to(query.dtype))[:, None]).to(query.dtype)


@outside_graph
def _prepare_inputs(
    model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[()], dict[str, Any]] | None:
    """Check the inputs of a forward pass against the current routes, and hand these to the attention layers."""
    config = model.config.get_text_config()
    if runtime.in_routes():
        check_follows_routes(config)
    elif config._attn_implementation != NAME:
        return None
    else:
        raise SpecError(
            f"{type(model).__name__} was called without routes: wrap the forward in `with batch.routes():`, with a "
            "batch of layerwise.hf.batches(loader); to generate text, or run it otherwise without a plan, call "
            'model.set_attn_implementation("sdpa") first'
        )
    parameters = inspect.signature(type(model).forward).parameters
    inputs = dict(zip(list(parameters)[1:], args, strict=False)) | kwargs
    inputs = {name: given for name, given in inputs.items() if given is not None}
    for name, reason in _REFUSED_INPUTS.items():
        given = inputs.get(name, 0)
        if not (isinstance(given, int) and not given):  # an empty cache is falsy, too
            raise UnsupportedError(f"{name} is refused: {reason}")
    caller = type(model).__name__
    check_ignored(caller, {name: given for name, given in inputs.items() if name not in parameters})
    routes = runtime.current_routes()
    _check_layers(layer_kinds(config), routes)
    if len(routes.places) > 1 and inputs.get("output_hidden_states", model.config.output_hidden_states):
        raise UnsupportedError(
            f"output_hidden_states is refused: this plan keeps the tokens of {sorted(routes.places)} on different "
            "ranks; leave it out, or use another strategy than redistribute"
        )
    _check_tokens(inputs, routes)
    carried = {"use_cache": False, "position_ids": positions_of_places(routes)[None], PASS: ForwardPass(routes)}
    return (), inputs | carried


@outside_graph
def _check_sites(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Raise UnsupportedError where some layer did not come by here, and mixed up samples."""
    if PASS not in kwargs:
        return
    ran = Counter(kwargs[PASS].sites)
    expected = Counter(layer_kinds(model.config.get_text_config()))
    if ran != expected:
        raise UnsupportedError(
            f"{type(model).__name__} ran {dict(ran)} of its sites under the plan and has {dict(expected)}: its "
            "layers were changed after apply(), or do not look their attention up by name in this version of "
            "transformers; docs/huggingface.md has the versions that work"
        )


def _check_layers(kinds: tuple[str, ...], routes: Routes) -> None:
    if routes.layer_types not in ((), kinds):
        raise SpecError(
            f"the plan was made for the layers {routes.layer_types}, and the model has {kinds}: make the planner with "
            "model=layerwise.hf.model_spec(model.config)"
        )


def _check_tokens(inputs: dict[str, Any], routes: Routes) -> None:
    positions = padded_positions(routes)
    tokens = inputs.get("input_ids", inputs.get("inputs_embeds"))
    if tokens is None or tuple(tokens.shape[:2]) != (1, len(positions)):
        shape = None if tokens is None else tuple(tokens.shape)
        raise SpecError(f"input_ids has shape {shape}, expected [1, local tokens] = (1, {len(positions)})")
    given = inputs.get("position_ids")
    # The loader's own tensor is recognised by its address: comparing would wait for the device.
    if given is not None and given.data_ptr() != positions.data_ptr() and not torch.equal(given.flatten(), positions):
        raise SpecError("position_ids are not the plan's: pass those of the batch, or leave them out")
