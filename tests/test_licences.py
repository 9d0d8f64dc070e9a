"""The licences of all dependencies are listed."""

from tools.licences import declared, listed


def test_every_dependency_is_listed() -> None:
    assert set(declared()) <= set(listed()), "run `python tools/licences.py` with all extras installed"
    for name, extras in declared().items():
        assert listed()[name].endswith(f"| {', '.join(sorted(extras - {''})) or 'always'} |"), name


def test_every_row_has_a_licence() -> None:
    assert len(listed()) > len(declared())
    for row in listed().values():
        _, _, licence, _, _ = (cell.strip() for cell in row.split("|"))
        assert licence not in ("", "not stated"), row
