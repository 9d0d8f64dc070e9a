"""Several sources with weights, and limits that come from plans."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from layerwise import ClusterSpec, Planner
from layerwise.data.config import DataConfig
from layerwise.data.corpus import load_corpus
from layerwise.data.limits import placeable_tokens
from layerwise.data.sampler import StepSampler
from layerwise.errors import DataError, SpecError
from layerwise.spec import record_from
from tests.runtime.test_strategies import tiny_model


@pytest.fixture
def mixture(tmp_path: Path) -> dict[str, dict[str, object]]:
    """Nine texts of 3 tokens called web, and one of 6 called code."""
    for name, texts in (("web", "abcdefghi"), ("code", ["wxyz"])):
        (tmp_path / name).mkdir()
        for text in texts:
            (tmp_path / name / f"{text}.txt").write_text(text)
    return {
        "web": {"source": str(tmp_path / "web"), "weight": 3},
        "code": {"source": str(tmp_path / "code"), "weight": 1},
    }


def test_parts_follow_one_another_and_keep_their_names(mixture: dict[str, dict[str, object]]) -> None:
    mixture["web"]["max_samples"] = 2
    corpus = load_corpus(DataConfig(mixture=mixture))
    assert corpus.lengths.tolist() == [3, 3, 6]
    assert corpus[2].name == "code: wxyz.txt"
    assert corpus[0].name.startswith("web: ")
    assert corpus.sources == [(2, 3.0), (1, 1.0)]
    assert str(corpus.report) == (
        "3 samples, 12 tokens from 2 sources\n"
        "  web (weight 3): 2 samples, 6 tokens from 9 files; 7 beyond max_samples\n"
        "  code (weight 1): 1 sample, 6 tokens from 1 file"
    )
    with pytest.raises(IndexError):
        corpus[3]
    with pytest.raises(IndexError):
        corpus[-1]


def test_weights_are_shares_of_the_tokens(mixture: dict[str, dict[str, object]]) -> None:
    corpus = load_corpus(DataConfig(mixture=mixture))
    sampler = StepSampler(corpus.lengths, 24, num_steps=30, sources=corpus.sources)
    web, code = sampler.visits()
    assert abs(web.tokens - 3 * code.tokens) <= 18
    assert web.epochs == web.samples / 9
    drawn = list(chain(*sampler))
    first_epoch = [index for index in drawn if index < 9][:9]
    assert sorted(first_epoch) == list(range(9))


def test_each_source_has_its_own_cache_and_column(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"body": "aa"}\n')
    (tmp_path / "b.jsonl").write_text('{"input_ids": [5]}\n')
    mixture = {
        "a": {"source": str(tmp_path / "a.jsonl"), "text_field": "body", "weight": 1},
        "b": {"source": str(tmp_path / "b.jsonl"), "weight": 1},
    }
    for _ in range(2):
        corpus = load_corpus(DataConfig(mixture=mixture, cache_dir=str(tmp_path / "cache")))
        assert [sample.input_ids.tolist() for sample in corpus] == [[256, 97, 97, 257], [5]]
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "x"}, "source='x' has no effect with mixture"),
        ({"max_samples": 3}, "max_samples=3 has no effect with mixture"),
        ({"mixture": {}}, "mixture: .*at least 1 item"),
        ({"mixture": {"a": {"source": "x"}}}, "mixture.a.weight: Field required"),
        ({"mixture": {"a": {"source": "x", "weight": 0}}}, "mixture.a.weight: .*greater than 0"),
        ({"mixture": {"a": {"source": "x", "weight": 1, "split": "test"}}}, "split='test' has no effect"),
    ],
)
def test_settings_that_contradict(
    mixture: dict[str, dict[str, object]], settings: dict[str, object], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        record_from(DataConfig, {"mixture": mixture} | settings, "test")


def test_a_source_without_samples_is_named(tmp_path: Path, mixture: dict[str, dict[str, object]]) -> None:
    (tmp_path / "none").mkdir()
    mixture["empty"] = {"source": str(tmp_path / "none"), "weight": 1}
    with pytest.raises(DataError, match=r"mixture\.empty, source=.*none': no samples"):
        load_corpus(DataConfig(mixture=mixture))


def test_rows_in_hand_cannot_be_a_mixture(mixture: dict[str, dict[str, object]]) -> None:
    with pytest.raises(SpecError, match=r"rows= has no effect with data.mixture"):
        load_corpus(DataConfig(mixture=mixture), rows=["x"])


@pytest.mark.parametrize(("strategy", "options", "expected"), [("dynamic", {}, 40), ("static", {"sp_degree": 2}, 20)])
def test_what_a_plan_can_place_is_a_limit(
    tmp_path: Path, strategy: str, options: dict[str, int], expected: int
) -> None:
    planner = Planner(
        strategy=strategy,
        cluster=ClusterSpec(num_nodes=1, ranks_per_node=4),
        model=tiny_model(8, 2),
        max_tokens_per_rank=10,
        options=options,
    )
    budget = placeable_tokens(planner, at_most=1000)
    assert budget == expected
    assert placeable_tokens(planner, at_most=7) == 7
    (tmp_path / "long.txt").write_text("x" * expected)
    (tmp_path / "short.txt").write_text("x")
    with pytest.raises(DataError, match=rf"'long\.txt' has {expected + 2} tokens, a plan can place {expected}; raise"):
        load_corpus(DataConfig(source=str(tmp_path)), budget_tokens=budget)
    corpus = load_corpus(DataConfig(source=str(tmp_path), overlong="skip"), budget_tokens=budget)
    assert (corpus.lengths.tolist(), corpus.report.sources[0].skipped) == ([3], 1)
    cut = load_corpus(DataConfig(source=str(tmp_path), overlong="truncate"), budget_tokens=budget)
    assert cut.lengths.tolist() == [expected, 3]
    with pytest.raises(SpecError, match="overlong='skip' has no effect without max_tokens_per_sample"):
        load_corpus(DataConfig(source=str(tmp_path), overlong="skip"))
