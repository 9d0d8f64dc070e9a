"""The kinds of layers, and what one kind computes: head counts, head sizes and which keys a query sees."""

from __future__ import annotations

from typing import Any, Final, Literal

import numpy as np
from pydantic import Field, model_validator

from layerwise.spec.records import Heads, Record, Tokens, Width, divisors

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
LINEAR: Final = "linear_attention"
LayerKind = Literal["full_attention", "sliding_attention", "chunked_attention", "linear_attention"]

# Tokens that the kernels of linear mixers take at once: 64 in flash-linear-attention.
LINEAR_CHUNK_TOKENS = 64


class Mixer(Record):
    """A linear mixer that runs as one module: whole samples, all heads, on one rank.

    num_weights: parameters of one layer's mixer. state_flops: forward FLOPs per token beyond two for each of them.
    """

    num_weights: int = Field(ge=1)
    state_flops: int = Field(ge=0)

    @property
    def token_flops(self) -> int:
        """Forward FLOPs of one token."""
        return 2 * self.num_weights + self.state_flops


class AttentionSpec(Record):
    """The attention of one kind of layer: head counts, head sizes and the causal mask.

    A query at position i sees the keys [first_key(i), i]. `window` counts the query's own token, as
    `sliding_window` does in Hugging Face configs; `chunk` cuts positions into blocks that do not see one another.
    `linear` is a mixer with a state instead of keys (gated delta rule): it reads whole samples in order, so heads can
    be split over ranks, but a range of queries needs every token before it. With `mixer` it is not taken apart: it is
    one head as wide as the hidden states, which travel to the rank of a sample's only tile, and back, instead of Q, K
    and V.
    """

    num_heads: Heads
    num_kv_heads: Heads
    head_dim: Width
    v_head_dim: Width
    window: Tokens | None = None
    chunk: Tokens | None = None
    linear: bool = False
    mixer: Mixer | None = None

    @model_validator(mode="after")
    def _check(self) -> AttentionSpec:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}; "
                f"legal num_kv_heads: {divisors(self.num_heads)}"
            )
        if sum((self.window is not None, self.chunk is not None, self.linear)) > 1:
            raise ValueError("a layer kind has one of window, chunk and linear, or none of them")
        if self.mixer and not (self.linear and self.num_heads == 1 and self.head_dim == self.v_head_dim):
            raise ValueError("a mixer is linear, and one head with head_dim = v_head_dim = the hidden size")
        return self

    @property
    def is_full(self) -> bool:
        """Whether every query sees all earlier keys, so that the work of a token grows with its position."""
        return self.window is None and self.chunk is None and not self.linear

    @property
    def is_local(self) -> bool:
        """Whether a query sees only keys near it: a window or a chunk."""
        return self.window is not None or self.chunk is not None

    @property
    def reach(self) -> int | None:
        """Most keys that a query sees; None where there is no limit."""
        return self.window or self.chunk

    @property
    def queries_per_kv(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def linear_pairs(self) -> int:
        """Query-key pairs that cost as many FLOPs as one token of one head of a linear mixer, rounded up.

        Chunkwise gated delta rule (arXiv 2406.06484, 2412.06464): docs/cost-model.md counts its products. A mixer in
        one piece brings its own count, projections included.
        """
        if self.mixer:
            return -(-self.mixer.token_flops // (2 * (self.head_dim + self.v_head_dim)))
        products = LINEAR_CHUNK_TOKENS * (3 * self.head_dim + 2 * self.v_head_dim) + 6 * self.head_dim * self.v_head_dim
        return -(-products // (2 * (self.head_dim + self.v_head_dim)))

    def first_key(self, q: Any) -> Any:
        """Position of the first key that a query at position q sees; an int or an int64 array of q's shape."""
        if self.window is not None:
            return np.maximum(q - self.window + 1, 0)
        if self.chunk is not None:
            return q // self.chunk * self.chunk
        return q * 0

    def pairs(self, q0: Any, q1: Any) -> Any:
        """Query-key pairs that the mask allows for queries [q0, q1) of one head; ints or int64 arrays.

        Of a linear mixer, what costs as much: all tokens up to q1, whose states the range needs.
        """
        if self.linear:
            return q1 * (q1 > q0) * self.linear_pairs
        return self._pairs_before(q1) - self._pairs_before(q0)

    def _pairs_before(self, n: Any) -> Any:
        if self.window is not None:
            ramp = np.minimum(n, self.window)
            return ramp * (ramp + 1) // 2 + (n - ramp) * self.window
        if self.chunk is not None:
            whole, rest = n // self.chunk, n % self.chunk
            return whole * (self.chunk * (self.chunk + 1) // 2) + rest * (rest + 1) // 2
        return n * (n + 1) // 2

    def kv_range(self, h0: Any, h1: Any) -> tuple[Any, Any]:
        """KV heads [k0, k1) that the query heads [h0, h1) read."""
        return h0 // self.queries_per_kv, -(-h1 // self.queries_per_kv)
