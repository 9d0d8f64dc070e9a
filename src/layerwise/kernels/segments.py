"""Which packed rows belong together: the lengths of the pieces that one attention call works on."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from layerwise.errors import SpecError


@dataclass(frozen=True)
class Segments:
    """Lengths of the segments packed in one call, in row order.

    A segment is a piece of one sample: `q_lens[i]` query rows and `k_lens[i]` key and value rows. Its queries
    are the last positions of its keys (bottom-right aligned causal, the convention of flash-attn's varlen
    kernels), so a query range of a long sample is `q_len < k_len`, and windows count true distances. It may
    have no queries.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    _on_device: dict[torch.device, tuple[Tensor, Tensor]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if len(self.q_lens) != len(self.k_lens):
            raise SpecError(f"{len(self.q_lens)} q_lens but {len(self.k_lens)} k_lens; a segment needs one of each")
        for index, (q_len, k_len) in enumerate(zip(self.q_lens, self.k_lens, strict=True)):
            if not 0 <= q_len <= k_len:
                raise SpecError(
                    f"segment {index} has {q_len} queries over {k_len} keys; every query needs its own key, "
                    "so 0 <= q_len <= k_len"
                )

    @cached_property
    def total_q(self) -> int:
        """Query rows of all segments."""
        return sum(self.q_lens)

    @cached_property
    def total_k(self) -> int:
        """Key rows of all segments."""
        return sum(self.k_lens)

    @cached_property
    def max_q(self) -> int:
        """Queries of the longest segment; 0 without segments."""
        return max(self.q_lens, default=0)

    @cached_property
    def max_k(self) -> int:
        """Keys of the longest segment; 0 without segments."""
        return max(self.k_lens, default=0)

    def cu_seqlens(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Row offsets of the segments' queries and keys, int32 [segments + 1] each; copied once."""
        if device not in self._on_device:
            offsets = [list(accumulate(lens, initial=0)) for lens in (self.q_lens, self.k_lens)]
            pinned = device.type == "cuda"  # a copy from other memory would wait for all that the GPU has to do
            with torch.inference_mode(False):  # they are kept, for a later backward, too
                host = (torch.tensor(o, dtype=torch.int32, pin_memory=pinned) for o in offsets)
                cu_q, cu_k = (o.to(device, non_blocking=True) for o in host)
            self._on_device[device] = cu_q, cu_k
        return self._on_device[device]

    @cached_property
    def with_queries(self) -> Segments:
        """The segments that have queries."""
        pairs = [(q_len, k_len) for q_len, k_len in zip(self.q_lens, self.k_lens, strict=True) if q_len]
        return Segments(tuple(q_len for q_len, _ in pairs), tuple(k_len for _, k_len in pairs))
