import gzip
import io
import sys

import pytest

from layerwise.data.lengths import read_lengths
from layerwise.errors import DataError


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_plain_file_with_blanks_and_comments(tmp_path):
    path = write(tmp_path / "lengths.txt", "# tokens\n37\n\n 51 \n40 # the last\n")
    assert read_lengths(path) == [37, 51, 40]


@pytest.mark.parametrize("data", ["\ufeff3\r\n4\r\n", "3\n4"])
def test_windows_line_ends_and_no_final_line_end(tmp_path, data):
    assert read_lengths(write(tmp_path / "lengths.txt", data)) == [3, 4]


@pytest.mark.parametrize("name", ["lengths.txt.gz", "no_suffix"])
def test_gzip(tmp_path, name):
    assert read_lengths(write(tmp_path / name, gzip.compress(b"1\n2\n3\n", mtime=0))) == [1, 2, 3]


@pytest.mark.parametrize("data", [b"5\n6\n", gzip.compress(b"5\n6\n", mtime=0)])
def test_standard_input(monkeypatch, data):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert read_lengths("-") == [5, 6]


@pytest.mark.parametrize("bad", ["many", "-4", "0", "1.5", "1_000", "1 2", "9" * 30, str(2**31), "٣"])
def test_bad_line_names_file_line_and_text(tmp_path, bad):
    path = write(tmp_path / "lengths.txt", f"12\n\n{bad}\n9\n")
    with pytest.raises(DataError, match=r"lengths\.txt, line 3: ") as error:
        read_lengths(path)
    assert repr(bad) in str(error.value)


def test_bad_line_of_standard_input(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"x\n")))
    with pytest.raises(DataError, match="standard input, line 1: 'x'"):
        read_lengths("-")


@pytest.mark.parametrize("data", [b"", b"\n\n", b"# nothing\n", gzip.compress(b"", mtime=0)])
def test_no_lengths(tmp_path, data):
    with pytest.raises(DataError, match="holds no lengths"):
        read_lengths(write(tmp_path / "lengths", data))


def test_half_written_gzip(tmp_path):
    whole = gzip.compress("\n".join(map(str, range(1, 5000))).encode())
    for data in (whole[: len(whole) // 2], whole[:-4], whole[:1]):
        with pytest.raises(DataError, match=r"lengths\.gz: not a whole gzip file"):
            read_lengths(write(tmp_path / "lengths.gz", data))


def test_corrupt_gzip(tmp_path):
    data = bytearray(gzip.compress(b"1\n2\n3\n" * 100, mtime=0))
    data[15] ^= 0xFF
    with pytest.raises(DataError, match="not a whole gzip file"):
        read_lengths(write(tmp_path / "lengths.gz", bytes(data)))


def test_plain_text_named_gz(tmp_path):
    with pytest.raises(DataError, match="not a whole gzip file"):
        read_lengths(write(tmp_path / "lengths.gz", "1\n2\n"))


def test_not_utf8_names_the_line(tmp_path):
    with pytest.raises(DataError, match=r"lengths\.txt, line 2: byte 0xff at offset 2 is not UTF-8"):
        read_lengths(write(tmp_path / "lengths.txt", b"1\n\xff\n"))


def test_missing_file_and_folder(tmp_path):
    for path in (tmp_path / "none.txt", tmp_path):
        with pytest.raises(DataError, match="cannot be read"):
            read_lengths(path)
