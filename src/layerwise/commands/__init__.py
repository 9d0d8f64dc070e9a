"""The commands of the command line, one file each."""

from __future__ import annotations

import os


def speaks_for_node() -> bool:
    """True in one process of each node that torchrun started ranks on, and in a process of its own."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
