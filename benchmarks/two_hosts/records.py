"""What the command tells the ranks, and what they tell it back, as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from benchmarks.two_hosts.links import Links
from benchmarks.two_hosts.shaping import Sent
from benchmarks.two_hosts.workload import OVERLAPPED
from layerwise.spec import Record


class Variant(NamedTuple):
    """What one row of the tables measures: a strategy, its attention sites in so many parts."""

    strategy: str
    overlap_parts: int

    @property
    def name(self) -> str:
        """As in the tables."""
        return self.strategy if self.overlap_parts == 1 else f"{self.strategy}, {self.overlap_parts} parts"


class Settings(Record):
    """One bench. overlap_parts: of further rows with overlap; 1: none. folder: what command and ranks share."""

    num_hosts: int
    ratio: float
    repetitions: int
    strategies: tuple[str, ...]
    num_steps: int
    overlap_parts: int
    folder: Path

    @property
    def variants(self) -> list[Variant]:
        """What is measured, those with overlap beside those without."""
        parts = sorted({1, self.overlap_parts})
        every = [Variant(strategy, num) for strategy in self.strategies for num in parts]
        return [variant for variant in every if variant.overlap_parts == 1 or variant.strategy in OVERLAPPED]

    @property
    def num_runs(self) -> int:
        """Steps that are run, those of the warm-up included."""
        return (1 + self.repetitions) * self.num_steps * len(self.variants)

    @property
    def meeting_path(self) -> Path:
        """Where ranks meet."""
        return self.folder / "meeting"

    @property
    def failure_path(self) -> Path:
        """Where a rank says why it failed."""
        return self.folder / "failure.txt"

    @property
    def results_path(self) -> Path:
        """What rank 0 writes."""
        return self.folder / "results.json"


class Predicted(Record):
    """What the cost model says of one variant's plan. exchange_s: as in Run, of the slowest rank."""

    strategy: str
    step: int
    step_s: float
    mfu: float
    slow_bytes: int
    exchange_s: dict[str, float]


class Run(Record):
    """One step as it was measured.

    strategy: the variant's name. exchange_s, wait_s: by layer kind and for moves, seconds that each rank waited in
    all-to-alls, and of these before the last rank had come. counted_bytes, messages: sent between hosts, as the
    runtime counts; sent: by the interfaces of all hosts.
    """

    strategy: str
    step: int
    repetition: int
    step_s: float
    exchange_s: dict[str, list[float]]
    wait_s: dict[str, list[float]]
    counted_bytes: int
    messages: int
    sent: Sent


class Results(Record):
    """Everything measured and predicted. links_after: measured once more at the end.

    message_overhead_bytes: what gloo sends of its own for a message. lateness_s: how late paced work ended, by
    percentile of all pieces of work on all ranks.
    """

    settings: Settings
    links: Links
    links_after: Links
    message_overhead_bytes: float
    samples: list[int]
    tokens: list[int]
    longest_tokens: list[int]
    predicted: list[Predicted]
    runs: list[Run]
    lateness_s: dict[str, float]
