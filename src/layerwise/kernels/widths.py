"""Kernels that need one head dim for Q, K and V get zero columns where a model's dims differ."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def widen(q: Tensor, k: Tensor, v: Tensor, multiple_of: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Append zeros to the last dim until all three share one, a multiple of `multiple_of`.

    Zeros add nothing to a score, and outputs beyond v's own head dim are zero: the caller cuts them off. The
    scale of the scores must already be fixed, since kernels take it from the widened head dim.
    """
    width = -(-max(q.shape[-1], v.shape[-1]) // multiple_of) * multiple_of
    q, k, v = (x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in (q, k, v))
    return q, k, v
