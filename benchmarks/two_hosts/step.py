"""One step of one plan on one rank: paced compute around the exchanges of the real runtime, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.two_hosts.clocks import TimedMeter, TimedWorld
from benchmarks.two_hosts.meeting import MeetingPoint
from benchmarks.two_hosts.pacing import Edge, PacedAttention, Pacer
from layerwise.cost import BACKWARD_LINEAR, CostModel
from layerwise.errors import PlanError
from layerwise.groups import World
from layerwise.plan import HOME, StepPlan
from layerwise.runtime import Routes, agree, attention, build_routes, relocate


@dataclass(frozen=True, kw_only=True, eq=False)
class PacedMicrobatch:
    """What one rank needs for one micro-batch. Seconds are forward; hidden, grad: [T, hidden_size], at home."""

    routes: Routes
    linear_s: dict[str, float]
    head_s: float
    hidden: Tensor
    grad: Tensor


class Rank:
    """One rank: its world, meter and pacer, and where it meets the others."""

    def __init__(self, world: World, cost: CostModel, meeting_point: MeetingPoint) -> None:
        self.cost, self.meeting_point = cost, meeting_point
        self.pacer = Pacer()
        self.meter = TimedMeter(world.ranks_per_node)
        self.world = TimedWorld(world, self.meter, partial(self.pacer.free_at, None))
        self.kernel = PacedAttention(cost, self.pacer)

    def meet(self) -> float:
        """Wait for all ranks; seconds at which the last one came."""
        at_s = self.meeting_point.meet()
        self.pacer.free_at(at_s)
        return at_s

    def prepare(self, plan: StepPlan) -> list[PacedMicrobatch]:
        """Agree on the plan, and build its routes and inputs: everything that a trainer does ahead of the step."""
        agree(plan, self.world, num_valid_tokens=0)
        return [self._prepare(plan, index) for index in range(len(plan.microbatches))]

    def _prepare(self, plan: StepPlan, index: int) -> PacedMicrobatch:
        rank, microbatch = self.world.rank, plan.microbatches[index]
        times = self.cost.layer_times(microbatch)
        num_tokens = int(microbatch.tokens_per_rank(plan.num_ranks)[rank])
        hidden, grad = torch.randn(2, num_tokens, self.cost.model.hidden_size)
        return PacedMicrobatch(
            routes=build_routes(plan, index, self.world, meter=self.meter, backend=self.kernel),
            linear_s={kind: float(t.linear_s[rank]) / (1 + BACKWARD_LINEAR) for kind, t in times.items()},
            head_s=self.cost.head_token_s * num_tokens / (1 + BACKWARD_LINEAR),
            hidden=hidden.requires_grad_(),
            grad=grad,
        )

    def run(self, microbatches: list[PacedMicrobatch]) -> tuple[float, float]:
        """The step; seconds at which all ranks began and at which the last one ended.

        Raises PlanError where a row did not come back as it left: the kernel hands on its queries.
        """
        begin_s = self.meet()
        for part in microbatches:
            part.hidden.grad = None
            out = self._forward(part)
            out.backward(part.grad)
            assert part.hidden.grad is not None
            if not (torch.equal(out, part.hidden) and torch.equal(part.hidden.grad, part.grad)):
                raise PlanError(f"rank {self.world.rank}: hidden states or their gradients did not come back unchanged")
        return begin_s, self.meet()

    def _forward(self, part: PacedMicrobatch) -> Tensor:
        hidden, place = part.hidden, HOME
        for kind in (*self.cost.model.all_layer_types, HOME):
            if part.routes.place_of(place) != part.routes.place_of(kind):
                move = partial(relocate, source=place, target=kind, routes=part.routes)
                hidden = self._site(hidden, move, 0.0)
            if kind != HOME:
                hidden = self._site(hidden, partial(self._attend, kind, part.routes), part.linear_s[kind])
            place = kind
        return self._site(hidden, lambda x: x, part.head_s)

    def _site(self, hidden: Tensor, exchanges: Callable[[Tensor], Tensor], forward_s: float) -> Tensor:
        """`exchanges`, then linear work; ranks wait for the slowest at the end of the forward and of the backward."""
        hidden = Edge.apply(hidden, lambda: None, self._end)
        hidden = exchanges(hidden)
        return Edge.apply(hidden, partial(self._end, forward_s), partial(self.pacer.spend, BACKWARD_LINEAR * forward_s))

    def _end(self, linear_s: float = 0.0) -> None:
        self.pacer.spend(linear_s)
        self.meet()

    def _attend(self, kind: str, routes: Routes, hidden: Tensor) -> Tensor:
        """Attention without projections: a hidden state is its token's query heads, and the first of them its keys."""
        spec = routes.attention[kind]
        q = hidden.view(len(hidden), spec.num_heads, spec.head_dim)
        k, v = q[:, : spec.num_kv_heads], q[:, spec.num_heads - spec.num_kv_heads :]
        return attention(q, k, v, kind=kind, routes=routes).flatten(1)
