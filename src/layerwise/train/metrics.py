"""What a run records: one JSON object per step, documented in docs/metrics.md, and scalars for people to watch."""

from __future__ import annotations

import json
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from layerwise.data.loader import Step
from layerwise.exchange import Count
from layerwise.groups import World
from layerwise.labels import format_bytes, format_seconds
from layerwise.plan import StepPlan
from layerwise.train.config import TrainConfig
from layerwise.train.tracking import WandbRun


@dataclass(frozen=True, kw_only=True)
class Totals:
    """A step over all ranks: summed losses, summed exchange counts by layer kind, mean seconds of waits by kind."""

    losses: dict[str, float]
    exchange: dict[str, dict[str, int]]
    exchange_wait_s: dict[str, float]


def sum_over_ranks(step: Step, losses: dict[str, torch.Tensor], kinds: tuple[str, ...], world: World) -> Totals:
    """What every rank holds of the step's losses and exchanges, together; one small all-reduce."""
    device = next(iter(losses.values())).device
    counts = [step.meter.counts.get(kind, Count()) for kind in kinds]
    numbers = [n for c in counts for n in (c.calls, c.fast_bytes, c.slow_bytes)]
    waits_s = [step.meter.waits.seconds(kind) for kind in kinds]
    # float64 holds counts up to 2**53 exactly.
    table = torch.cat(
        [
            torch.stack([v.detach().double() for v in losses.values()]),
            torch.tensor([*numbers, *waits_s], dtype=torch.float64, device=device),
        ]
    )
    world.all_reduce(table)
    values = table.tolist()
    totals = [int(n) for n in values[len(losses) : len(losses) + len(numbers)]]
    return Totals(
        losses=dict(zip(losses, values, strict=False)),
        exchange={
            kind: dict(zip(("calls", "fast_bytes", "slow_bytes"), totals[3 * i : 3 * i + 3], strict=True))
            for i, kind in enumerate(kinds)
        },
        exchange_wait_s=dict(
            zip(kinds, [seconds / world.num_ranks for seconds in values[len(losses) + len(numbers) :]], strict=True)
        ),
    )


def peak_bytes(world: World, device: torch.device) -> int:
    """The most memory that any rank has held: of tensors on a GPU, or of the whole process on a CPU."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return max(row[0] for row in world.gather_ints([peak]))


def plan_numbers(plan: StepPlan) -> dict[str, Any]:
    """Token balance (of each micro-batch, summed over micro-batches) and groups of a plan."""
    tokens = [m.tokens_per_rank(plan.num_ranks) for m in plan.microbatches]
    return {
        "microbatches": len(plan.microbatches),
        "tokens_per_rank_max": int(sum(t.max() for t in tokens)),
        "tokens_per_rank_mean": float(sum(t.mean() for t in tokens)),
        "parents": _by_degree([p.sp_degree for m in plan.microbatches for p in m.parents]),
        "children": _by_degree([size for m in plan.microbatches for size in _children(m)]),
        "fallbacks": plan.notes.get("fallbacks", 0),
    }


def _children(microbatch: Any) -> list[int]:
    """SP degrees of the distinct sets of ranks that hold samples."""
    ranks: dict[int, list[int]] = {}
    for shard in microbatch.shards:
        ranks.setdefault(shard.sample, []).append(shard.rank)
    return [len(group) for group in {tuple(sorted(r)) for r in ranks.values()}]


def _by_degree(degrees: list[int]) -> dict[str, int]:
    return {str(degree): count for degree, count in sorted(Counter(degrees).items())}


def _end_of_steps(file: TextIO, first_step: int) -> int:
    """Where in a metrics file the rows of the steps before `first_step` end, in bytes."""
    file.seek(0)
    end = 0
    for line in file:
        try:
            whole = line.endswith("\n") and json.loads(line)["step"] < first_step
        except (ValueError, KeyError):  # torn by a crash
            break
        if not whole:
            break
        end += len(line.encode())
    return end


def watched(row: dict[str, Any]) -> dict[str, float]:
    """Numbers that people watch and that follow from a row."""
    return {
        "tokens_per_s": row["num_tokens"] / row["step_s"],
        "imbalance": row["tokens_per_rank_max"] / max(row["tokens_per_rank_mean"], 1e-9),
        "slow_bytes": sum(counts["slow_bytes"] for counts in row["exchange"].values()),
        "exchange_wait_s": sum(row["exchange_wait_s"].values()),
    }


def progress_line(row: dict[str, Any]) -> str:
    """A step for the terminal."""
    now = watched(row)
    words = [
        f"loss {row['loss']:.4f}",
        f"{format_seconds(row['step_s'])} per step",
        f"{now['tokens_per_s']:,.0f} tokens/s",
        f"MFU {row['mfu']:.1%}",
        f"imbalance {now['imbalance']:.2f}",
        f"{format_bytes(now['slow_bytes'])} between nodes",
        f"{format_seconds(now['exchange_wait_s'])} waiting for exchanges",
    ]
    if row["predicted_saving"]:
        saving = row["predicted_saving"]
        words.append(f"{abs(saving):.1%} {'slower' if saving < 0 else 'faster'} than dynamic (predicted)")
    return "  ".join(words)


def _scalars(row: dict[str, Any]) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, (int, float)) and key != "step":
            yield key, value
    yield from watched(row).items()
    for kind, counts in row["exchange"].items():
        for key, value in (counts | {"wait_s": row["exchange_wait_s"][kind]}).items():
            yield f"exchange/{kind}/{key}", value


def _without_disk_errors(args: Any) -> None:
    """TensorBoard writes on a thread; what goes wrong there comes to us with the next call."""
    if not isinstance(args.exc_value, OSError):
        threading.__excepthook__(args)


class Recorder:
    """Writes metrics.jsonl (flushed per step) and TensorBoard events into a folder; used by rank 0 only.

    Weights & Biases gets the same scalars where the config has a project. Of what an interrupted run wrote, the steps
    from `first_step` on go: they are taken again.
    """

    def __init__(self, config: TrainConfig, folder: Path, first_step: int) -> None:
        # Imported here: it costs seconds and only one rank writes.
        from torch.utils.tensorboard import SummaryWriter

        threading.excepthook = _without_disk_errors
        self._file = (folder / "metrics.jsonl").open("a+")
        self._file.truncate(_end_of_steps(self._file, first_step))
        self._events = SummaryWriter(folder / "tensorboard", purge_step=first_step)
        self._wandb = WandbRun(config, folder, first_step) if config.wandb else None

    def close(self) -> None:
        """Finish all of them."""
        threading.excepthook = threading.__excepthook__
        self._file.close()
        self._events.close()
        if self._wandb is not None:
            self._wandb.close()

    def write(self, row: dict[str, Any]) -> None:
        """Append one step. Raises OSError where it, or an earlier one, cannot be written."""
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        scalars = dict(_scalars(row))
        for key, value in scalars.items():
            self._events.add_scalar(key, value, row["step"])
        if self._wandb is not None:
            self._wandb.write(row["step"], scalars)
