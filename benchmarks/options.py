"""Types of command-line options: argparse refuses other values in one line, with status 2, before any work."""

from __future__ import annotations

import math
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterable
from pathlib import Path

from layerwise.errors import SpecError
from layerwise.files import check_target
from layerwise.planners import STRATEGIES


def count(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


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


def each(item: Callable[[str], float]) -> Callable[[str], list[float]]:
    """Such numbers with commas between them."""
    return lambda text: [item(part) for part in text.split(",")]


def strategies(text: str, known: Iterable[str] = STRATEGIES) -> list[str]:
    """Names with commas between them."""
    names = text.split(",")
    if unknown := [name for name in names if name not in tuple(known)]:
        raise ArgumentTypeError(f"unknown strategy {unknown[0]!r}; legal values: {', '.join(known)}")
    return names


def target(text: str) -> Path:
    """A file that can be written."""
    try:
        check_target(Path(text), "")
    except SpecError as error:
        raise ArgumentTypeError(str(error).strip()) from None
    return Path(text)


def picture(text: str) -> Path:
    """A PNG file that can be written."""
    if Path(text).suffix != ".png":
        raise ArgumentTypeError(f"{text!r} must end in .png")
    return target(text)
