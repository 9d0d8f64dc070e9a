"""What commands say in words of their own."""

from __future__ import annotations

from rich.console import Console


def say(text: str, console: Console) -> None:
    """Print lines as they are: `[` in a path is no markup, and no line is cut at the width of the terminal."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
