"""Fit a log-normal body and a Pareto tail to files of sample lengths, and print the constants and the fit error.

    python -m benchmarks.evaluate.fit_lengths LENGTH_FILES

The fit minimises the squared log error of quantiles, counted by samples and by tokens: the first decide how many
samples a step has, the second how much attention work. Search: the best of a few
starts, then steps in each parameter that shrink.
"""

from __future__ import annotations

import argparse
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.options import length_file
from layerwise.data.lengths import read_lengths
from layerwise.evaluate.workload import LengthDistribution

SAMPLE_SHARES = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.999, 0.9997])
TOKEN_SHARES = np.array([0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98])
GRID = (np.arange(4000) + 0.5) / 4000  # where a distribution's token quantiles are read off


class Target(NamedTuple):
    """Quantiles of a file: of its samples and of its tokens, and its ends."""

    samples: np.ndarray
    tokens: np.ndarray
    low: int
    high: int


def measure(lengths: np.ndarray) -> Target:
    """The quantiles that are fitted."""
    return Target(np.quantile(lengths, SAMPLE_SHARES), _token_quantiles(lengths), int(lengths[0]), int(lengths[-1]))


def _token_quantiles(lengths: np.ndarray) -> np.ndarray:
    below = np.cumsum(lengths) / lengths.sum()
    return lengths[np.searchsorted(below, TOKEN_SHARES)]


def distribution(parameters: np.ndarray, target: Target) -> LengthDistribution:
    """Parameters are logs of the median, sigma, tail share and tail index."""
    median, sigma, share, index = np.exp(parameters)
    share = min(share, 0.49)
    return LengthDistribution(
        median_tokens=median,
        sigma=sigma,
        tail_share=share,
        tail_index=index,
        min_tokens=target.low,
        max_tokens=target.high,
    )


def log_errors(fitted: LengthDistribution, target: Target) -> np.ndarray:
    """Natural log of fitted over measured, for every quantile."""
    samples = np.log(fitted.quantile(SAMPLE_SHARES) / target.samples)
    return np.concatenate([samples, np.log(_token_quantiles(fitted.quantile(GRID)) / target.tokens)])


def fit(target: Target) -> LengthDistribution:
    """The distribution with the least squared log error."""

    def loss(parameters: np.ndarray) -> float:
        if parameters[2] > np.log(0.49):
            return np.inf
        return float(np.square(log_errors(distribution(parameters, target), target)).mean())

    median = np.log(target.samples[4])
    spread = np.log(target.samples[6] / target.samples[2]) / 2.56
    starts = [
        np.array([median, np.log(spread), np.log(share), np.log(index)])
        for share in (0.003, 0.02, 0.1, 0.3)
        for index in (1.0, 2.0, 6.0)
    ]
    best = min((_descend(loss, start, 0.3, 0.05) for start in starts), key=loss)
    return distribution(_descend(loss, best, 0.05, 0.0005), target)


def _descend(loss, start: np.ndarray, first: float, last: float) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Pattern search: try a step up and down in every parameter, halve the step where none helps."""
    place, value, step = start, loss(start), first
    while step > last:
        moves = [place + sign * step * axis for axis in np.eye(len(place)) for sign in (1, -1)]
        found = min(moves, key=loss)
        if (found_value := loss(found)) < value:
            place, value = found, found_value
        else:
            step /= 2
    return place


def main() -> None:
    """Fit every file given."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="+", type=length_file, help="each of several lengths")
    table = Table(title="Fitted lengths (errors: fitted over measured)", title_justify="left")
    for name in ("file", "median", "sigma", "tail share", "tail index", "min", "max", "rms error", "worst", "mean"):
        table.add_column(name, justify="right" if name != "file" else "left", no_wrap=True)
    for path in parser.parse_args().files:
        lengths = np.sort(np.array(read_lengths(path)))
        target = measure(lengths)
        if target.samples[2] == target.samples[6]:
            parser.error(f"{path}: four fifths of its samples have {target.samples[2]:g} tokens: nothing to fit")
        fitted = fit(target)
        errors = log_errors(fitted, target)
        mean = fitted.quantile((np.arange(20_000) + 0.5) / 20_000).mean() / lengths.mean()
        worst = errors[np.abs(errors).argmax()]
        table.add_row(
            path.name.partition(".")[0],
            *(f"{value:.4g}" for value in (fitted.median_tokens, fitted.sigma, fitted.tail_share, fitted.tail_index)),
            f"{fitted.min_tokens:,}",
            f"{fitted.max_tokens:,}",
            *(f"{value:+.1%}" for value in (np.sqrt(np.square(errors).mean()), np.expm1(worst), mean - 1)),
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
