"""Types of command-line options: argparse refuses other values in one line, with status 2, before any work."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

from layerwise.data.lengths import read_lengths
from layerwise.errors import LayerwiseError
from layerwise.evaluate.workload import Workload, load_workload
from layerwise.files import check_target
from layerwise.planners import STRATEGIES

ItemT = TypeVar("ItemT")
GivenT = TypeVar("GivenT")


def whole(least: int, most: float = math.inf, of: int = 1) -> Callable[[str], int]:
    """A whole number in [least, most], a multiple of `of`."""
    rule = f"no whole number of at least {least}" + (f" and at most {most}" if most < math.inf else "")
    rule += f", a multiple of {of}" if of > 1 else ""

    def number(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most or int(text) % of:
            raise ArgumentTypeError(f"{text!r} is {rule}")
        return int(text)

    return number


count = whole(1)


def at_least(least: float) -> Callable[[str], float]:
    """A number that is not less."""

    def number(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value < math.inf:
            raise ArgumentTypeError(f"{text!r} is no number of at least {least:g}")
        return value

    return number


def each(item: Callable[[str], ItemT]) -> Callable[[str], list[ItemT]]:
    """Such items with commas between them."""
    return lambda text: [item(part) for part in text.split(",")]


def strategies(text: str, known: Iterable[str] = STRATEGIES) -> list[str]:
    """Names with commas between them."""
    names = text.split(",")
    if unknown := [name for name in names if name not in tuple(known)]:
        raise ArgumentTypeError(f"unknown strategy {unknown[0]!r}; legal values: {', '.join(known)}")
    return names


def _checked(check: Callable[[GivenT], ItemT], given: GivenT) -> ItemT:
    try:
        return check(given)
    except LayerwiseError as error:
        raise ArgumentTypeError(str(error).strip()) from None


def target(text: str) -> Path:
    """A file that can be written."""
    _checked(lambda path: check_target(path, ""), Path(text))
    return Path(text)


def length_file(text: str) -> Path:
    """A file of sample lengths that can be read."""
    _checked(read_lengths, Path(text))
    return Path(text)


def named_workload(text: str) -> Workload:
    """A workload, by the name of a preset or of a YAML file."""
    return _checked(load_workload, text)


def picture(text: str) -> Path:
    """A PNG file that can be written."""
    if Path(text).suffix != ".png":
        raise ArgumentTypeError(f"{text!r} must end in .png")
    return target(text)
