"""Steps to plan: samples of a length file, or of a synthetic long-tailed distribution, drawn in a seeded order."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from layerwise.data.lengths import read_lengths
from layerwise.plan import Ints

# A context of 128K: longer samples are cut, as trainers do.
MAX_SAMPLE_TOKENS = 131072
SYNTHETIC = "synthetic"


def load_lengths(source: str, seed: int) -> Ints:
    """Lengths in tokens, int64: of a file, or of SYNTHETIC, a log-normal body whose top 3% are a Pareto tail."""
    if source != SYNTHETIC:
        lengths = np.array(read_lengths(Path(source)), dtype=np.int64)
    else:
        rng = np.random.default_rng(seed)
        lengths = np.exp(rng.normal(6.8, 1.2, 100_000))
        tail = rng.random(len(lengths)) < 0.03
        lengths[tail] = 8000 * (1 + rng.pareto(1.1, int(tail.sum())))
        lengths = lengths.astype(np.int64) + 1
    return np.minimum(lengths, MAX_SAMPLE_TOKENS)


def draw_steps(lengths: Ints, num_steps: int, tokens: int, seed: int) -> Iterator[Ints]:
    """Steps of samples in random order, each as long as it stays within `tokens`; the order repeats when used up."""
    rng = np.random.default_rng(seed)
    order, cursor = rng.permutation(lengths), 0
    for _ in range(num_steps):
        left = tokens
        step: list[int] = []
        while True:
            if cursor == len(order):
                order, cursor = rng.permutation(lengths), 0
            if int(order[cursor]) > left and step:
                break
            step.append(int(order[cursor]))
            left -= step[-1]
            cursor += 1
        yield np.array(step, dtype=np.int64)


def draw_samples(lengths: Ints, num_steps: int, num_samples: int, seed: int) -> Iterator[Ints]:
    """Steps of a fixed number of samples."""
    rng = np.random.default_rng(seed)
    for _ in range(num_steps):
        yield rng.choice(lengths, num_samples, replace=False)
