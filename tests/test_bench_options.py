"""Options of benches: what cannot be is refused in one line, before any work."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.exchange.__main__ import arguments
from benchmarks.options import at_least, count, each, length_file, named_workload, picture, strategies, target, whole


@pytest.mark.parametrize(
    ("option", "text", "message"),
    [
        (count, "0", "'0' is no whole number of at least 1"),
        (count, "-1", "'-1' is no whole number"),
        (count, "1.5", "'1.5' is no whole number"),
        (at_least(1), "0.9", "'0.9' is no number of at least 1"),
        (at_least(0), "nan", "'nan' is no number"),
        (at_least(0), "inf", "'inf' is no number"),
        (each(at_least(0.1)), "1,abc", "'abc' is no number of at least 0.1"),
        (each(at_least(0.1)), "", "'' is no number"),
        (whole(2, 4), "5", "'5' is no whole number of at least 2 and at most 4"),
        (each(whole(2, 4)), "2,2.5", "'2.5' is no whole number"),
        (whole(512, of=512), "600", "'600' is no whole number of at least 512, a multiple of 512"),
        (length_file, "/nonexistent", "/nonexistent"),
        (named_workload, "nope", "nope"),
        (strategies, "dynamic,nope", "unknown strategy 'nope'; legal values: static, dynamic"),
        (strategies, "", "unknown strategy ''"),
        (target, "/nonexistent/x.json", "no such folder '/nonexistent'"),
        (picture, "x.foo", "'x.foo' must end in .png"),
    ],
)
def test_what_cannot_be_is_refused(option: Callable[[str], Any], text: str, message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        option(text)


def test_what_can_be() -> None:
    assert count("12") == 12
    assert each(at_least(0.1))("0.1,16") == [0.1, 16.0]
    assert strategies("joint,dynamic") == ["joint", "dynamic"]
    assert picture("a.png") == Path("a.png")
    assert whole(512, of=512)("1024") == 1024
    assert named_workload("paper").name == "paper"


@pytest.mark.parametrize("wrong", [["--ranks", "3"], ["--ranks", "0"], ["--megabytes", "0.01"], ["--repeats", "0"]])
def test_a_bench_says_which_option_is_wrong(wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr("sys.argv", ["bench", *wrong])
    with pytest.raises(SystemExit) as ended:
        arguments()
    assert ended.value.code == 2
    assert f"argument {wrong[0]}" in capsys.readouterr().err.splitlines()[-1]
