"""The planned loader: shards cut right, labels shifted before the cut, and bad samples named."""

from __future__ import annotations

import numpy as np
import pytest

from layerwise import ClusterSpec, LocalWorld, PlannedLoader, Planner, solo_world
from layerwise.data.corpus import Sample
from layerwise.data.sampler import StepSampler
from layerwise.errors import DataError, InfeasibleError, PlanMismatchError
from layerwise.groups import World
from layerwise.plan import MicrobatchPlan, Shard, StepPlan, Tile, shard_table, tile_table
from layerwise.spec import AttentionSpec
from tests.runtime.test_strategies import tiny_model

SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=4, v_head_dim=4)


def halves(lengths: list[int]) -> StepPlan:
    """Every sample on two ranks."""
    shards = [
        s
        for i, n in enumerate(lengths)
        for s in (Shard(i, 0, 0, -(-n // 2)), Shard(i, 1, -(-n // 2), n))
        if s.hi > s.lo
    ]
    tiles = {"full_attention": tile_table([Tile(i, 0, 0, n, 0, 0, 1) for i, n in enumerate(lengths)])}
    return StepPlan(
        strategy="halves",
        num_ranks=2,
        ranks_per_node=2,
        max_tokens_per_rank=100,
        lengths=tuple(lengths),
        attention={"full_attention": SPEC},
        microbatches=(MicrobatchPlan(shards=shard_table(shards), tiles=tiles),),
    )


def load(dataset: object, **options: object) -> list[list]:
    return LocalWorld(2, 2).run(
        lambda world: list(PlannedLoader(dataset=dataset, planner=halves, world=world, **options))
    )


def test_labels_are_shifted_before_the_cut() -> None:
    dataset = [[10, 11, 12, 13, 14], [20], [30, 31]]
    (first,), (second,) = load(dataset, steps=[[0, 1, 2]])
    a, b = first.microbatches[0], second.microbatches[0]
    assert a.input_ids.tolist() == [10, 11, 12, 20, 30]
    assert a.shift_labels.tolist() == [11, 12, 13, -100, 31]
    assert a.position_ids.tolist() == [0, 1, 2, 0, 0]
    assert b.input_ids.tolist() == [13, 14, 31]
    assert b.shift_labels.tolist() == [14, -100, -100]
    assert b.position_ids.tolist() == [3, 4, 1]
    assert first.num_valid_tokens == second.num_valid_tokens == 5


def test_given_labels_and_records() -> None:
    dataset = [
        {"input_ids": [1, 2, 3], "labels": [-100, 2, -100]},
        Sample(name="x", input_ids=np.array([4, 5])),
    ]
    (step,), _ = load(dataset, steps=[[0, 1]])
    assert step.num_valid_tokens == 2
    assert step.microbatches[0].shift_labels.tolist() == [2, -100, 5]


def test_iterable_dataset_is_cut_into_steps() -> None:
    steps, _ = load([[1] * 4, [2] * 4, [3] * 4, [4] * 9], tokens_per_step=8)
    assert [step.sample_ids for step in steps] == [(0, 1), (2,), (3,)]


class Known:
    """A dataset whose lengths and digests are known; it notes which samples are read."""

    def __init__(self, samples: list[list[int]]) -> None:
        self.samples = samples
        self.lengths = np.array([len(sample) for sample in samples])
        self.digests = np.array([hash(tuple(sample)) & 0xFFFF for sample in samples], dtype=np.uint64)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> list[int]:
        self.read.append(index)
        return self.samples[index]


def test_a_rank_reads_only_samples_that_it_holds_a_part_of() -> None:
    samples = [[1, 2, 3], [4], [5, 6], [7]]
    known = [Known(samples) for _ in range(2)]
    steps = LocalWorld(2, 2).run(
        lambda world: list(
            PlannedLoader(dataset=known[world.rank], planner=halves, world=world, steps=[[0, 1], [3, 2]], first_step=1)
        )
    )
    assert [sorted(set(dataset.read)) for dataset in known] == [[2, 3], [2]]  # rank 1 has a half of sample 2 only
    (unknown,), _ = load(samples, steps=[[3, 2]])
    assert steps[0][0].microbatches[0].input_ids.tolist() == unknown.microbatches[0].input_ids.tolist() == [7, 5]
    assert steps[0][0].index == 1


def test_known_samples_that_differ_between_ranks_are_seen() -> None:
    known = [Known([[1, 2, 3], [4, 5]]) for _ in range(2)]
    known[1].digests[1] += 1
    with pytest.raises(PlanMismatchError):
        LocalWorld(2, 2).run(
            lambda world: list(PlannedLoader(dataset=known[world.rank], planner=halves, world=world, steps=[[0, 1]]))
        )


@pytest.mark.parametrize("short", [0, 1])
def test_a_rank_that_has_fewer_steps_is_named_on_every_rank(short: int) -> None:
    """The others would else wait for it, or take what it sends next for its plan."""
    caught = []

    def on_rank(world: World) -> None:
        samples = [[1, 2, 3], [4, 5]][: 1 if world.rank == short else 2]
        with pytest.raises(PlanMismatchError, match=f"no more steps on rank {short}, another one on rank {1 - short}"):
            for _ in PlannedLoader(dataset=iter(samples), planner=halves, world=world, tokens_per_step=3):
                pass
        caught.append(world.rank)

    LocalWorld(2, 2).run(on_rank)
    assert sorted(caught) == [0, 1]


def test_a_sample_that_is_not_as_long_as_it_is_known_to_be() -> None:
    known = Known([[1, 2, 3]])
    known.samples[0] = [1, 2]
    with pytest.raises(DataError, match="sample 0 has 2 tokens, but its dataset's lengths say 3"):
        load(known, steps=[[0]])


@pytest.mark.parametrize("first_step", [0, 1, 2, 3, 9])
@pytest.mark.parametrize("window", [1, 2])
def test_a_loader_that_goes_on_gives_the_tail_of_the_whole(first_step: int, window: int) -> None:
    dataset = [[i] * (1 + i % 4) for i in range(12)]
    sampler = StepSampler([len(sample) for sample in dataset], 7, num_steps=8, seed=2, window_steps=window)
    ways: list[dict[str, object]] = [
        {"steps": sampler},
        {"steps": list(sampler)},
        {"tokens_per_step": 7, "planning_window_steps": window},
    ]
    for way in ways:
        whole, _ = load(dataset, **way)
        tail, _ = load(dataset, first_step=first_step, **way)
        assert [(s.index, s.sample_ids) for s in tail] == [(s.index, s.sample_ids) for s in whole[first_step:]]
        assert [s.microbatches[0].input_ids.tolist() for s in tail] == [
            s.microbatches[0].input_ids.tolist() for s in whole[first_step:]
        ]


def test_any_number_of_ranks_sees_the_same_order() -> None:
    dataset = [[i] * (1 + i % 4) for i in range(12)]
    sampler = StepSampler([len(sample) for sample in dataset], 9, num_steps=7, seed=2, window_steps=3)
    seen = []
    for num_ranks in (1, 2, 4):
        planner = Planner(
            strategy="dynamic",
            cluster=ClusterSpec(num_nodes=1, ranks_per_node=num_ranks),
            model=tiny_model(8, 2),
            max_tokens_per_rank=9,
        )
        world = LocalWorld(num_ranks, num_ranks)
        ranks = world.run(
            lambda world, planner=planner: [
                step.sample_ids for step in PlannedLoader(dataset=dataset, planner=planner, world=world, steps=sampler)
            ]
        )
        seen += ranks
    assert len(seen) == 7
    assert all(order == [tuple(step) for step in sampler] for order in seen)


def test_a_stream_that_goes_on_sees_every_sample_once() -> None:
    dataset = [[i] * (1 + i % 4) for i in range(20)]
    first, _ = load(dataset, tokens_per_step=7, planning_window_steps=3)
    assert sorted(i for step in first for i in step.sample_ids) == list(range(20))


def test_skipped_steps_are_not_read() -> None:
    class Guarded(list):  # type: ignore[type-arg]
        def __getitem__(self, index: int) -> object:  # type: ignore[override]
            assert index == 2
            return super().__getitem__(index)

    (step,), _ = load(Guarded([[1], [2], [3]]), steps=[[0], [1], [2]], first_step=2)
    assert (step.index, step.sample_ids) == (2, (2,))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ([], "sample 1: expected a non-empty list"),
        ([[1, 2]], "sample 1: expected a non-empty list"),
        ([1, 40], r"sample 1: token 40 at position 1 is not in \[0, vocab_size=32\)"),
        ([-1], "sample 1: token -1"),
        ({"input_ids": [1, 2], "labels": [1]}, "sample 1: 2 input_ids but labels of shape"),
        ({"input_ids": [1, 2], "labels": [1, 99]}, "sample 1: label 99"),
        ({"ids": [1]}, "needs 'input_ids'"),
        ([1.9, 2.9], "sample 1: input_ids: expected whole numbers"),
        ("abc", "sample 1: input_ids: expected whole numbers"),
        ([2**70], "sample 1: input_ids: expected whole numbers"),
        ([1, True], "sample 1: input_ids: expected whole numbers that fit 64 bits, got bool"),
        (np.array([True]), "sample 1: input_ids: expected whole numbers"),
        ([1, float("nan")], "sample 1: input_ids: expected whole numbers"),
        ([None], "sample 1: input_ids: expected whole numbers"),
        (np.array([2**64 - 1], dtype=np.uint64), "sample 1: input_ids: 18446744073709551615 is beyond"),
    ],
)
def test_bad_samples_are_named(sample: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load([[1, 2], sample], steps=[[0, 1]], vocab_size=32)


@pytest.mark.parametrize("index", [-1, 2, 0.5, "0"])
def test_sample_indices_outside_the_dataset_are_refused(index: object) -> None:
    with pytest.raises(DataError, match=rf"sample index {index!r}; legal: whole numbers in \[0, 2\)"):
        load([[1, 2], [3]], steps=[[0, index]])


def test_steps_show_counts_and_no_tensors() -> None:
    ((step,), _) = load([[7] * 41, {"input_ids": [8, 9], "labels": [-100, -100]}], steps=[[0, 1]])
    assert repr(step) == "Step(0: 2 samples, 43 tokens, 40 valid, (Microbatch(22 local tokens),))"


def test_sample_over_budget_reaches_the_loop_as_an_error() -> None:
    planner = Planner(
        strategy="dynamic",
        cluster=ClusterSpec(num_nodes=1, ranks_per_node=1),
        model=tiny_model(8, 2),
        max_tokens_per_rank=4,
    )
    with pytest.raises(InfeasibleError, match="5"):
        list(PlannedLoader(dataset=[[1] * 5], planner=planner, world=solo_world(), steps=[[0]]))


def test_leaving_the_loop_early_stops_the_planning_thread() -> None:
    import threading

    for step in PlannedLoader(
        dataset=[[1] * 4],
        planner=Planner(
            strategy="dynamic",
            cluster=ClusterSpec(num_nodes=1, ranks_per_node=1),
            model=tiny_model(8, 2),
            max_tokens_per_rank=4,
        ),
        world=solo_world(),
        steps=[[0]] * 50,
    ):
        assert step.index == 0
        break
    assert not [t for t in threading.enumerate() if t.name == "layerwise-planning" and t.is_alive()]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"steps": [[0]], "tokens_per_step": 4},
        {"steps": [[0]], "prefetch": 0},
        {"steps": [[0]], "first_step": -1},
        {"steps": [[0]], "planning_window_steps": 2},
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(DataError):
        PlannedLoader(dataset=[[1]], planner=halves, world=solo_world(), **options)
