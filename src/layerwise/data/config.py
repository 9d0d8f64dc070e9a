"""What to train on, as a validated record."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from layerwise.spec import Record

STDLIB = "stdlib"
TEXT_EXTENSIONS = frozenset(
    {".txt", ".md", ".rst", ".tex", ".html", ".css", ".sql", ".sh"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"}
    | {".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".swift", ".lua", ".jl"}
)


class DataConfig(Record):
    """Where samples come from and what happens to them.

    `source` is "stdlib" (the Python files of the running interpreter's standard library), a file, or a
    folder that is read recursively. `format` "auto" goes by file names: .jsonl and .parquet files hold one
    sample per row, every other file is one sample of text. A row with `input_ids` (and maybe `labels`, same
    length, -100 = ignored) is taken as tokens unless `text_field` names the column to tokenise, by default
    "text".

    `overlong` says what happens to samples of more than `max_tokens_per_sample` tokens. `max_samples` keeps a
    random choice, drawn by `seed`, in file order; `seed` also shuffles the epochs.
    """

    source: str = Field(default=STDLIB, min_length=1)
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    text_field: str | None = Field(default=None, min_length=1)
    extensions: tuple[str, ...] | None = Field(default=None, min_length=1, description="of text files, e.g. ['.py']")
    tokenizer: str | None = Field(default=None, description="a Hugging Face tokenizer.json; None: bytes")
    max_tokens_per_sample: int | None = Field(default=None, ge=1)
    overlong: Literal["skip", "truncate", "error"] = "error"
    max_samples: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.source == STDLIB:
            for key, unused in (("format", "auto"), ("text_field", None), ("extensions", None)):
                if getattr(self, key) != unused:
                    raise ValueError(f"{key}={getattr(self, key)!r} has no effect with source='stdlib'; leave it out")
        wrong = [e for e in self.extensions or () if not e.startswith(".")]
        if wrong:
            raise ValueError(f"extensions start with a dot, as in '.py'; got {wrong}")
        if self.overlong != "error" and self.max_tokens_per_sample is None:
            raise ValueError(
                f"overlong={self.overlong!r} has no effect without max_tokens_per_sample; set both or neither"
            )
        return self
