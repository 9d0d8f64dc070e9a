"""The seconds of one layer's work, whoever does it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from layerwise.cost.flops import Floats
from layerwise.plan import Ints
from layerwise.spec import AttentionSpec, ClusterSpec, LayerKind


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """One layer of a kind, forward and backward.

    token_s: seconds of linear work per token. pair_s: seconds per query-key pair of one head at the full peak.
    params_s: seconds of its sharded parameters' traffic; dispatch_s: of expert dispatch, per token.
    """

    kind: LayerKind
    num_layers: int
    spec: AttentionSpec
    cluster: ClusterSpec
    token_s: float
    pair_s: float
    params_s: float
    dispatch_s: float

    def attention_s(self, pairs: Any, keys: Any, heads: Any) -> Floats:
        """Seconds of `pairs` pairs for each of `heads` query heads over `keys` keys: arrays that broadcast."""
        return np.asarray(pairs * heads * self.pair_s / self.cluster.efficiency(self.spec, keys, heads))

    def sample_s(self, lengths: Ints, degree: int = 1) -> Floats:
        """Seconds of whole samples' attention, summed over the `degree` ranks that share the heads evenly."""
        pairs = self.spec.pairs(lengths * 0, lengths)
        return degree * self.attention_s(pairs, lengths, self.spec.num_heads / degree)

    def exposed_s(self, compute_s: Floats, tokens: Floats | Ints) -> Floats:
        """Seconds of parameter and dispatch traffic that compute does not hide."""
        return np.maximum(self.params_s + self.dispatch_s * tokens - self.cluster.overlap * compute_s, 0)
