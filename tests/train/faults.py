"""The command line with a fault at one point of a training: python -m tests.train.faults FAULT train ...

FAULT: WHAT:RANK:STEP:MICROBATCH:LAYER, where WHAT is one of `FAULTS`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.cli import main
from layerwise.exchange import Point, Progress, collective, waiting
from layerwise.groups import World
from layerwise.kernels import sdpa
from layerwise.plan import MicrobatchPlan, StepPlan, Tile, tile_table
from layerwise.planners import Planner
from layerwise.runtime import current_routes
from layerwise.traffic import Block
from layerwise.train import checkpoint, launch, loop


@dataclass(frozen=True)
class Fault:
    """What happens, and to whom and when."""

    what: str
    rank: int
    step: int
    microbatch: int
    layer: int

    @classmethod
    def parse(cls, text: str) -> Fault:
        what, *numbers = text.split(":")
        return cls(what, *map(int, numbers))

    def is_at(self, rank: int, progress: Progress, layer: int, microbatch: int | None) -> bool:
        here = (rank, progress.step, microbatch, layer)
        return here == (self.rank, self.step, self.microbatch, self.layer)


def in_exchange(fault: Fault) -> None:
    """The rank has sent its rows and waits for those of the others."""

    @contextmanager
    def faulty(progress: Progress, rank: int, block: Block) -> Iterator[None]:
        at = progress.at
        if isinstance(at, Point) and fault.is_at(rank, progress, at.layer, at.microbatch):
            {"die": die, "stop": stop, "sleep": sleep}[fault.what]()
        with waiting(progress, rank, block):
            yield

    collective.waiting = faulty


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(1000)


def nan_in_attention(fault: Fault) -> None:
    """One number that the kernel makes is NaN."""
    kernel = sdpa.sdpa_attention

    def faulty(*args: Any) -> Tensor:
        out, world = kernel(*args), current_routes().world
        if fault.is_at(world.rank, world.progress, world.progress.layer, world.progress.microbatch):
            out = out.clone()
            out[-1, 0] = float("nan")
        return out

    sdpa.sdpa_attention = faulty


def nan_in_backward(fault: Fault) -> None:
    """The gradient of what the kernel makes is NaN; all that is forward is finite."""
    kernel = sdpa.sdpa_attention

    def faulty(*args: Any) -> Tensor:
        out, world = kernel(*args), current_routes().world
        is_here = fault.is_at(world.rank, world.progress, world.progress.layer, world.progress.microbatch)
        if is_here and out.requires_grad:
            out.register_hook(lambda grad: grad * float("nan"))
        return out

    sdpa.sdpa_attention = faulty


def bad_gradient(fault: Fault) -> None:
    """The gradient of a weight, and of nothing else, is NaN, or large enough that its square is infinite."""
    build, factor = loop.build_model, {"nan_weight": float("nan"), "huge_weight": 1e200}[fault.what]

    def faulty(config: Any, world: World, device: Any) -> Any:
        model = build(config, world, device)

        def spoil(grad: Tensor) -> Tensor:
            return grad * factor if (world.rank, world.progress.step) == (fault.rank, fault.step) else grad

        model.get_parameter("layers.1.attention.o_proj.weight").register_hook(spoil)
        return model

    loop.build_model = faulty


def another_plan(fault: Fault) -> None:
    """A valid plan, but neighbours compute one another's tiles of sliding layers."""
    plan_step, step = Planner.__call__, [0]

    def faulty(self: Planner, lengths: Sequence[int]) -> StepPlan:
        plan = plan_step(self, lengths)
        step[0] += dist.is_initialized()
        return swapped(plan, fault.microbatch) if step[0] > fault.step and dist.get_rank() == fault.rank else plan

    Planner.__call__ = faulty


def swapped(plan: StepPlan, index: int) -> StepPlan:
    microbatch: MicrobatchPlan = plan.microbatches[index]
    tiles = [Tile(*tile)._replace(rank=tile.rank ^ 1) for tile in microbatch.tiles["sliding_attention"]]
    changed = replace(microbatch, tiles=microbatch.tiles | {"sliding_attention": tile_table(tiles)})
    return replace(plan, microbatches=(*plan.microbatches[:index], changed, *plan.microbatches[index + 1 :]))


def in_optimizer(fault: Fault) -> None:
    """The rank ends by itself, as nobody expects."""
    take_step = torch.optim.AdamW.step

    def faulty(self: torch.optim.AdamW, *args: Any, **kwargs: Any) -> Any:
        taken = {int(state["step"]) for state in self.state.values()} or {0}
        if dist.get_rank() == fault.rank and taken == {fault.step}:
            {"leave": lambda: os._exit(0), "exit": lambda: sys.exit(0)}[fault.what]()
        return take_step(self, *args, **kwargs)

    torch.optim.AdamW.step = faulty


def in_save(fault: Fault) -> None:
    """The rank stops where it writes its part of a checkpoint."""
    write = checkpoint._Writer.write_data

    def faulty(self: Any, *args: Any) -> Any:
        if dist.get_rank() == fault.rank:
            stop()
        return write(self, *args)

    checkpoint._Writer.write_data = faulty


def other_settings(fault: Fault) -> None:
    """The rank has read another config file."""
    compare = loop.agree_on_settings

    def faulty(settings: dict[str, Any], world: World) -> None:
        compare(settings | ({"seed": 7} if world.rank == fault.rank else {}), world)

    loop.agree_on_settings = faulty


def in_build(fault: Fault) -> None:
    """The rank hangs where it makes its model."""
    build = loop.build_model

    def faulty(config: Any, world: World, device: Any) -> Any:
        if world.rank == fault.rank:
            sleep()
        return build(config, world, device)

    loop.build_model = faulty


def wrong_argument(fault: Fault) -> None:
    """The rank, or with -1 every rank, has a setting that does not exist."""
    if fault.rank in (-1, int(os.environ["RANK"])):
        sys.argv += ["--set", "nonsense=1"]


def absent(fault: Fault) -> None:
    """The rank is started, but does not come to where all ranks meet."""
    meet = launch.meet

    def faulty(store: dist.Store, rank: int, num_ranks: int, timeout_s: float) -> str:
        if rank == fault.rank:
            sleep()
        return meet(store, rank, num_ranks, timeout_s)

    launch.meet = faulty


FAULTS = {
    **dict.fromkeys(("die", "stop", "sleep"), in_exchange),
    "nan": nan_in_attention,
    "nan_back": nan_in_backward,
    **dict.fromkeys(("nan_weight", "huge_weight"), bad_gradient),
    **dict.fromkeys(("leave", "exit"), in_optimizer),
    "save": in_save,
    "settings": other_settings,
    "build": in_build,
    "plan": another_plan,
    "absent": absent,
    "argument": wrong_argument,
}

if __name__ == "__main__":
    chosen = Fault.parse(sys.argv.pop(1))
    FAULTS[chosen.what](chosen)
    main()
