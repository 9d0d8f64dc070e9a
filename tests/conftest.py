"""One thread per rank: many ranks share few cores, and forked ranks must not inherit a thread pool."""

import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Real processes first: they take longest, and the other worker can do the rest meanwhile."""
    items.sort(key=lambda item: item.get_closest_marker("ranks") is None)
