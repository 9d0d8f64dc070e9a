"""Mixture of experts on local tokens: a top-k router, stacked SwiGLU experts and an optional shared one.

With expert parallelism the ranks of a block share the experts of a layer out among them. Routed rows go to the rank
that holds their expert and come back in one exchange each way, of as many rows as there are.

Shapes: T local tokens, C hidden size, E experts, F expert width, k experts per token, R = T * k routed rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.profiler import record_function
from torch.distributed.tensor import DTensor

from layerwise.exchange import Comm, all_to_all, exchange
from layerwise.route import RowMap, listed_side
from layerwise.runtime import current_routes
from layerwise.spec import ModelSpec

# The meter's name for routed rows that change ranks, beside the layer kinds.
EXPERTS = "experts"


@dataclass(frozen=True, kw_only=True)
class RouterStats:
    """What a balance loss needs, summed over the tokens of each piece (each sample that this rank holds tokens of).

    counts: int64 [pieces, E], tokens that chose each expert.
    prob_sums: float32 or float64 [pieces, E], sums of router probabilities, differentiable.
    Those of a whole model have the MoE layers as a further, first dim.
    """

    counts: Tensor
    prob_sums: Tensor


class SwiGLU(nn.Module):
    """down(silu(gate) * up), [T, C] -> [T, C]."""

    def __init__(self, hidden_size: int, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden_size, 2 * width, bias=False, dtype=dtype)
        self.down = nn.Linear(width, hidden_size, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down(gated(self.gate_up(x)))
        return output


class MoE(nn.Module):
    """Top-k experts per token, weighted by softmax over all experts and then renormalised over the chosen."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = spec.hidden_size
        self.experts_per_token = spec.experts_per_token
        self.experts = Experts(spec, dtype)
        self.router = nn.Linear(hidden, spec.num_experts, bias=False, dtype=dtype)
        self.shared = SwiGLU(hidden, spec.shared_intermediate_size, dtype) if spec.shared_intermediate_size else None

    def forward(self, x: Tensor, piece_index: Tensor, num_pieces: int) -> tuple[Tensor, RouterStats]:
        """x [T, C], piece_index int64 [T] in [0, num_pieces) -> [T, C] and the router's sums per piece."""
        with record_function("layerwise.moe"):
            probs = self._route(x)
            weights, experts = probs.topk(self.experts_per_token, dim=-1)
            weights = weights / weights.sum(dim=-1, keepdim=True)
            output = self._run_experts(x, experts, weights)
            if self.shared is not None:
                output = output + self.shared(x)
            return output, _sum_per_piece(probs, experts, piece_index, num_pieces)

    def _route(self, x: Tensor) -> Tensor:
        """Probabilities [T, E]; never in half precision, where near ties would depend on rounding."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(x.to(wide), self.router.weight.to(wide)).softmax(dim=-1)

    def _run_experts(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        num_chosen = experts.shape[1]
        order = experts.flatten().argsort(stable=True)
        counts = _count(experts.flatten(), self.experts.num_experts)
        rows = self.experts(x.index_select(0, order // num_chosen), counts)
        rows = rows.index_select(0, order.argsort())
        return (rows.view(len(x), num_chosen, x.shape[1]) * weights.to(x.dtype).unsqueeze(-1)).sum(dim=1)


class Experts(nn.Module):
    """SwiGLU experts of one layer: all of them, or with a comm of n ranks this rank's n-th part.

    gate_up: [E, C, 2 * F], down: [E, F, C], or DTensors of these whose local part has E / n experts.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        super().__init__()
        num_experts, hidden, width = spec.num_experts, spec.hidden_size, spec.moe_intermediate_size
        self.num_experts = num_experts
        self.gate_up = nn.Parameter(torch.empty(num_experts, hidden, 2 * width, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden, dtype=dtype))
        self.comm: Comm | None = None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """rows [R, C], by expert; counts int64 [E], how many each has -> [R, C]."""
        if self.comm is None:
            return self._run(rows, counts)
        there, local_counts = _to_experts(counts, self.comm)
        site = current_routes().site(EXPERTS, self.comm)
        (local_rows,) = exchange((rows,), (there,), site)
        (back,) = exchange((self._run(local_rows, local_counts),), (there.inverse(),), site)
        return back

    def _run(self, rows: Tensor, counts: Tensor) -> Tensor:
        gate_up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.gate_up, self.down))
        rows = grouped_matmul(rows, gate_up.to(rows.dtype), counts)
        return grouped_matmul(gated(rows), down.to(rows.dtype), counts)


def _to_experts(counts: Tensor, comm: Comm) -> tuple[RowMap, Tensor]:
    """The way of rows by expert, counts int64 [E], to the ranks of their experts; rows per local expert, int64 [E / n].

    Rows arrive by sender and are stored by expert. The host needs the counts, which stalls a GPU once per layer.
    """
    num_peers = comm.block.size
    num_local = len(counts) // num_peers
    splits = [num_local] * num_peers
    arriving = all_to_all(comm, counts.contiguous(), splits, splits).view(num_peers, num_local)
    leaving = counts.view(num_peers, num_local).sum(1)
    send, receive = torch.stack([leaving, arriving.sum(1)]).tolist()
    local_experts = torch.arange(num_local, device=counts.device).repeat(num_peers)
    expert_of_row = local_experts.repeat_interleave(arriving.flatten(), output_size=sum(receive))
    stored_at = expert_of_row.argsort(stable=True).argsort()
    src = listed_side(torch.arange(sum(send), device=counts.device), tuple(send), sum(send), once=True)
    return RowMap(src, listed_side(stored_at, tuple(receive), sum(receive), once=True)), arriving.sum(0)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up, [..., 2 * F] -> [..., F]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def grouped_matmul(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Multiply runs of rows by their own matrices: rows [R, C], weight [E, C, F], counts int64 [E] -> [R, F].

    The first counts[0] rows belong to weight[0], and so on. An expert without rows gets a zero gradient.
    """
    if _has_grouped_kernel(rows, weight):
        return F.grouped_mm(rows, weight, offs=counts.cumsum(0).to(torch.int32))
    # The host needs the counts here, which stalls a GPU: only dtypes without a grouped kernel pay for it.
    parts = zip(rows.split(counts.tolist()), weight, strict=True)
    return torch.cat([part @ matrix for part, matrix in parts])


def _has_grouped_kernel(rows: Tensor, weight: Tensor) -> bool:
    """The kernel takes bfloat16, on CPU also float32 and float16, with rows of a multiple of 16 bytes."""
    dtypes = {torch.bfloat16} | ({torch.float32, torch.float16} if rows.device.type == "cpu" else set())
    aligned = all(dim * rows.element_size() % 16 == 0 for dim in weight.shape[1:])
    return hasattr(F, "grouped_mm") and rows.dtype in dtypes and aligned


def _count(ids: Tensor, num_ids: int) -> Tensor:
    # Not torch.bincount, which copies the largest id to the host.
    return torch.zeros(num_ids, dtype=torch.int64, device=ids.device).scatter_add_(0, ids, torch.ones_like(ids))


def _sum_per_piece(probs: Tensor, experts: Tensor, piece_index: Tensor, num_pieces: int) -> RouterStats:
    num_experts = probs.shape[1]
    counts = _count((piece_index.unsqueeze(-1) * num_experts + experts).flatten(), num_pieces * num_experts)
    prob_sums = probs.new_zeros(num_pieces, num_experts).index_add(0, piece_index, probs)
    return RouterStats(counts=counts.view(num_pieces, num_experts), prob_sums=prob_sums)
