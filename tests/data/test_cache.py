"""Tokens on disk: the same as in memory, built once, rebuilt where they or their data changed."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest

from layerwise.data.config import DataConfig
from layerwise.data.corpus import Corpus, load_corpus
from layerwise.data.documents import DocumentReader
from layerwise.errors import DataError, SpecError

ROWS = [
    {"input_ids": [7]},
    {"input_ids": [5, 300, 70_000], "labels": [-100, 300, 9]},
    {"input_ids": [0, 1, 2], "labels": [0, 1, 2]},
    {"input_ids": [4, 4], "labels": [-100, -100]},
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "data" / "x.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def load(rows: Path, cache: Path | None, **options: object) -> Corpus:
    return load_corpus(DataConfig(source=str(rows), cache_dir=None if cache is None else str(cache), **options))


def contents(corpus: Corpus) -> list[tuple[str, list[int], list[int] | None]]:
    return [(s.name, s.input_ids.tolist(), None if s.labels is None else s.labels.tolist()) for s in corpus]


def the_store(cache: Path) -> Path:
    (folder,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    return folder


@pytest.fixture
def forbid_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DocumentReader, "read", lambda self, rows: pytest.fail("rows were tokenised again"))


def test_hit_miss_and_memory_are_equal(rows: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    in_memory, miss = load(rows, None), load(rows, tmp_path / "cache")
    request.getfixturevalue("forbid_reading")
    hit = load(rows, tmp_path / "cache")
    expected = [
        ("x.jsonl:1", [7], None),
        ("x.jsonl:2", [5, 300, 70_000], [-100, 300, 9]),
        ("x.jsonl:3", [0, 1, 2], None),  # labels that are the tokens
        ("x.jsonl:4", [4, 4], [-100, -100]),
    ]
    assert contents(in_memory) == contents(miss) == contents(hit) == expected
    assert in_memory.fingerprint == miss.fingerprint == hit.fingerprint
    assert hit.lengths.tolist() == [1, 3, 3, 2]
    assert isinstance(hit.parts[0].store.arrays["tokens"], np.memmap)


def test_smallest_dtype_and_no_labels_where_all_tokens_are_learned(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc")
    store = load_corpus(DataConfig(source=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "c"))).parts[0].store
    assert store.arrays["tokens"].dtype == np.uint16  # 257 ends the text
    assert "labels" not in store.arrays


def test_limits_and_choices_use_the_same_cache(rows: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    load(rows, tmp_path / "cache")
    request.getfixturevalue("forbid_reading")
    cut = load(rows, tmp_path / "cache", max_tokens_per_sample=2, overlong="truncate", max_samples=3, seed=4)
    assert max(cut.lengths) == 2
    assert len(cut) == 3


def test_changed_data_is_tokenised_again(rows: Path, tmp_path: Path) -> None:
    load(rows, tmp_path / "cache")
    before = rows.stat()
    rows.write_text(rows.read_text().replace("[7]", "[8]"))
    os.utime(rows, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert contents(load(rows, tmp_path / "cache"))[0] == ("x.jsonl:1", [8], None)


def test_another_tokenizer_or_column_is_another_cache(tmp_path: Path, word_tokenizer: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"text": "a b", "body": "c"}\n')
    cache = tmp_path / "cache"
    assert load(path, cache)[0].input_ids.tolist() == [256, 97, 32, 98, 257]
    assert load(path, cache, tokenizer=word_tokenizer)[0].input_ids.tolist() == [1, 2]
    assert load(path, cache, tokenizer=word_tokenizer, text_field="body")[0].input_ids.tolist() == [3]


@pytest.mark.parametrize("name", ["tokens.npy", "labels.npy", "offsets.npy", "digests.npy", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flipped", "gone"])
def test_damage_is_seen_said_once_and_repaired(
    rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, damage: str
) -> None:
    cache = tmp_path / "cache"
    expected = contents(load(rows, cache))
    file = the_store(cache) / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(data if damage == "flipped" else data[:-1])
    with caplog.at_level(logging.WARNING, "layerwise.data"):
        assert contents(load(rows, cache)) == expected
        assert contents(load(rows, cache)) == expected
    assert [r.message.partition(" (")[0] for r in caplog.records] == [f"the token cache {the_store(cache)} is damaged"]


def test_a_file_too_large_to_be_read_whole_is_still_measured(
    rows: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layerwise.data.cache.CHECKED_AT_OPEN_BYTES", 0)
    expected = contents(load(rows, tmp_path / "cache"))
    file = the_store(tmp_path / "cache") / "tokens.npy"
    file.write_bytes(file.read_bytes() + b"more")
    assert contents(load(rows, tmp_path / "cache")) == expected
    assert "tokens.npy has " in caplog.text


def test_damage_after_opening_is_seen_when_the_sample_is_read(rows: Path, tmp_path: Path) -> None:
    corpus = load(rows, tmp_path / "cache")
    file = the_store(tmp_path / "cache") / "tokens.npy"
    with file.open("r+b") as tokens:
        tokens.seek(file.stat().st_size - 4)
        tokens.write(b"\1")
    assert corpus[0].input_ids.tolist() == [7]
    with pytest.raises(DataError, match=r"sample 'x\.jsonl:4': its cached tokens are not those that were written"):
        corpus[3]


def test_a_build_that_fails_leaves_nothing_behind(rows: Path, tmp_path: Path) -> None:
    rows.write_text(rows.read_text() + "{\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 5.*; or set bad_rows to 'skip'"):
        load(rows, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_skipped_rows_are_remembered(rows: Path, tmp_path: Path) -> None:
    rows.write_text("{\n" + rows.read_text())
    for _ in range(2):
        assert load(rows, tmp_path / "cache", bad_rows="skip").report.sources[0].bad_rows == 1
    with pytest.raises(DataError, match=r"x\.jsonl, line 1: not a whole JSON object.*; or set bad_rows to 'skip'"):
        load(rows, tmp_path / "cache", bad_rows="error")


def test_remains_of_a_killed_build_are_removed(rows: Path, tmp_path: Path) -> None:
    load(rows, tmp_path / "cache")
    store = the_store(tmp_path / "cache")
    left = store.with_name(f".{store.name}.0123.part")
    store.rename(left)
    load(rows, tmp_path / "cache")
    assert not left.exists()
    assert the_store(tmp_path / "cache") == store


def _build_together(start: object, rows: Path, cache: Path, said: object) -> None:
    built = []
    read = DocumentReader.read
    DocumentReader.read = lambda self, rows: built.append(1) or read(self, rows)  # type: ignore[method-assign]
    start.wait()
    try:
        said.put((contents(load(rows, cache)), len(built)))
    except Exception as error:
        said.put((repr(error), len(built)))
        raise


@pytest.mark.ranks
def test_of_processes_that_start_at_once_one_builds(rows: Path, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    start, said = context.Barrier(4), context.Queue()
    processes = [
        context.Process(target=_build_together, args=(start, rows, tmp_path / "cache", said)) for _ in range(4)
    ]
    for process in processes:
        process.start()
    found = [said.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
    assert all(found[0][0] == other for other, _ in found)
    assert sum(built for _, built in found) == 1


def test_without_locks_the_loser_takes_what_the_winner_built(
    rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def no_locks(*_: object) -> None:
        raise OSError("no locks here")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    read = DocumentReader.read

    def outrun(self: DocumentReader, found: object) -> object:
        monkeypatch.setattr(DocumentReader, "read", read)
        winner.append(load(rows, tmp_path / "cache"))
        return read(self, found)

    winner: list[Corpus] = []
    monkeypatch.setattr(DocumentReader, "read", outrun)
    assert contents(load(rows, tmp_path / "cache")) == contents(winner[0])
    assert not list((tmp_path / "cache").glob(".*.part"))


def test_a_folder_that_cannot_be_written(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(DataError, match=r"cache_dir .*cache: cannot be used: .*leave cache_dir out"):
        load(rows, tmp_path / "cache")


def test_a_full_disk(rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_2_0", full)
    with pytest.raises(DataError, match="No space left on device; make room"):
        load(rows, tmp_path / "cache")
    assert [path for path in (tmp_path / "cache").iterdir() if not path.name.endswith(".lock")] == []


def test_rows_of_unknown_identity_are_not_cached(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"cache_dir=.* has no effect"):
        load_corpus(DataConfig(cache_dir=str(tmp_path)), rows=[{"text": "a"}])
