"""Write docs/licences.md from the metadata of installed packages: python tools/licences.py, with all extras installed.

A package of pyproject.toml that cannot be installed here keeps the row that it has in the file.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "licences.md"
DEVELOPMENT = "dev", "peers"

_HEAD = """# Licences of dependencies

Layerwise is under Apache-2.0 ([LICENSE](../LICENSE)). Its dependencies are installed by pip; none is shipped with it.
`python tools/licences.py` makes this page from what the packages say of themselves, and a test fails where one that
`pyproject.toml` names is missing. Linux builds of torch with CUDA also bring NVIDIA's libraries (`nvidia-*`), which
are under NVIDIA's own terms.
"""


def declared() -> dict[str, set[str]]:
    """The extras that ask for each package named in pyproject.toml; "" is layerwise itself."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found: dict[str, set[str]] = {}
    for extra, requirements in {"": project["dependencies"], **project["optional-dependencies"]}.items():
        for requirement in requirements:
            found.setdefault(canonicalize_name(Requirement(requirement).name), set()).add(extra)
    return found


def brought(names: Iterable[str]) -> dict[str, set[str]]:
    """What installed packages bring along, directly or not: which of `names` brings each package."""
    found: dict[str, set[str]] = {}
    for name in names:
        waiting, seen = [name], {name}
        while waiting:
            for other in _required_by(waiting.pop()):
                if other not in seen:
                    seen.add(other)
                    waiting.append(other)
        for other in seen - {name}:
            found.setdefault(other, set()).add(name)
    return found


def _required_by(name: str) -> Iterator[str]:
    try:
        requirements = metadata.requires(name) or []
    except metadata.PackageNotFoundError:
        return
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield canonicalize_name(requirement.name)


def licence_of(name: str) -> str | None:
    """As the package's metadata says, or None where it is not installed."""
    try:
        found = metadata.metadata(name)
    except metadata.PackageNotFoundError:
        return None
    if expression := found.get("License-Expression"):
        return expression
    classifiers = [c.rsplit(" :: ", 1)[1] for c in found.get_all("Classifier") or [] if c.startswith("License ::")]
    text = (found.get("License") or "").strip()
    return " and ".join(classifiers) or (text.splitlines()[0] if text else "not stated")


def listed() -> dict[str, str]:
    """The rows of the page, by package."""
    lines = PAGE.read_text().splitlines() if PAGE.exists() else []
    return {line.split("`")[1]: line for line in lines if line.startswith("| `")}


def main() -> None:
    """Write the page. Raises LookupError for a package that is neither installed nor listed."""
    packages, before = declared(), listed()
    running = {name for name, extras in packages.items() if extras - set(DEVELOPMENT)}
    along = {name: by for name, by in brought(running).items() if name not in packages}

    def table(title: str, column: str, why: dict[str, set[str]]) -> str:
        lines = [f"## {title}", "", f"| package | licence | {column} |", "|---|---|---|"]
        for name in sorted(why):
            licence = licence_of(name)
            if licence is None and name not in before:
                raise LookupError(f"{name} is not installed, and {PAGE} has no row for it: install it, or write one")
            reason = ", ".join(sorted(why[name] - {""})) or "always"
            lines.append(before[name] if licence is None else f"| `{name}` | {licence} | {reason} |")
        return "\n".join([*lines, ""])

    tables = [
        table("To run", "extra", {name: packages[name] for name in running}),
        table("To develop and to compare", "extra", {name: packages[name] for name in set(packages) - running}),
        table("What those of the first table bring along", "brought by", along),
    ]
    PAGE.write_text("\n".join([_HEAD, *tables]))


if __name__ == "__main__":
    main()
