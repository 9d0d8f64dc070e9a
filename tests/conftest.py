"""One thread per rank: many ranks share few cores, and forked ranks must not inherit a thread pool."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Folders and files whose tests take minutes together: `make test` leaves them to `make test-slow`.
SLOW = ("exact", "hf", "evaluate", "test_bounds.py", "test_calibrate.py", "test_two_hosts.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes first: they take longest, and the other worker can do the rest meanwhile."""
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in SLOW:
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)
