"""What torchrun starts on every host, once per rank; rank 0 writes the results."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from benchmarks.two_hosts.clocks import Call, messages_between_hosts, spent_by_kind
from benchmarks.two_hosts.hosts import DEVICE
from benchmarks.two_hosts.links import Links, adjust, measure_links
from benchmarks.two_hosts.meeting import meeting_point
from benchmarks.two_hosts.records import Predicted, Results, Run, Settings, Variant
from benchmarks.two_hosts.shaping import LOOPBACK, Sent, read_sent, shape
from benchmarks.two_hosts.step import PacedMicrobatch, Rank
from benchmarks.two_hosts.workload import (
    MODEL,
    RANKS_PER_HOST,
    SLOW_BYTES_PER_S,
    cluster_of,
    planner_of,
    step_lengths,
    wanted_links,
)
from layerwise.cost import CostModel
from layerwise.errors import LayerwiseError
from layerwise.exchange import all_to_all
from layerwise.files import write_whole
from layerwise.groups import ProcessWorld, World
from layerwise.plan import StepPlan
from layerwise.runtime import MOVES
from layerwise.spec import ClusterSpec
from layerwise.traffic import Block

TIMEOUT_S = 120
RATIO_TOLERANCE = 0.03
OVERHEAD_CALLS = 20
# Compute of the repetition that is not measured: groups connect, memory is touched, rows are seen to come back.
WARM_UP_SPEED = 100.0

Key = tuple[Variant, int]  # and a step


@record
def main() -> None:
    """Run the bench that the settings in the file sys.argv[1] describe."""
    settings = Settings.model_validate_json(Path(sys.argv[1]).read_text())
    torch.set_num_threads(1)
    gc.disable()  # a pause of one rank would be waited for by all
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    try:
        results = run_bench(settings, ProcessWorld(RANKS_PER_HOST))
        if results is not None:
            write_whole(settings.results_path, results.model_dump_json(), "results")
        dist.barrier()
    except LayerwiseError as error:
        settings.failure_path.write_text(f"{type(error).__name__}: {error}")
        raise
    finally:
        dist.destroy_process_group()


def run_bench(settings: Settings, world: World) -> Results | None:
    """The whole bench; the results on rank 0."""
    links = set_links(settings, world)
    say(world, f"links of a rank: {links.describe()}")
    overhead_bytes = measure_overhead(world)
    wanted = cluster_of(settings.num_hosts, wanted_links(settings.ratio))
    plans = make_plans(settings, world, wanted)
    with meeting_point(settings.meeting_path) as point:
        rank = Rank(world, CostModel(cluster=wanted, model=MODEL), point)
        runs = measure_all(settings, rank, plans)
    late_s = gather(world, rank.pacer.late_s)
    links_after = measure_links(world, wanted_links(settings.ratio))
    if world.rank != 0:
        return None
    lengths = [step_lengths(settings.num_hosts, step) for step in range(settings.num_steps)]
    return Results(
        settings=settings,
        links=links,
        links_after=links_after,
        message_overhead_bytes=overhead_bytes,
        samples=[len(tokens) for tokens in lengths],
        tokens=[int(tokens.sum()) for tokens in lengths],
        longest_tokens=[int(tokens.max()) for tokens in lengths],
        predicted=predict(plans, cluster_of(settings.num_hosts, links)),
        runs=runs,
        lateness_s={f"p{p}": float(np.percentile(np.concatenate(late_s), p)) for p in (50, 99)},
    )


def measure_all(settings: Settings, rank: Rank, plans: dict[Key, StepPlan]) -> list[Run]:
    """Every step of every variant in every repetition, after one that is not measured; empty but on rank 0."""
    prepared = {key: rank.prepare(plan) for key, plan in plans.items()}
    runs: list[Run] = []
    for repetition in range(-1, settings.repetitions):
        keys = order(plans, repetition)
        rank.pacer.speed = 1.0 if repetition >= 0 else WARM_UP_SPEED
        if repetition == 0:
            rank.pacer.late_s.clear()
        measured = gather(rank.world, [measure(rank, prepared[key]) for key in keys])
        if repetition >= 0 and measured:
            runs += to_runs(keys, repetition, measured)
        done = f"repetition {repetition + 1} of {settings.repetitions}" if repetition >= 0 else "warm-up"
        say(rank.world, f"{done} done")
    return runs


def say(world: World, text: str) -> None:
    """Progress, from rank 0."""
    if world.rank == 0:
        print(text, flush=True)


def gather(world: World, value: Any) -> list[Any]:
    """Every rank's value on rank 0, by rank; empty elsewhere."""
    values = [None] * world.num_ranks if world.rank == 0 else None
    dist.gather_object(value, values)
    return values or []


def set_links(settings: Settings, world: World) -> Links:
    """Shape both links of all hosts until the wanted ratio is measured."""
    if is_first_on_host():
        shape(LOOPBACK, settings.ratio * SLOW_BYTES_PER_S * RANKS_PER_HOST)

    def set_slow(bytes_per_s: float) -> None:
        if is_first_on_host():
            shape(DEVICE, bytes_per_s)
        dist.barrier()

    start = SLOW_BYTES_PER_S * RANKS_PER_HOST
    return adjust(
        partial(measure_links, world, wanted_links(settings.ratio)), set_slow, start, settings.ratio, RATIO_TOLERANCE
    )


