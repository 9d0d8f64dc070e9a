"""What to train on, as validated records."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from layerwise.data.window import MAX_WINDOW_STEPS
from layerwise.spec import Record

STDLIB = "stdlib"
TEXT_EXTENSIONS = frozenset(
    {".txt", ".md", ".rst", ".tex", ".html", ".css", ".sql", ".sh"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".kt", ".scala"}
    | {".js", ".jsx", ".ts", ".tsx", ".rb", ".php", ".swift", ".lua", ".jl"}
)


class SourceConfig(Record):
    """Where samples come from.

    `source` is "stdlib" (the Python files of the running interpreter's standard library), a file, a folder that
    is read recursively, a .manifest file that lists files of its folder, or, with format "huggingface", what
    `datasets` loads: a folder that `save_to_disk` wrote, or a name or folder for `load_dataset`.

    `format` "auto" goes by file names: .jsonl, .parquet and .arrow/.feather files hold one sample per row, every
    other file is one sample of text. A row holds `input_ids` (and maybe `labels`, same length, -100 = ignored), else
    a chat in `messages`, else text in `text`; `text_field` names the column to tokenise whatever else there is.

    `max_samples` keeps a random choice, drawn by the seed, in the order of the source.
    """

    source: str = Field(default=STDLIB, min_length=1)
    format: Literal["auto", "text", "jsonl", "parquet", "arrow", "huggingface"] = "auto"
    text_field: str | None = Field(default=None, min_length=1)
    extensions: tuple[str, ...] | None = Field(default=None, min_length=1, description="of text files, e.g. ['.py']")
    subset: str | None = Field(default=None, min_length=1, description="the `name` of datasets.load_dataset")
    split: str | None = Field(default=None, min_length=1, description="of a Hugging Face dataset; None: train")
    streaming: bool = Field(default=False, description="a Hugging Face dataset is read as it is fetched")
    max_samples: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_source(self) -> SourceConfig:
        hub = {"subset": None, "split": None, "streaming": False}
        if self.source == STDLIB:
            self._refuse({"format": "auto", "text_field": None, "extensions": None, **hub}, "source='stdlib'")
        elif self.format == "huggingface":
            self._refuse({"extensions": None}, "format='huggingface'")
        else:
            self._refuse(hub, f"format={self.format!r}, only with 'huggingface'")
        wrong = [e for e in self.extensions or () if not e.startswith(".")]
        if wrong:
            raise ValueError(f"extensions start with a dot, as in '.py'; got {wrong}")
        return self

    def _refuse(self, defaults: dict[str, Any], reason: str) -> None:
        for key, unused in defaults.items():
            if getattr(self, key) != unused:
                raise ValueError(f"{key}={getattr(self, key)!r} has no effect with {reason}; leave it out")


class WeightedSource(SourceConfig):
    """One source of a mixture; `weight` is its share of the tokens, relative to the other weights."""

    weight: float = Field(gt=0)


class DataConfig(SourceConfig):
    """Where samples come from, one source or a `mixture` of named ones, and what happens to them.

    `tokenizer` is a Hugging Face tokenizer.json, None: bytes. `chat_template` is a file with a Jinja template, None:
    the one beside the tokenizer. `overlong` says what happens to samples of more than `max_tokens_per_sample` tokens,
    or of more than a plan can place; `bad_rows` to files and rows that cannot be read. `cache_dir`: tokenised once and
    kept there; None: in memory, anew each time. `seed` shuffles the epochs. In every window of `planning_window_steps`
    steps samples move between the steps so that these become alike; 1: none moves.
    """

    mixture: dict[str, WeightedSource] | None = Field(default=None, min_length=1)
    tokenizer: str | None = Field(default=None, min_length=1)
    chat_template: str | None = Field(default=None, min_length=1)
    max_tokens_per_sample: int | None = Field(default=None, ge=1)
    overlong: Literal["skip", "truncate", "error"] = "error"
    bad_rows: Literal["skip", "error"] = "error"
    cache_dir: str | None = Field(default=None, min_length=1)
    seed: int = Field(default=0, ge=0)
    planning_window_steps: int = Field(default=1, ge=1, le=MAX_WINDOW_STEPS)

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if self.mixture is not None:
            unused = {key: field.default for key, field in SourceConfig.model_fields.items()}
            self._refuse(unused, "mixture; it is a setting of its sources")
        if self.cache_dir is not None and any(source.streaming for source in self.sources.values()):
            raise ValueError(
                "cache_dir has no effect with streaming=true, since nothing tells whether the rows of a stream are "
                "still the same; leave out one of them"
            )
        return self

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The sources of the mixture by name; a lone source is called ''."""
        return {"": self} if self.mixture is None else dict(self.mixture)
