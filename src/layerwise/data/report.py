"""What became of files, rows and samples: counted per source, and said in a sentence each."""

from __future__ import annotations

from dataclasses import dataclass

from layerwise.labels import counted


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Counts of one source; `weight` is its share of the tokens of each step in a mixture."""

    name: str
    weight: float | None
    files: int
    ignored_files: int  # of another extension
    bad_files: int  # unreadable, skipped
    bad_rows: int  # corrupt, skipped
    samples: int
    tokens: int
    skipped: int  # longer than the limit
    truncated: int
    empty: int
    not_chosen: int  # beyond max_samples

    def __str__(self) -> str:
        text = f"{counted(self.samples, 'sample')}, {counted(self.tokens, 'token')} from {counted(self.files, 'file')}"
        counts = (
            (self.bad_files, "files unreadable, skipped"),
            (self.bad_rows, "rows corrupt, skipped"),
            (self.skipped, "skipped as too long"),
            (self.truncated, "truncated"),
            (self.empty, "empty, skipped"),
            (self.not_chosen, "beyond max_samples"),
            (self.ignored_files, "other files ignored"),
        )
        head = "" if self.weight is None else f"{self.name} (weight {self.weight:g}): "
        return head + text + "".join(f"; {count:,} {what}" for count, what in counts if count)


@dataclass(frozen=True, kw_only=True)
class CorpusReport:
    """The counts of every source."""

    sources: tuple[SourceReport, ...]

    @property
    def samples(self) -> int:
        """Of all sources."""
        return sum(source.samples for source in self.sources)

    @property
    def tokens(self) -> int:
        """Of all sources."""
        return sum(source.tokens for source in self.sources)

    def __str__(self) -> str:
        if len(self.sources) == 1:
            return str(self.sources[0])
        parts = "\n  ".join(map(str, self.sources))
        counts = f"{counted(self.samples, 'sample')}, {counted(self.tokens, 'token')}"
        return f"{counts} from {len(self.sources)} sources\n  {parts}"
