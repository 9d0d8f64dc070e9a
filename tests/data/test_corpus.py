import gzip
import json
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from layerwise.data.config import DataConfig
from layerwise.data.corpus import load_corpus
from layerwise.errors import DataError, SpecError
from layerwise.spec import record_from


def load(source, vocab_size=None, **options):
    return load_corpus(record_from(DataConfig, {"source": str(source), **options}, "test"), vocab_size=vocab_size)


def text_of(sample):
    return bytes(sample.input_ids[1:-1].astype(np.uint8)).decode()


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def write_rows(path, rows):
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_parquet(path, rows):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return path


@pytest.fixture
def fake_stdlib(tmp_path, monkeypatch):
    """A small library in place of the interpreter's."""
    root = tmp_path / "lib"
    write(root / "b.py", "bb")
    write(root / "a.py", "a")
    write(root / "c" / "latin.py", b"# \xe9")
    write(root / "c" / "__init__.py", "")
    write(root / "c" / "notes.txt", "not code")
    write(root / "site-packages" / "other.py", "installed")
    write(root / "c" / "__pycache__" / "cached.py", "cache")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(root)}[name])
    return root


class TestStandardLibrary:
    def test_real_one(self):
        corpus = load("stdlib", vocab_size=259)
        assert len(corpus) > 500
        names = [sample.name for sample in corpus]
        index = names.index("json/decoder.py")
        assert text_of(corpus[index]) == Path(json.decoder.__file__).read_bytes().decode()
        assert corpus.lengths[index] == len(corpus[index])
        assert not any("site-packages" in name for name in names)

    def test_sorted_counted_and_without_installed_packages(self, fake_stdlib):
        corpus = load("stdlib")
        assert [sample.name for sample in corpus] == ["a.py", "b.py", "c/latin.py"]
        assert corpus.lengths.tolist() == [3, 4, 5]
        assert corpus.lengths.dtype == np.int64
        assert corpus[2].input_ids.tolist() == [256, 35, 32, 0xE9, 257]
        assert (corpus.report.sources[0].files, corpus.report.sources[0].empty, corpus.report.tokens) == (4, 1, 12)

    def test_other_tokenizer(self, fake_stdlib, word_tokenizer):
        corpus = load("stdlib", tokenizer=word_tokenizer)
        assert corpus[0].input_ids.tolist() == [1]
        assert len(corpus) == 3

    def test_vocabulary_too_small_for_bytes_is_seen_before_training(self, fake_stdlib):
        with pytest.raises(DataError, match=r"'a\.py': token 256 at position 0 .*\[0, vocab_size=200\)"):
            load("stdlib", vocab_size=200)


