"""Arrow files, Hugging Face datasets, manifests, rows in hand; faults skipped and counted."""

from __future__ import annotations

import json
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from layerwise.data.config import DataConfig
from layerwise.data.corpus import Corpus, load_corpus
from layerwise.errors import DataError, SpecError, UnsupportedError

TEXTS = [{"text": "one"}, {"text": ""}, {"text": "three"}]


def load(source: object, **options: object) -> Corpus:
    return load_corpus(DataConfig(source=str(source), **options))


def texts(corpus: Corpus) -> list[tuple[str, str]]:
    return [(s.name, bytes(s.input_ids[1:-1].tolist()).decode()) for s in corpus]


def write_arrow(path: Path, rows: list[dict[str, Any]], *, stream: bool = False) -> Path:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    with (pyarrow.ipc.new_stream if stream else pyarrow.ipc.new_file)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


class TestArrow:
    @pytest.mark.parametrize(("name", "stream"), [("x.arrow", False), ("x.arrow", True), ("x.feather", False)])
    def test_file_and_stream_format(self, tmp_path: Path, name: str, stream: bool) -> None:
        write_arrow(tmp_path / name, TEXTS, stream=stream)
        corpus = load(tmp_path)
        assert texts(corpus) == [(f"{name}:1", "one"), (f"{name}:3", "three")]

    @pytest.mark.parametrize("stream", [False, True])
    def test_half_written(self, tmp_path: Path, stream: bool) -> None:
        path = write_arrow(tmp_path / "x.arrow", [{"text": "word " * 50}] * 5, stream=stream)
        path.write_bytes(path.read_bytes()[:-300])
        with pytest.raises(DataError, match=r"x\.arrow: not a readable arrow file.*half-written"):
            load(path)

    def test_a_column_that_is_not_utf8_names_the_row(self, tmp_path: Path) -> None:
        path = write_arrow(tmp_path / "x.arrow", [{"text": "goodXXXX"}, {"text": "badYYYY"}])
        path.write_bytes(path.read_bytes().replace(b"YYYY", b"\xff\xff\xff\xff"))
        with pytest.raises(DataError, match=r"x\.arrow, row 2: not readable"):
            load(path)
        corpus = load(path, bad_rows="skip")
        assert texts(corpus) == [("x.arrow:1", "goodXXXX")]

    def test_offsets_that_lead_out_of_the_data_are_not_followed(self, tmp_path: Path) -> None:
        path = write_arrow(tmp_path / "x.arrow", [{"text": "abcdefg"}, {"text": "hi"}])
        data = path.read_bytes()
        offsets = struct.pack("<3i", 0, 7, 9)
        assert data.count(offsets) == 1
        path.write_bytes(data.replace(offsets, struct.pack("<3i", 0, 2**30, 9)))
        with pytest.raises(DataError, match=r"x\.arrow, row 1: not readable"):
            load(path)


class TestHuggingFace:
    @pytest.fixture
    def datasets(self) -> Any:
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        return datasets

    @pytest.mark.parametrize("streaming", [False, True])
    def test_saved_to_disk(self, tmp_path: Path, datasets: Any, streaming: bool) -> None:
        rows = [{"input_ids": [i, i + 1], "labels": [-100, i + 1]} for i in range(5)]
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "d"))
        corpus = load(tmp_path / "d", format="huggingface", streaming=streaming)
        assert [s.input_ids.tolist() for s in corpus] == [row["input_ids"] for row in rows]
        assert [s.labels.tolist() for s in corpus] == [row["labels"] for row in rows]

    def test_splits(self, tmp_path: Path, datasets: Any) -> None:
        saved = datasets.DatasetDict({name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")})
        saved.save_to_disk(str(tmp_path / "d"))
        name = f"{tmp_path / 'd'}[train]:1"
        assert texts(load(tmp_path / "d", format="huggingface")) == [(name, "train")]
        assert texts(load(tmp_path / "d", format="huggingface", split="test"))[0][1] == "test"
        with pytest.raises(SpecError, match=r"split='other': .* holds train, test"):
            load(tmp_path / "d", format="huggingface", split="other")

    @pytest.mark.parametrize("streaming", [False, True])
    def test_load_dataset(self, tmp_path: Path, datasets: Any, streaming: bool, monkeypatch: Any) -> None:
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in TEXTS))
        corpus = load(tmp_path / "d", format="huggingface", streaming=streaming)
        assert [text for _, text in texts(corpus)] == ["one", "three"]
        with pytest.raises(DataError, match="datasets cannot load it"):
            load(tmp_path / "d", format="huggingface", split="other", streaming=streaming)

    def test_in_hand_and_cached_by_its_fingerprint(self, tmp_path: Path, datasets: Any) -> None:
        config = DataConfig(cache_dir=str(tmp_path / "cache"))
        dataset = datasets.Dataset.from_list(TEXTS)
        assert [text for _, text in texts(load_corpus(config, rows=dataset))] == ["one", "three"]
        other = dataset.map(lambda row: {"text": row["text"].upper()})
        assert [text for _, text in texts(load_corpus(config, rows=other))] == ["ONE", "THREE"]
        assert [text for _, text in texts(load_corpus(config, rows=dataset))] == ["one", "three"]

    def test_streams_are_not_cached(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="cache_dir has no effect with streaming=true"):
            DataConfig(source="x", format="huggingface", streaming=True, cache_dir=str(tmp_path))


