"""Samples as they are read, and where they go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerwise.data.config import DataConfig
from layerwise.data.corpus import load_corpus
from layerwise.data.stream import SampleStream
from layerwise.errors import DataError, SpecError

LINES = [{"input_ids": [1] * 4}, {"input_ids": []}, {"text": ""}, {"input_ids": [2] * 9}, {"input_ids": [3]}]


@pytest.fixture
def config(tmp_path: Path) -> DataConfig:
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return DataConfig(source=str(tmp_path), bad_rows="skip")


def test_a_stream_gives_what_a_corpus_holds(config: DataConfig) -> None:
    stream, corpus = SampleStream(config), load_corpus(config)
    for _ in range(2):
        assert [(s.name, s.input_ids.tolist()) for s in stream] == [(s.name, s.input_ids.tolist()) for s in corpus]
    assert stream.counts == {"samples": 3, "bad_rows": 1, "empty": 1, "truncated": 0}


def test_policies(config: DataConfig) -> None:
    cut = SampleStream(config.model_copy(update={"overlong": "truncate"}), budget_tokens=5)
    assert [len(sample) for sample in cut] == [4, 5, 1]
    assert cut.counts["truncated"] == 1
    for limits in ((5, 7), (7, 5)):  # configured, and what a plan can place: the smaller one counts
        both = config.model_copy(update={"overlong": "truncate", "max_tokens_per_sample": limits[0]})
        assert [len(sample) for sample in SampleStream(both, budget_tokens=limits[1])] == [4, 5, 1]
    fewer = SampleStream(config.model_copy(update={"overlong": "skip"}), budget_tokens=5)
    assert [len(sample) for sample in fewer] == [4, 1]
    assert fewer.counts["skipped"] == 1
    with pytest.raises(DataError, match=r"'x\.jsonl:4' has 9 tokens, a plan can place 5"):
        list(SampleStream(config, budget_tokens=5))
    with pytest.raises(DataError, match=r"x\.jsonl, line 2: expected a non-empty list.*; or set bad_rows to 'skip'"):
        list(SampleStream(config.model_copy(update={"bad_rows": "error"})))
    with pytest.raises(DataError, match=r"'x\.jsonl:4': token 2 at position 0 is not in \[0, vocab_size=2\)"):
        list(SampleStream(config, vocab_size=2))


@pytest.mark.parametrize("option", [{"max_samples": 3}, {"cache_dir": "x"}, {"planning_window_steps": 2}])
def test_what_needs_all_rows_at_once_is_refused(config: DataConfig, option: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=f"{next(iter(option))}=.* has no effect on a stream"):
        SampleStream(config.model_copy(update=option))
