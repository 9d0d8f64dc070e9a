"""Chats as token ids by a Jinja template, with labels on the assistant's answers only.

Which characters are answers is found in one of two ways. A template that marks them, with `{% generation %}` as
`transformers` has it, is believed. Of any other, an answer is what the template writes for the assistant's message
after the generation prompt, its end-of-turn marker included. That needs a template that only ever appends as messages
are added; one that rewrites earlier turns is refused with the chat named.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from layerwise.data.ids import IGNORED_LABEL, encodable
from layerwise.data.tokenizer import TokenIds, Tokenizer
from layerwise.errors import DataError, SpecError, UnsupportedError
from layerwise.plan import Ints

ASSISTANT = "assistant"
# Unicode noncharacters, which no text has a use for, mark the answers of a template with {% generation %}.
_START, _END = "\ufdd0", "\ufdd1"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")

Spans = list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class ChatTemplate:
    """A template and how it was found; `fingerprint` changes where its texts may change."""

    fingerprint: str
    _render: Callable[..., str]
    _marks_answers: bool

    def encode(self, row: Mapping[str, Any], tokenizer: Tokenizer, where: str) -> tuple[TokenIds, Ints]:
        """input_ids and labels [tokens] of a row with `messages` and maybe `tools`. Raises DataError."""
        messages = _messages(row["messages"], where)
        try:
            text, answers = self._text_and_answers(messages, row.get("tools"))
        except DataError as error:
            raise DataError(f"{where}: {error}") from None
        ids, starts = tokenizer.encode_rendered(encodable(text, where))
        learned = np.zeros(len(ids), dtype=bool)
        for lo, hi in answers:
            learned |= (starts >= lo) & (starts < hi)
        return ids, np.where(learned, ids.astype(np.int64), IGNORED_LABEL)

    def _text_and_answers(self, messages: list[dict[str, Any]], tools: Any) -> tuple[str, Spans]:
        """The chat as text, and the [start, end) characters of each answer."""

        def render(num_messages: int, prompt: bool) -> str:
            return self._render(messages=messages[:num_messages], tools=tools, add_generation_prompt=prompt)

        text = render(len(messages), prompt=False)
        if self._marks_answers:
            return _unmark(text)
        answers = []
        for turn, message in enumerate(messages):
            if message["role"] == ASSISTANT:
                before, through = render(turn, prompt=True), render(turn + 1, prompt=False)
                if not (through.startswith(before) and text.startswith(through)):
                    raise DataError(
                        f"message {turn + 1}: the chat template writes earlier turns otherwise once there are later "
                        "ones, so where the answer starts and ends is not known; mark it in the template with "
                        "{% generation %}...{% endgeneration %}"
                    )
                answers.append((len(before), len(through)))
        return text, answers


def load_template(path: str | None, tokenizer: str | None) -> ChatTemplate | None:
    """The template in a file, else the one beside a tokenizer.json, else None.

    Beside it are chat_template.jinja, or `chat_template` in tokenizer_config.json. Special tokens that a template
    names are those of tokenizer_config.json. Raises SpecError, DataError.
    """
    folder = None if tokenizer is None else Path(tokenizer).parent
    settings = {} if folder is None else _tokenizer_config(folder / "tokenizer_config.json")
    source = _find_template(path, folder, settings)
    if source is None:
        return None
    tokens = {name: _token_text(settings[name]) for name in _SPECIAL_TOKENS if settings.get(name) is not None}
    identity = json.dumps([source, tokens], sort_keys=True)
    return ChatTemplate(
        fingerprint=hashlib.blake2b(identity.encode(), digest_size=16).hexdigest(),
        _render=_compile(source, tokens, path or f"that of {tokenizer}"),
        _marks_answers=re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None,
    )


def _find_template(path: str | None, folder: Path | None, settings: dict[str, Any]) -> str | None:
    if path is not None:
        return _read(Path(path))
    beside = None if folder is None else folder / "chat_template.jinja"
    return _read(beside) if beside is not None and beside.is_file() else _template_in(settings)


def _messages(value: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise DataError(f"{where}: messages should be a list of at least one {{role, content}}, got {value!r:.60}")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise DataError(f"{where}: message {number} should be {{role, content}} with a text role: {message!r:.60}")
        if any(mark in _all_text(message) for mark in (_START, _END)):
            raise DataError(f"{where}: message {number} holds U+FDD0 or U+FDD1, which are no characters")
    return [dict(message) for message in value]


def _all_text(message: Mapping[str, Any]) -> str:
    """All texts of a message, however deep, in one."""
    return json.dumps(message, ensure_ascii=False, default=str)


def _unmark(marked: str) -> tuple[str, Spans]:
    """The text without its marks, and the ranges that were marked."""
    head, *parts = marked.split(_START)
    text, answers = head, []
    for part in parts:
        answer, _, rest = part.partition(_END)
        answers.append((len(text), len(text) + len(answer)))
        text += answer + rest
    return text, answers


def _compile(source: str, tokens: dict[str, str], name: str) -> Callable[..., str]:
    try:
        import jinja2
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise UnsupportedError("chats need the package `jinja2`: pip install 'layerwise[data]'") from None

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation_tag(), "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals.update(tokens, raise_exception=refuse)
    try:
        template = environment.from_string(source)
    except jinja2.TemplateError as error:
        raise SpecError(f"chat template {name}: {error}") from None

    def render(**values: Any) -> str:
        try:
            return template.render(**values)
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            raise DataError(f"the chat template {name} cannot write it: {error}") from None

    return render


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As templates expect it; Jinja's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _generation_tag() -> Any:
    """A Jinja extension: {% generation %}...{% endgeneration %} puts marks around what is inside."""
    from jinja2 import nodes
    from jinja2.ext import Extension
    from jinja2.parser import Parser

    class GenerationTag(Extension):
        tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

        def parse(self, parser: Parser) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

        def _mark(self, caller: Callable[[], str]) -> str:
            return _START + caller() + _END

    return GenerationTag


def _tokenizer_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not a whole JSON object: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _template_in(settings: dict[str, Any]) -> str | None:
    """One template, or the one called default out of a list of named ones."""
    found = settings.get("chat_template")
    if isinstance(found, list):
        found = {entry.get("name"): entry.get("template") for entry in found}.get("default")
    return found if isinstance(found, str) else None


def _token_text(token: Any) -> str:
    return str(token["content"] if isinstance(token, dict) else token)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"chat template or tokenizer settings {path}: cannot be read: {error}") from None
