"""A calibration from start to file, on ranks of its own or on those that torchrun started."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from layerwise.calibrate.effort import EFFORTS
from layerwise.calibrate.kernels import AttentionRates, Probe, measure_attention, measure_linear
from layerwise.calibrate.links import measure_fast, measure_slow, spans_hosts
from layerwise.calibrate.preset import Measurements, preset_text
from layerwise.errors import SpecError
from layerwise.files import write_whole
from layerwise.groups import World
from layerwise.spec import FULL, ModelSpec
from layerwise.train.launch import launch

# The ratio of the links that the Layerwise Repacking paper states, for machines that have one kind of link only.
DEFAULT_RATIO = 7.0
TIMEOUT_S = 300.0


@dataclass(frozen=True, kw_only=True)
class CalibrateOptions:
    """What to measure and what is known already.

    model: whose shapes the kernels have. ratio: of the fast to the slow rate, where nodes are parts of one machine.
    peak_flops_per_s: of one rank, from its data sheet.
    """

    num_nodes: int
    ranks_per_node: int
    model: ModelSpec
    ratio: float | None = None
    peak_flops_per_s: float | None = None
    device: str = "auto"
    quick: bool = False


def calibrate(options: CalibrateOptions, out: Path) -> None:
    """Measure on all ranks, then write the preset to `out` from rank 0; under torchrun every rank calls this.

    Raises SpecError for options that do not fit the machine, DataError for measurements that make no sense.
    """

    def rank_main(world: World, device: torch.device) -> None:
        found = measure(options, world, device)
        if world.rank == 0:
            text = preset_text(
                found,
                name=out.stem,
                ratio=options.ratio or DEFAULT_RATIO,
                peak_flops_per_s=options.peak_flops_per_s,
            )
            write_whole(out, text, "--out")

    launch(
        rank_main,
        num_ranks=options.num_nodes * options.ranks_per_node,
        ranks_per_node=options.ranks_per_node,
        device=options.device,
        timeout_s=TIMEOUT_S,
    )


def measure(options: CalibrateOptions, world: World, device: torch.device) -> Measurements:
    """Everything, on every rank at the same time; all ranks return the same.

    Raises SpecError where the slow link can be measured and a ratio is given all the same.
    """
    several_hosts = spans_hosts(world)
    if several_hosts and options.ratio is not None:
        raise SpecError(
            f"--ratio {options.ratio:g} has no effect: nodes are machines of their own, so both links are measured"
        )
    effort = EFFORTS[device.type, options.quick]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    probe = Probe(device=device, dtype=dtype, effort=effort)
    windowed = [spec for spec in map(options.model.attention, options.model.kinds) if spec.window or spec.chunk]
    fast = measure_fast(world, effort, device)
    slow = measure_slow(world, effort, device) if several_hosts else None
    full = options.model.attention(FULL)
    return Measurements(
        num_nodes=options.num_nodes,
        ranks_per_node=options.ranks_per_node,
        where=_describe(world, device, dtype),
        model=options.model.name,
        element_bytes=dtype.itemsize,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None,
        fast=fast,
        slow=slow,
        linear_flops_per_s=_typical(world, [measure_linear(options.model, probe)])[0],
        full=_typical_table(world, measure_attention(full, probe)),
        windowed=_typical_table(world, measure_attention(windowed[0], probe)) if windowed else None,
    )


def _typical(world: World, rates: list[float]) -> list[float]:
    """The median over ranks of each rate."""
    return np.median(world.gather_ints([round(rate) for rate in rates]), axis=0).tolist()


def _typical_table(world: World, rates: AttentionRates) -> AttentionRates:
    flat = _typical(world, [rate for row in rates.flops_per_s for rate in row])
    width = len(rates.heads)
    rows = tuple(tuple(flat[lo : lo + width]) for lo in range(0, len(flat), width))
    return AttentionRates(lengths=rates.lengths, heads=rates.heads, flops_per_s=rows)


def _describe(world: World, device: torch.device, dtype: torch.dtype) -> str:
    chip = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})"
    return f"{world.num_ranks} ranks, {chip}, {str(dtype).removeprefix('torch.')}, torch {torch.__version__}"