class TestManifest:
    def test_lists_files_in_its_order(self, tmp_path: Path) -> None:
        for name in ("b", "a", "c"):
            (tmp_path / name).mkdir()
            (tmp_path / name / "x.txt").write_text(name)
        (tmp_path / "some.manifest").write_text("# two of them\nb/x.txt\n\na/x.txt\n")
        assert texts(load(tmp_path / "some.manifest")) == [("b/x.txt", "b"), ("a/x.txt", "a")]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("../secret.txt", "leads out of the manifest's folder"),
            ("/etc/hostname", "leads out of the manifest's folder"),
            ("sub/../../secret.txt", "leads out of the manifest's folder"),
            ("link.txt", "outside the source"),
        ],
    )
    def test_cannot_lead_out_of_its_folder(self, tmp_path: Path, line: str, message: str) -> None:
        (tmp_path / "secret.txt").write_text("secret")
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "link.txt").symlink_to(tmp_path / "secret.txt")
        (tmp_path / "d" / "x.manifest").write_text(f"{line}\n")
        for bad_rows in ("error", "skip"):
            with pytest.raises(DataError, match=message):
                load(tmp_path / "d" / "x.manifest", bad_rows=bad_rows)

    def test_no_file_twice(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").write_text("x")
        (tmp_path / "x.manifest").write_text("x.txt\n./x.txt\n")
        with pytest.raises(DataError, match=r"'x\.txt' is listed twice|'\./x\.txt' is listed twice"):
            load(tmp_path / "x.manifest")

    def test_a_listed_file_that_is_missing(self, tmp_path: Path) -> None:
        (tmp_path / "x.txt").write_text("x")
        (tmp_path / "x.manifest").write_text("x.txt\ny.txt\n")
        with pytest.raises(DataError, match=r"y\.txt: cannot be read"):
            load(tmp_path / "x.manifest")
        assert load(tmp_path / "x.manifest", bad_rows="skip").report.sources[0].bad_files == 1


class TestBadRows:
    @pytest.mark.parametrize(
        "line",
        [
            b"{",
            b"[1]",
            b'{"text": 3}',
            b'{"text": "\\ud800"}',
            b'{"text": "\xff"}',
            b'{"input_ids": []}',
            b'{"input_ids": [1, NaN]}',
            b'{"input_ids": [1, true]}',
            b'{"input_ids": [1, 2.0]}',
            b'{"input_ids": [1, "2"]}',
            b'{"input_ids": [-1]}',
            b'{"input_ids": [2147483648]}',
            b'{"input_ids": [' + b"9" * 30 + b"]}",
            b'{"input_ids": [' + b"9" * 5000 + b"]}",
            b'{"input_ids": [1], "labels": [-7]}',
            b'{"input_ids": [[1]]}',
            b'{"input_ids": {"a": 1}}',
        ],
    )
    def test_rows(self, tmp_path: Path, line: bytes) -> None:
        (tmp_path / "x.jsonl").write_bytes(b'{"text": "a"}\n' + line + b'\n{"text": "b"}\n')
        with pytest.raises(DataError, match=r"x\.jsonl, line 2: "):
            load(tmp_path)
        corpus = load(tmp_path, bad_rows="skip")
        assert texts(corpus) == [("x.jsonl:1", "a"), ("x.jsonl:3", "b")]
        assert str(corpus.report) == "2 samples, 6 tokens from 1 file; 1 rows corrupt, skipped"

    def test_files(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        (tmp_path / "good.txt").write_text("good")
        (tmp_path / "latin.txt").write_bytes(b"\xe9")
        (tmp_path / "link.txt").symlink_to(tmp_path / "nothing.txt")
        os.mkfifo(tmp_path / "pipe.txt")
        with pytest.raises(DataError, match=r"latin\.txt, line 1: .*not UTF-8"):
            load(tmp_path)
        corpus = load(tmp_path, bad_rows="skip")
        assert texts(corpus) == [("good.txt", "good")]
        assert corpus.report.sources[0].bad_files == 3

    def test_rows_before_a_damaged_part_are_kept(self, tmp_path: Path) -> None:
        pytest.importorskip("pyarrow")
        path = write_arrow(tmp_path / "x.arrow", [{"text": "word " * 50}] * 6, stream=True)
        path.write_bytes(path.read_bytes()[:-300])
        report = load(path, bad_rows="skip").report.sources[0]
        assert (report.samples, report.bad_files) == (4, 1)


def test_rows_in_hand() -> None:
    assert texts(load_corpus(DataConfig(), rows=[{"text": "a"}, "b"])) == [("row:1", "a"), ("row:2", "b")]


@pytest.mark.parametrize(
    ("package", "settings"),
    [
        ("datasets", {"format": "huggingface"}),
        ("pyarrow", {"format": "parquet"}),
        ("jinja2", {"chat_template": "x.txt"}),
    ],
)
def test_a_missing_package_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, settings: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.txt").write_text("x")
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UnsupportedError, match=rf"`{package}`: pip install 'layerwise\[data\]'"):
        load("x.txt", **settings)