class TestTextFolder:
    def test_recursive_sorted_and_filtered(self, tmp_path):
        write(tmp_path / "b" / "deep" / "two.py", "two")
        write(tmp_path / "a.txt", "one")
        write(tmp_path / "b.md", "three")
        write(tmp_path / "picture.png", b"\x89PNG")
        write(tmp_path / ".git" / "config.txt", "hidden")
        corpus = load(tmp_path)
        assert [(s.name, text_of(s)) for s in corpus] == [
            ("a.txt", "one"),
            ("b/deep/two.py", "two"),
            ("b.md", "three"),
        ]
        assert corpus.report.sources[0].ignored_files == 1

    def test_extensions(self, tmp_path):
        write(tmp_path / "a.txt", "one")
        write(tmp_path / "b.cfg", "two")
        assert [s.name for s in load(tmp_path, extensions=[".cfg"])] == ["b.cfg"]

    def test_one_file_of_any_name(self, tmp_path):
        assert text_of(load(write(tmp_path / "NOTES", "hello"))[0]) == "hello"

    def test_empty_documents_are_counted_and_skipped(self, tmp_path):
        write(tmp_path / "a.txt", "")
        write(tmp_path / "b.txt", "x")
        corpus = load(tmp_path)
        assert [s.name for s in corpus] == ["b.txt"]
        assert corpus.report.sources[0].empty == 1

    def test_not_utf8_names_file_and_line(self, tmp_path):
        write(tmp_path / "bad.txt", b"fine\nfine\nb\xff\n")
        with pytest.raises(DataError, match=r"bad\.txt, line 3: byte 0xff at offset 11 .*convert the file to UTF-8"):
            load(tmp_path)
        write(tmp_path / "bad.txt", b"\xef\xbb\xbfa\n\xff\n")
        with pytest.raises(DataError, match=r"bad\.txt, line 2: byte 0xff at offset 5 "):
            load(tmp_path)

    def test_links_within_the_folder(self, tmp_path):
        write(tmp_path / "data" / "a.txt", "public")
        (tmp_path / "data" / "inside.txt").symlink_to(tmp_path / "data" / "a.txt")
        (tmp_path / "data" / "again").symlink_to(tmp_path / "data")
        (tmp_path / "link").symlink_to(tmp_path / "data")
        assert [(s.name, text_of(s)) for s in load(tmp_path / "link")] == [
            ("a.txt", "public"),
            ("inside.txt", "public"),
        ]

    @pytest.mark.parametrize("target", ["secret.txt", "elsewhere"])
    def test_links_out_of_the_folder_are_refused(self, tmp_path, target):
        write(tmp_path / "secret.txt", "secret")
        write(tmp_path / "elsewhere" / "x.txt", "secret")
        write(tmp_path / "data" / "a.txt", "public")
        (tmp_path / "data" / "out.txt").symlink_to(Path("..", target))
        for bad_rows in ("error", "skip"):
            with pytest.raises(DataError, match=rf"out\.txt: a link to .*{target}, outside the source"):
                load(tmp_path / "data", bad_rows=bad_rows)

    def test_nothing_found(self, tmp_path):
        write(tmp_path / "a.bin", "x")
        with pytest.raises(DataError, match=r"no samples \(0 samples, 0 tokens from 0 files; 1 other files ignored"):
            load(tmp_path)

    def test_missing_source(self, tmp_path):
        with pytest.raises(SpecError, match="no such file or folder"):
            load(tmp_path / "none")

    def test_compressed_source(self, tmp_path):
        (tmp_path / "x.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}'))
        with pytest.raises(SpecError, match=r"x\.jsonl\.gz' is compressed, which is not read; decompress it first"):
            load(tmp_path / "x.jsonl.gz")


@pytest.mark.parametrize(("writer", "suffix"), [(write_rows, ".jsonl"), (write_parquet, ".parquet")])
class TestRows:
    def test_text(self, tmp_path, writer, suffix):
        writer(tmp_path / f"x{suffix}", [{"text": "one"}, {"text": ""}, {"text": "three"}])
        corpus = load(tmp_path)
        assert [(s.name, text_of(s)) for s in corpus] == [(f"x{suffix}:1", "one"), (f"x{suffix}:3", "three")]
        assert corpus.report.sources[0].empty == 1

    def test_text_field(self, tmp_path, writer, suffix):
        path = writer(tmp_path / f"x{suffix}", [{"body": "one", "text": "other", "input_ids": [1]}])
        assert text_of(load(path, text_field="body")[0]) == "one"

    def test_missing_or_wrong_field(self, tmp_path, writer, suffix):
        for rows, found in (
            ([{"body": "one"}], "missing"),
            ([{"text": 3}], "int"),
            ([{"text": None}], "NoneType"),
        ):
            path = writer(tmp_path / f"x{suffix}", rows)
            with pytest.raises(DataError, match=rf"x{suffix}, (line|row) 1: 'text' .* is {found}; fields: "):
                load(path)

    def test_tokens_and_labels(self, tmp_path, writer, suffix):
        rows = [
            {"input_ids": [5, 300, 70000], "labels": [-100, 300, 70000]},
            {"input_ids": [1], "labels": None},
        ]
        corpus = load(writer(tmp_path / f"x{suffix}", rows))
        assert corpus.lengths.tolist() == [3, 1]
        assert corpus[0].input_ids.tolist() == [5, 300, 70000]
        assert corpus[0].labels.tolist() == [-100, 300, 70000]
        assert corpus[0].labels.dtype == corpus[0].input_ids.dtype == np.int64
        assert corpus[1].labels is None

    def test_labels_of_another_length(self, tmp_path, writer, suffix):
        path = writer(tmp_path / f"x{suffix}", [{"input_ids": [1, 2], "labels": [1]}])
        with pytest.raises(DataError, match=r"1: 2 input_ids but labels of shape \(1,\)"):
            load(path)

    def test_padding_and_packed_documents_raise(self, tmp_path, writer, suffix):
        whole = {"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "position_ids": [0, 1, 2]}
        for field, values in (("attention_mask", [1, 1, 0]), ("position_ids", [0, 1, 0])):
            path = writer(tmp_path / f"{field}{suffix}", [whole, whole | {field: values}])
            with pytest.raises(DataError, match=f"2: {field} is 0 at position 2, expected"):
                load(path)

    def test_empty_sample_is_named(self, tmp_path, writer, suffix):
        path = writer(tmp_path / f"x{suffix}", [{"input_ids": [1]}, {"input_ids": []}])
        with pytest.raises(DataError, match=r"(line|row) 2: expected a non-empty list of token ids"):
            load(path)

    @pytest.mark.parametrize(
        ("column", "value"), [("input_ids", 259), ("input_ids", -1), ("labels", 400), ("labels", -7)]
    )
    def test_token_outside_the_vocabulary(self, tmp_path, writer, suffix, column, value):
        row = {"input_ids": [1, 2], "labels": [1, -100], column: [3, value]}
        path = writer(tmp_path / f"x{suffix}", [row])
        with pytest.raises(DataError, match=rf"x{suffix}.*1.*: (token|label) {value} at position 1 is not in \[0, "):
            load(path, vocab_size=259)

    def test_not_whole_numbers(self, tmp_path, writer, suffix):
        path = writer(tmp_path / f"x{suffix}", [{"input_ids": [1.5, 2.0]}])
        with pytest.raises(DataError, match="1: input_ids: expected whole numbers that fit 64 bits, got float64"):
            load(path)

    def test_tokenizer_without_effect(self, tmp_path, writer, suffix, word_tokenizer):
        path = writer(tmp_path / f"x{suffix}", [{"input_ids": [1]}])
        with pytest.raises(SpecError, match="has no effect"):
            load(path, tokenizer=word_tokenizer)

    def test_half_written_file(self, tmp_path, writer, suffix):
        path = writer(tmp_path / f"x{suffix}", [{"text": "word " * 50}] * 5)
        path.write_bytes(path.read_bytes()[:-20])
        with pytest.raises(DataError, match=rf"x{suffix}.*half-written"):
            load(path)


def test_parquet_rows_count_on_over_row_groups(tmp_path):
    path = write_parquet(tmp_path / "x.parquet", [{"text": str(i)} for i in range(5)])
    assert [s.name for s in load(path)] == [f"x.parquet:{i}" for i in range(1, 6)]


@pytest.mark.parametrize("line", [b"3", b'["text"]', b'{"text": "\xff"}', b"[" * 100_000])
def test_bad_json_line_is_named(tmp_path, line):
    path = write(tmp_path / "x.jsonl", b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(DataError, match=r"x\.jsonl, line 3: "):
        load(path)


class TestOverlong:
    @pytest.fixture
    def folder(self, tmp_path):
        write_rows(
            tmp_path / "x.jsonl",
            [{"input_ids": list(range(n)), "labels": [*range(4), *[-100] * (n - 4)]} for n in (4, 9, 5, 12)],
        )
        return tmp_path

    def test_skip(self, folder):
        corpus = load(folder, max_tokens_per_sample=5, overlong="skip")
        assert corpus.lengths.tolist() == [4, 5]
        assert (corpus.report.sources[0].skipped, corpus.report.sources[0].truncated) == (2, 0)

    def test_truncate(self, folder):
        corpus = load(folder, max_tokens_per_sample=5, overlong="truncate")
        assert corpus.lengths.tolist() == [4, 5, 5, 5]
        assert corpus[3].input_ids.tolist() == [0, 1, 2, 3, 4]
        assert corpus[3].labels.tolist() == [0, 1, 2, 3, -100]
        assert (corpus.report.sources[0].skipped, corpus.report.sources[0].truncated, corpus.report.tokens) == (
            0,
            2,
            19,
        )

    def test_error_names_sample_length_and_way_out(self, folder):
        with pytest.raises(
            DataError, match=r"'x\.jsonl:2' has 9 tokens, max_tokens_per_sample=5; raise it, or .*'skip'"
        ):
            load(folder, max_tokens_per_sample=5)

    def test_truncated_bytes(self, fake_stdlib):
        corpus = load("stdlib", max_tokens_per_sample=2, overlong="truncate")
        assert [s.input_ids.tolist() for s in corpus][:2] == [[256, 97], [256, 98]]

    def test_all_skipped(self, folder):
        with pytest.raises(DataError, match=r"no samples .*; 4 skipped as too long"):
            load(folder, max_tokens_per_sample=1, overlong="skip")


def test_max_samples_is_a_seeded_choice_in_file_order(tmp_path):
    path = write_rows(tmp_path / "x.jsonl", [{"input_ids": [i]} for i in range(100)])
    ids = [int(s.input_ids[0]) for s in load(path, max_samples=10, seed=1)]
    assert len(set(ids)) == 10
    assert ids == sorted(ids)
    assert ids == [int(s.input_ids[0]) for s in load(path, max_samples=10, seed=1)]
    assert ids != [int(s.input_ids[0]) for s in load(path, max_samples=10, seed=2)]
    assert load(path, max_samples=10).report.sources[0].not_chosen == 90
    assert len(load(path, max_samples=1000)) == 100


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"text_field": "text"},
            {"extensions": [".py"]},
            {"format": "jsonl"},
            {"overlong": "skip"},
            {"max_samples": 0},
            {"colour": "red"},
        ],
    )
    def test_refused_with_the_standard_library(self, options):
        with pytest.raises(SpecError, match=next(iter(options))):
            load("stdlib", **options)

    def test_extensions_have_a_dot(self, tmp_path):
        with pytest.raises(SpecError, match="start with a dot"):
            load(tmp_path, extensions=["py"])

    def test_extensions_without_effect(self, tmp_path):
        write_rows(tmp_path / "x.jsonl", [{"text": "a"}])
        with pytest.raises(SpecError, match=r"extensions=.* has no effect"):
            load(tmp_path, extensions=[".py"], format="jsonl")
        with pytest.raises(SpecError, match=r"extensions=.* has no effect"):
            load(tmp_path / "x.jsonl", extensions=[".py"])

    def test_text_field_without_effect(self, tmp_path):
        write(tmp_path / "a.txt", "x")
        with pytest.raises(SpecError, match="text_field='body' has no effect"):
            load(tmp_path, text_field="body")

    def test_mixed_folder_needs_a_format(self, tmp_path):
        write(tmp_path / "README.md", "x")
        write_rows(tmp_path / "x.jsonl", [{"text": "a"}])
        with pytest.raises(SpecError, match=r"several formats \(jsonl, text\)"):
            load(tmp_path)
        assert [s.name for s in load(tmp_path, format="jsonl")] == ["x.jsonl:1"]
        assert [s.name for s in load(tmp_path, extensions=[".md"])] == ["README.md"]


def test_report_reads_as_a_sentence(tmp_path):
    write_rows(tmp_path / "x.jsonl", [{"text": "abc"}, {"text": ""}, {"text": "abcdefgh"}])
    report = str(load(tmp_path, max_tokens_per_sample=6, overlong="skip").report)
    assert report == "1 sample, 5 tokens from 1 file; 1 skipped as too long; 1 empty, skipped"
