"""What the doctor finds: one record per check, and all of them together."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from layerwise.spec import Record


class Check(Record):
    """One line of the table. `advice` says what to do; empty where nothing is to be done."""

    name: str
    status: Literal["ok", "warning", "wrong"]
    found: str
    advice: str = ""


class Diagnosis(Record):
    """All checks of an installation, in the order of the table; those of one process where the ranks did not meet."""

    checks: tuple[Check, ...] = Field(min_length=1)
    ranks_met: bool = True

    @property
    def is_wrong(self) -> bool:
        """Whether a run would fail, or not be what its config says."""
        return any(check.status == "wrong" for check in self.checks)


def ok(name: str, found: str) -> Check:
    """Nothing to do."""
    return Check(name=name, status="ok", found=found)


def warning(name: str, found: str, advice: str) -> Check:
    """A run would work, but not as well as it could."""
    return Check(name=name, status="warning", found=found, advice=advice)


def wrong(name: str, found: str, advice: str) -> Check:
    """A run would fail, or not be what its config says."""
    return Check(name=name, status="wrong", found=found, advice=advice)
