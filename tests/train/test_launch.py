"""Forked ranks and what the process that forks them had used before."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from layerwise.errors import RankFailedError, SpecError
from layerwise.groups import ProcessWorld
from layerwise.train.launch import launch

pytestmark = pytest.mark.ranks


class Circle:
    """Only the collector can free it; then it writes down in which process that was."""

    def __init__(self, file: Path) -> None:
        self.file, self.me = file, self

    def __del__(self) -> None:
        with self.file.open("a") as file:
            file.write(f"{os.getpid()}\n")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Garbage stays until something asks for it to be collected."""
    gc.disable()
    yield
    gc.enable()


def fork_two(main: Callable[[], object] = gc.collect) -> None:
    def on_rank(world: ProcessWorld, device: torch.device) -> None:
        main()

    launch(on_rank, num_ranks=2, ranks_per_node=2, device="cpu", timeout_s=20)


@pytest.mark.usefixtures("no_collector")
def test_garbage_is_destroyed_by_the_process_that_made_it(tmp_path: Path) -> None:
    Circle(tmp_path / "freed")
    fork_two()
    assert (tmp_path / "freed").read_text().split() == [str(os.getpid())]


@pytest.mark.usefixtures("no_collector")
def test_ranks_do_not_destroy_what_they_inherit(tmp_path: Path) -> None:
    held = [Circle(tmp_path / "freed")]

    def let_go() -> None:
        held.clear()
        gc.collect()

    fork_two(let_go)
    assert not (tmp_path / "freed").exists()
    let_go()
    assert (tmp_path / "freed").read_text().split() == [str(os.getpid())]


@pytest.mark.usefixtures("no_collector")
def test_a_process_group_that_is_garbage_does_not_stop_ranks() -> None:
    """Its threads are not there in a rank, which would wait for them, or abort."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    circle: list[object] = [dist.group.WORLD]
    circle.append(circle)
    dist.destroy_process_group()
    del circle
    fork_two()


def test_a_mistyped_number_of_ranks_fills_no_machine() -> None:
    with pytest.raises(SpecError, match=r"100000 ranks on this machine: at most 512 are started here"):
        launch(lambda world, device: None, num_ranks=100_000, ranks_per_node=100_000, device="cpu", timeout_s=5)


def test_the_end_of_a_very_long_message_arrives() -> None:
    """A pipe holds 64 KiB, and the parent reads when the rank has ended."""

    def on_rank(world: ProcessWorld, device: torch.device) -> None:
        raise ValueError("begin " + "\N{SNOWMAN}" * 200_000 + " end")

    with pytest.raises(RankFailedError, match=r"begin [\s\S]*characters \.\.\.\][\s\S]* end"):
        launch(on_rank, num_ranks=2, ranks_per_node=1, device="cpu", timeout_s=30)
