"""Sample lengths from a text file: one whole number of tokens per line."""

from __future__ import annotations

import gzip
import re
import sys
import zlib
from pathlib import Path

from layerwise.errors import DataError

MAX_SAMPLE_TOKENS = 2**31 - 1  # its square, and so every count of query-key pairs, still fits in int64
_GZIP_MAGIC = b"\x1f\x8b"
_RULE = f"expected one whole number of tokens per line, from 1 to {MAX_SAMPLE_TOKENS}"


def read_lengths(path_or_dash: str | Path) -> list[int]:
    """Lengths in tokens, in file order, from a text file, a gzip-compressed one, or standard input ("-").

    Blank lines and everything after a # are skipped. Raises DataError naming the file, the line and its text.
    """
    source = "standard input" if str(path_or_dash) == "-" else str(path_or_dash)
    lengths = [
        _length(text, source, number)
        for number, line in enumerate(_read_text(path_or_dash, source).splitlines(), start=1)
        if (text := line.partition("#")[0].strip())
    ]
    if not lengths:
        raise DataError(f"{source}: holds no lengths; {_RULE}")
    return lengths


def _length(text: str, source: str, number: int) -> int:
    value = int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else 0
    if not 1 <= value <= MAX_SAMPLE_TOKENS:
        raise DataError(f"{source}, line {number}: {text[:60]!r} is not a sample length; {_RULE}")
    return value


def _read_text(path_or_dash: str | Path, source: str) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path_or_dash) == "-" else Path(path_or_dash).read_bytes()
        if data.startswith(_GZIP_MAGIC) or source.endswith(".gz"):
            data = gzip.decompress(data)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{source}: not a whole gzip file ({error}); was it copied or written completely?") from None
    except OSError as error:
        raise DataError(f"{source}: cannot be read: {error.strerror or error}") from None
    return decode_utf8(data, source)


def decode_utf8(data: bytes, source: str) -> str:
    """The text of a UTF-8 file, without a byte order mark. Raises DataError naming the file and the place."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        offset = error.start + len(data) - len(error.object)  # the decoder counts from behind the byte order mark
        line = data.count(b"\n", 0, offset) + 1
        raise DataError(
            f"{source}, line {line}: byte 0x{data[offset]:02x} at offset {offset} is not UTF-8 text; "
            "convert the file to UTF-8, or leave it out"
        ) from None
