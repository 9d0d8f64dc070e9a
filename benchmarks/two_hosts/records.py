"""What the command tells the ranks, and what they tell it back, as JSON."""

from __future__ import annotations

from pathlib import Path

from benchmarks.two_hosts.links import Links
from benchmarks.two_hosts.shaping import Sent
from layerwise.spec import Record


class Settings(Record):
    """One bench. folder: for files that the command and its ranks share."""

    num_hosts: int
    ratio: float
    repetitions: int
    strategies: tuple[str, ...]
    num_steps: int
    folder: Path

    @property
    def num_runs(self) -> int:
        """Steps that are run, those of the warm-up included."""
        return (1 + self.repetitions) * self.num_steps * len(self.strategies)

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
    """What the cost model says of one plan. exchange_s: by layer kind and for moves, of the slowest rank."""

    strategy: str
    step: int
    step_s: float
    mfu: float
    slow_bytes: int
    exchange_s: dict[str, float]


class Run(Record):
    """One step as it was measured.

    exchange_s, wait_s: by layer kind and for moves, seconds of each rank in all-to-alls, and of these before the last
    rank had come. counted_bytes, messages: sent between hosts, as the runtime counts; sent: by the interfaces of all
    hosts.
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
