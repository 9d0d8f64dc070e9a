"""Linear-attention, state-space and convolution mixers, which need their samples whole and in order.

Such a mixer does not look anything up by name, so `wrap_mixers` puts a function of ours before its `forward`: hidden
states travel to the rank of the sample's tile, the mixer runs there on one sample at a time, as it is and without
padding, and its output travels back; one exchange each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.errors import UnsupportedError
from layerwise.exchange import exchange, outside_graph
from layerwise.hf.calls import NAME, is_empty, routes_of_call
from layerwise.hf.families import MIXERS
from layerwise.hf.spec import decoder_layers
from layerwise.runtime import Routes
from layerwise.spec import LINEAR


def wrap_mixers(model: Any) -> None:
    """Let the mixers of the model's linear layers follow routes. Raises UnsupportedError where they are not found."""
    config = model.config.get_text_config()
    for index, (kind, layer) in enumerate(decoder_layers(model)):
        if kind != LINEAR:
            continue
        mixer = getattr(layer, MIXERS[config.model_type], None)
        if mixer is None:
            raise UnsupportedError(
                f"{config.model_type}: a linear layer has no module {MIXERS[config.model_type]!r} in this version of "
                "transformers, so its samples would be mixed up; docs/huggingface.md has the versions that work"
            )
        if not isinstance(mixer.forward, WholeSamples):
            mixer.forward = WholeSamples(mixer.forward, index, config)


class WholeSamples:
    """A mixer's `forward` with the plan around it: hidden_states [1, T, C] to [1, T, C], of this rank's tokens."""

    def __init__(self, forward: Callable[..., Tensor], layer: int, config: Any) -> None:
        self.forward, self.layer, self.config = forward, layer, config

    def __call__(self, hidden_states: Tensor, **others: Any) -> Tensor:
        if self.config._attn_implementation != NAME:
            return self.forward(hidden_states, **others)
        routes = routes_of_call("linear mixer", LINEAR, others)
        num_padding = int(is_empty(routes, LINEAR))
        out = mix(hidden_states[0, num_padding:], self.forward, self.layer, routes)
        return F.pad(out, (0, 0, num_padding, 0))[None]


@outside_graph
def mix(hidden: Tensor, mixer: Callable[[Tensor], Tensor], layer: int, routes: Routes) -> Tensor:
    """The mixer's output for this rank's tokens, [T, C] to [T, C], computed sample by sample wherever the plan says.

    A rank without samples runs the mixer on one token of zeros, so that its parameters get gradients, of zeros.
    """
    route = routes.by_kind[LINEAR]
    routes.world.progress.enter_layer(routes.microbatch, layer)
    site = routes.site(LINEAR, routes.world.comm(route.block))
    (rows,) = exchange((hidden,), route.to_tiles[:1], site)
    lengths = [length for call in route.calls for length in call.segments.q_lens]
    if lengths:
        out = torch.cat([mixer(sample[None])[0] for sample in rows.split(lengths)])
    else:
        out = mixer(F.pad(rows, (0, 0, 0, 1))[None])[0, :0]
    (local,) = exchange((out,), route.from_tiles, site)
    return local
