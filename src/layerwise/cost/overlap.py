"""What attention hides of an attention site's exchanges where the site is cut into parts that overlap."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerwise.cost.flops import BACKWARD_ATTENTION, Floats

# What is hidden is a difference of sums: a share of the exchange below this is none.
ROUNDING = 1e-12


def pipeline_waits(in_s: Floats, compute_s: Floats, out_s: Floats) -> Floats:
    """Seconds that each rank's compute is idle until its last part is done, and those after: float64 [2, num_ranks].

    in_s, compute_s, out_s: what each part takes to arrive, to be computed and to leave, float64 [parts, num_ranks].
    All parts set out at once and share the rank's link, one after another; results queue behind them:

        arrived[i] = arrived[i - 1] + in_s[i]
        computed[i] = max(computed[i - 1], arrived[i]) + compute_s[i]
        left[i] = max(left[i - 1], computed[i]) + out_s[i], where left[-1] = arrived[last]

    The idle seconds are computed[last] - sum(compute_s), the later ones left[last] - computed[last]. Neither is more
    than the sum of in_s, or of out_s, which is what one part waits.
    """
    arrived, computed, computed_at = np.cumsum(in_s, axis=0), np.zeros_like(in_s[0]), []
    for arrived_s, part_s in zip(arrived, compute_s, strict=True):
        computed = np.maximum(computed, arrived_s) + part_s
        computed_at.append(computed)
    left = arrived[-1]
    for at_s, part_s in zip(computed_at, out_s, strict=True):
        left = np.maximum(left, at_s) + part_s
    return np.stack([computed - compute_s.sum(axis=0), left - computed])


def hidden_s(
    to_tiles_s: Sequence[Floats], attention_s: Sequence[Floats], from_tiles_s: Sequence[Floats], forwards: int
) -> Floats:
    """Seconds of a site's exchanges that run beside attention of other parts, float64 [2, 2, num_ranks].

    Axes of the result: forward and backward (with the forward that is recomputed), to tiles and from tiles.
    to_tiles_s, from_tiles_s: of one pass of each part's exchange. attention_s: of each part in `forwards` forwards and
    the backward. Each has an entry per part, float64 [num_ranks]. Backward begins with the last part's output rows.
    """
    if len(attention_s) == 1:
        return np.zeros((2, 2, len(attention_s[0])))
    there, back = np.stack(to_tiles_s), np.stack(from_tiles_s)
    forward_s = np.stack(attention_s) / (forwards + BACKWARD_ATTENTION)
    forward = pipeline_waits(there, forward_s, back)
    backward = pipeline_waits(back[::-1], BACKWARD_ATTENTION * forward_s[::-1], there[::-1])
    waits, exchanges_s = np.stack([forward, backward[::-1]]), np.stack([there.sum(axis=0), back.sum(axis=0)])
    hidden = exchanges_s - waits
    hidden[hidden < ROUNDING * exchanges_s] = 0
    hidden[1] += (forwards - 1) * hidden[0]
    return np.asarray(hidden)
