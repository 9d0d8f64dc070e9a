"""Records of settings, and reading them from YAML files, presets and mappings."""

from __future__ import annotations

import math
import os
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from layerwise.errors import SpecError

# Far beyond what exists, and low enough that products of them stay numbers: int64 for bytes, float64 for seconds.
Heads = Annotated[int, Field(ge=1, le=2**16)]
Width = Annotated[int, Field(ge=1, le=2**24)]
Tokens = Annotated[int, Field(ge=1, le=2**31 - 1)]
Rate = Annotated[float, Field(ge=1, le=1e24)]


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [k for k in range(1, math.isqrt(number) + 1) if number % k == 0]
    return sorted({*small, *(number // k for k in small)})


class Record(BaseModel):
    """Base of every settings record: frozen, an unknown key is an error, and true is not the number 1."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, ignored_types=(cached_property,))

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_bool_as_number(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool):
            kind = cls.model_fields[str(info.field_name)].annotation
            if bool not in (kind, *get_args(kind)):
                raise ValueError(f"got {value}, which is legal for yes/no settings only")
        return value


RecordT = TypeVar("RecordT", bound=Record)


def preset_names(prefix: str) -> list[str]:
    """Names of the presets shipped with the package whose file starts with `prefix` ("cluster" or "model")."""
    files = resources.files("layerwise.presets").iterdir()
    return sorted(
        f.name.removesuffix(".yaml").removeprefix(f"{prefix}-") for f in files if f.name.startswith(f"{prefix}-")
    )


def read_settings(source: Any, prefix: str, _seen: tuple[str, ...] = ()) -> dict[str, Any]:
    """The settings in a preset, a YAML file or a mapping; those of its `base`, a preset or file, where it names one.

    `prefix`, "cluster" or "model", says which presets. Raises SpecError.
    """
    data = source if isinstance(source, dict) else _read_source(source, prefix)
    if "base" not in data:
        return data
    seen = (*_seen, str(source))
    if str(data["base"]) in seen:
        raise SpecError(f"{prefix}: {data['base']} is its own base")
    own = {key: value for key, value in data.items() if key != "base"}
    return read_settings(data["base"], prefix, seen) | own


def _read_source(source: Any, prefix: str) -> dict[str, Any]:
    if str(source) in preset_names(prefix):
        return parse_yaml((resources.files("layerwise.presets") / f"{prefix}-{source}.yaml").read_text(), str(source))
    path = Path(str(source))
    if not os.path.isfile(path):  # Path's own raises for a name that is too long
        raise SpecError(f"{prefix} {str(source)!r}: no such file; presets are {', '.join(preset_names(prefix))}")
    return read_yaml(path)


def read_yaml(path: Path) -> dict[str, Any]:
    """The YAML mapping in a file. Raises SpecError."""
    try:
        return parse_yaml(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"{path}: cannot be read: {error}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets the last of two equal keys win in silence; settings must not."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, source: str) -> dict[str, Any]:
    """A YAML mapping; `source` names it in errors. Raises SpecError."""
    try:
        data = yaml.load(text, _UniqueKeyLoader)
    except yaml.YAMLError as error:
        raise SpecError(f"{source}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise SpecError(f"{source}: expected a mapping of settings, got {type(data).__name__}")
    return data


def record_from(cls: type[RecordT], data: dict[str, Any], source: str) -> RecordT:
    """Validate a mapping into a record; every fault is named in one SpecError."""
    try:
        return cls.model_validate(data)
    except ValidationError as error:
        raise SpecError("\n".join(_explain(cls, fault, source) for fault in error.errors())) from None


def _explain(cls: type[Record], fault: Any, source: str) -> str:
    where = ".".join(str(part) for part in fault["loc"])
    text = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        path, name = fault["loc"][:-1], fault["loc"][-1]
        inner = [f"{field}.{name}" for field in _fields_at(cls, path) if name in _fields_at(cls, (*path, field))]
        hint = f", but there is {' and '.join(repr(option) for option in inner)}" if inner else ""
        return f"{source}: unknown option {where!r}{hint}; legal here: {', '.join(sorted(_fields_at(cls, path)))}"
    shown = "" if fault["type"] in ("missing", "value_error") else f" (got {fault['input']!r})"
    return f"{source}: {where + ': ' if where else ''}{text}{shown}"


def _fields_at(cls: type[Record], path: tuple[Any, ...]) -> list[str]:
    """The fields of the record that a place in settings holds; keys that are no field say which part of a union."""
    for key in path:
        field = cls.model_fields.get(key) if isinstance(key, str) else None
        if field is not None:
            records = _records_in(field.annotation)
            if len(records) != 1:
                return ["(see the docs)"]
            cls = records[0]
    return list(cls.model_fields)


def _records_in(annotation: Any) -> list[type[Record]]:
    if isinstance(annotation, type) and issubclass(annotation, Record):
        return [annotation]
    return [record for part in get_args(annotation) for record in _records_in(part)]