def measure_overhead(world: World) -> float:
    """Bytes that gloo sends of its own for each message between hosts: its headers, and its notes that it is ready."""
    comm, splits = world.comm(Block(0, world.num_ranks)), [1] * world.num_ranks
    assert comm is not None
    dist.barrier()
    before = read_sent()
    dist.barrier()
    for _ in range(OVERHEAD_CALLS):
        all_to_all(comm, torch.zeros(world.num_ranks, dtype=torch.uint8), splits, splits)
    dist.barrier()
    sent = read_sent().since(before).payload_bytes
    messages = OVERHEAD_CALLS * RANKS_PER_HOST * (world.num_ranks - RANKS_PER_HOST)
    return max(row[0] for row in world.gather_ints([sent])) / messages - 1


def is_first_on_host() -> bool:
    """Whether this rank acts for its host."""
    return os.environ["LOCAL_RANK"] == "0"


def make_plans(settings: Settings, world: World, cluster: ClusterSpec) -> dict[Key, StepPlan]:
    """The plan of every variant and step; each rank makes some, and all get all."""
    keys = [(strategy, step) for strategy in settings.strategies for step in range(settings.num_steps)]
    mine = {
        (strategy, step): planner_of(strategy, cluster)(step_lengths(settings.num_hosts, step))
        for strategy, step in keys[world.rank :: world.num_ranks]
    }
    made: list[dict[tuple[str, int], StepPlan]] = [{} for _ in range(world.num_ranks)]
    dist.all_gather_object(made, mine)
    plans = {key: plan for part in made for key, plan in part.items()}
    steps = range(settings.num_steps)
    return {
        (variant, step): replace(plans[variant.strategy, step], overlap_parts=variant.overlap_parts)
        for variant in settings.variants
        for step in steps
    }


def order(plans: dict[Key, StepPlan], repetition: int) -> list[Key]:
    """All variants and steps, in another order in each repetition."""
    keys = list(plans)
    return [keys[i] for i in np.random.default_rng(repetition + 1).permutation(len(keys))]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One step on one rank. sent: by the host's interface, on the first rank of the host, else nothing."""

    seconds: float
    calls: list[Call]
    counted_bytes: int
    sent: Sent


def measure(rank: Rank, microbatches: list[PacedMicrobatch]) -> Measured:
    """Run one step; nothing but its exchanges uses the links meanwhile."""
    gc.collect()
    rank.meter.counts.clear()
    rank.meter.calls = []
    rank.meet()
    before = read_sent()
    rank.meet()
    begin_s, end_s = rank.run(microbatches)
    sent = read_sent().since(before)
    return Measured(
        seconds=end_s - begin_s,
        calls=rank.meter.calls,
        counted_bytes=sum(count.slow_bytes for count in rank.meter.counts.values()),
        sent=sent if is_first_on_host() else Sent(wire_bytes=0, packets=0),
    )


def to_runs(keys: list[Key], repetition: int, measured: list[list[Measured]]) -> Iterator[Run]:
    """The steps of one repetition from what every rank measured, `measured[rank][step]`."""
    for (variant, step), ranks in zip(keys, zip(*measured, strict=True), strict=True):
        spent = spent_by_kind([rank.calls for rank in ranks])
        kinds = sorted({kind for by_kind in spent for kind in by_kind})
        seconds = {kind: [by_kind.get(kind, (0.0, 0.0)) for by_kind in spent] for kind in kinds}
        yield Run(
            strategy=variant.name,
            step=step,
            repetition=repetition,
            step_s=ranks[0].seconds,
            exchange_s={kind: [exchange_s for exchange_s, _ in pairs] for kind, pairs in seconds.items()},
            wait_s={kind: [wait_s for _, wait_s in pairs] for kind, pairs in seconds.items()},
            counted_bytes=sum(rank.counted_bytes for rank in ranks),
            messages=sum(messages_between_hosts(m.calls, rank, RANKS_PER_HOST) for rank, m in enumerate(ranks)),
            sent=Sent(
                wire_bytes=sum(rank.sent.wire_bytes for rank in ranks), packets=sum(rank.sent.packets for rank in ranks)
            ),
        )


def predict(plans: dict[Key, StepPlan], cluster: ClusterSpec) -> list[Predicted]:
    """The cost model's numbers of every plan on a cluster, in as many parts as the variant has."""
    return [_predict(key, plan, cluster) for key, plan in plans.items()]


def _predict(key: Key, plan: StepPlan, cluster: ClusterSpec) -> Predicted:
    used = cluster.model_copy(update={"overlap_parts": plan.overlap_parts})
    cost = CostModel(cluster=used, model=MODEL)
    prediction = cost.predict(plan)
    exchange_s = {
        layer.kind: layer.num_layers * sum(float(m.times[layer.kind].exchange_s.max()) for m in prediction.microbatches)
        for layer in cost.layers
    }
    kinds = prediction.kinds.values()
    return Predicted(
        strategy=key[0].name,
        step=key[1],
        step_s=prediction.seconds,
        mfu=prediction.mfu,
        slow_bytes=prediction.moves.slow_bytes + sum(kind.slow_bytes for kind in kinds),
        exchange_s=exchange_s | {MOVES: prediction.moves.seconds},
    )


if __name__ == "__main__":
    main()
