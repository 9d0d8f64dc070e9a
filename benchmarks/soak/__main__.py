"""Training that is killed at random moments, and goes on each time on other ranks, against one that is left alone.

    python -m benchmarks.soak [--steps 500] [--kills 30] [--seed 0]

One rank, all ranks or the launcher get SIGKILL, a third of the times while a checkpoint is being written; after every
tenth kill a bit of the newest checkpoint is flipped too. Exits with status 1 where a step is missing or was recorded
twice, where a loss differs by more than 1e-9, or where there was no time for all kills.
"""

from __future__ import annotations

import argparse
import importlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch

from benchmarks.options import count, whole
from benchmarks.soak.small_run import SHAPES, make_config, start, whole_rows, write_samples
from layerwise.train.checkpoint import step_folders

TOLERANCE = 1e-9
DAMAGE_EVERY = 10
GIVE_UP_S = 300.0  # without a new step


@dataclass
class Soak:
    """One disturbed run, and what was done to it."""

    out: Path
    samples: Path
    num_steps: int
    num_kills: int
    rng: random.Random
    killed: Counter[str] = field(default_factory=Counter)
    during_saves: int = 0
    damaged: int = 0
    starts: int = 0
    steps_taken: int = 0

    @property
    def kills_left(self) -> int:
        """How often it is still to be killed."""
        return self.num_kills - self.killed.total()

    def run(self) -> None:
        """Start, kill and start again until the run has ended well."""
        while True:
            shape = SHAPES[self.starts % len(SHAPES)]
            begun_at = next(iter(step_folders(self.out / "checkpoints")), 0)
            process = start(make_config(self.samples, self.num_steps, shape), self.out)
            self.starts += 1
            if self.kills_left and self._wait_for_a_moment(process, begun_at):
                self._kill(process)
            process.join()
            self.steps_taken += max(0, len(whole_rows(self.out)) - begun_at)
            if process.exitcode == 0:
                return
            if not self.killed.total() or process.exitcode not in (1, -signal.SIGKILL):
                raise RuntimeError(f"the run ended with {process.exitcode}; see {self.out.with_suffix('.log')}")

    def _wait_for_a_moment(self, process: BaseProcess, begun_at: int) -> bool:
        """Wait until some steps were taken, and for a save to begin if it is to be then; False where the run ended."""
        share = (self.num_steps - begun_at) / (self.kills_left + 1)
        target = min(begun_at + self.rng.randint(1, max(1, int(2 * share))), self.num_steps - 1)
        in_a_save = self.rng.random() < 1 / 3
        last, last_at = -1, time.monotonic()
        while process.is_alive():
            steps = len(whole_rows(self.out))
            if steps != last:
                last, last_at = steps, time.monotonic()
            if time.monotonic() - last_at > GIVE_UP_S:
                raise RuntimeError(f"no step for {GIVE_UP_S} s; see {self.out.with_suffix('.log')}")
            saving = any((self.out / "checkpoints").glob("step-*.partial"))
            if steps >= target and (saving or not in_a_save):
                time.sleep(self.rng.random() * (0.02 if in_a_save else 0.3))
                self.during_saves += any((self.out / "checkpoints").glob("step-*.partial"))
                return True
            time.sleep(0.002)
        return False

    def _kill(self, process: BaseProcess) -> None:
        assert process.pid is not None
        ranks = _children(process.pid)
        kind = self.rng.choice(["one rank", "all ranks", "the launcher"])
        victims = [process.pid] if kind == "the launcher" or not ranks else ranks
        for pid in [self.rng.choice(victims)] if kind == "one rank" else victims:
            os.kill(pid, signal.SIGKILL)
        process.join()
        while any(Path(f"/proc/{pid}").exists() for pid in ranks):
            time.sleep(0.01)
        self.killed[kind] += 1
        saved = list(step_folders(self.out / "checkpoints").values())
        if self.killed.total() % DAMAGE_EVERY == 0 and len(saved) > 1:
            _flip_a_bit(self.rng, saved[0])
            self.damaged += 1


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except FileNotFoundError:
        return []


def _flip_a_bit(rng: random.Random, checkpoint: Path) -> None:
    path = rng.choice(sorted(checkpoint.iterdir()))
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def compare(ours: Path, undisturbed: Path, num_steps: int) -> tuple[list[int], float]:
    """Steps that are missing or recorded twice, and the largest relative difference of a loss."""
    rows, expected = whole_rows(ours), whole_rows(undisturbed)
    counts = Counter(row["step"] for row in rows)
    wrong = [step for step in range(num_steps) if counts[step] != 1]
    pairs = zip(rows, expected, strict=False)
    return wrong, max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs)


def main() -> int:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=count, default=500)
    parser.add_argument("--kills", type=whole(0), default=30)
    parser.add_argument("--seed", type=whole(0), default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for module in ("torch._dynamo", "torch.utils.tensorboard"):  # seconds, in every process that does not inherit them
        importlib.import_module(module)
    with tempfile.TemporaryDirectory(prefix="layerwise-soak-") as name:
        folder = Path(name)
        samples = write_samples(folder)
        began = time.monotonic()
        alone = start(make_config(samples, options.steps, SHAPES[1]), folder / "undisturbed")
        alone.join()
        alone_s, began = time.monotonic() - began, time.monotonic()
        soak = Soak(folder / "disturbed", samples, options.steps, options.kills, random.Random(options.seed))
        soak.run()
        wrong, difference = compare(soak.out, folder / "undisturbed", options.steps)
        disturbed_s = time.monotonic() - began
    kinds = ", ".join(f"{count} x {kind}" for kind, count in soak.killed.items())
    print(f"{options.steps} steps, {soak.steps_taken} taken in all, in {soak.starts} starts on {len(SHAPES)} shapes")
    print(f"{soak.killed.total()} of {options.kills} kills: {kinds}; {soak.during_saves} of them during a save")
    print(f"{soak.damaged} checkpoints had a bit flipped")
    print(f"{len(wrong)} steps are missing or were recorded twice")
    print(f"largest relative difference of a loss: {difference:.1e}, limit {TOLERANCE:g}")
    print(f"undisturbed on one rank {alone_s:.0f} s, disturbed {disturbed_s:.0f} s")
    return 0 if not wrong and difference <= TOLERANCE and not soak.kills_left else 1


if __name__ == "__main__":
    sys.exit(main())
