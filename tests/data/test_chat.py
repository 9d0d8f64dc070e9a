"""Chats: the template's text, and labels on the answers only."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerwise.data.config import DataConfig
from layerwise.data.corpus import Corpus, load_corpus
from layerwise.errors import DataError, LayerwiseError, SpecError

CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "hé?"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "é<assistant>"},
]


def load(tmp_path: Path, template: str, *rows: object, **options: object) -> Corpus:
    (tmp_path / "chat.jinja").write_text(template)
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {"chat_template": str(tmp_path / "chat.jinja")} | options
    return load_corpus(DataConfig(source=str(tmp_path / "x.jsonl"), **settings))


def learned(corpus: Corpus, index: int = 0) -> tuple[str, str]:
    """All the text of a sample of bytes, and its learned part."""
    sample = corpus[index]
    labels = sample.input_ids if sample.labels is None else sample.labels
    assert all(label in (-100, token) for label, token in zip(labels, sample.input_ids, strict=True))
    return bytes(sample.input_ids.tolist()).decode(), bytes(labels[labels >= 0].tolist()).decode()


def test_labels_are_on_answers_and_their_end_only(tmp_path: Path) -> None:
    text, answers = learned(load(tmp_path, CHATML, {"messages": CHAT}))
    assert text == ("<system>be brief</><user>hé?</><assistant>yes</><user>sure?</><assistant>é<assistant></>")
    assert answers == "yes</>é<assistant></>"


def test_generation_marks_decide_where_there_are_any(tmp_path: Path) -> None:
    marked = (
        "{%- for m in messages %}[{{ m.role }}]"
        "{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{%- endgeneration %}!{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}"
    )
    text, answers = learned(load(tmp_path, marked, {"messages": CHAT[1:4]}))
    assert text == "[user]hé?[assistant]yes![user]sure?"
    assert answers == "yes"


def test_a_chat_without_answers_is_all_ignored(tmp_path: Path) -> None:
    assert learned(load(tmp_path, CHATML, {"messages": CHAT[:2]}))[1] == ""


def test_tools_special_tokens_and_the_template_beside_a_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "<s>": 1, "hi": 2, "there": 3, "get": 4}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = (
        "{{ bos_token }} {{ tools[0].name }} {% for m in messages %}"
        "{{ m.content }} {% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    )
    settings = {"chat_template": [{"name": "default", "template": template}], "bos_token": "<s>"}
    settings["eos_token"] = {"content": "</s>", "special": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    row = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "there"}]}
    corpus = load(
        tmp_path,
        "unused",
        row | {"tools": [{"name": "get"}]},
        chat_template=None,
        tokenizer=str(tmp_path / "tokenizer.json"),
    )
    assert corpus[0].input_ids.tolist() == [1, 4, 2, 3, 5]  # the template's <s>, not a second one
    assert corpus[0].labels.tolist() == [-100, -100, -100, 3, 5]


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (CHATML, [], "messages should be a list of at least one"),
        (CHATML, "hello", "messages should be a list"),
        (CHATML, [{"content": "x"}], "message 1 should be {role, content}"),
        (CHATML, ["x"], "message 1 should be {role, content}"),
        (CHATML, [{"role": "user", "content": "\ufdd0"}], "message 1 holds U"),
        (CHATML, [{"role": "user", "content": "\ud800"}], "half of a surrogate pair"),
        ("{{ raise_exception('roles must alternate') }}", CHAT, "cannot write it: roles must alternate"),
        ("{{ messages[9].content }}", CHAT, "the chat template .* cannot write it"),
        (
            "{{ messages[-1].content }}{{ messages | length }}",
            CHAT,
            "message 3: the chat template writes earlier turns",
        ),
        ("{{ messages.__class__.__mro__ }}", CHAT, "the chat template .* cannot write it.*unsafe"),
        ("{% for i in range(10 ** 9) %}x{% endfor %}", CHAT, "the chat template .* cannot write it.*[Rr]ange"),
    ],
)
def test_chats_that_cannot_be_used_are_named(tmp_path: Path, template: str, messages: object, message: str) -> None:
    with pytest.raises(DataError, match=rf"x\.jsonl, line 2: .*{message}"):
        load(tmp_path, template, {"text": "fine"}, {"messages": messages})


@pytest.mark.parametrize(
    ("template", "message"), [("{% for %}", "chat template .*chat.jinja"), (None, "no chat template")]
)
def test_templates_that_cannot_be_used(tmp_path: Path, template: str | None, message: str) -> None:
    options = {"chat_template": None} if template is None else {}
    with pytest.raises(SpecError, match=message):
        load(tmp_path, template or "", {"messages": CHAT}, **options)


def test_a_template_without_chats(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"chat_template=.* has no effect: no row is a chat"):
        load(tmp_path, CHATML, {"text": "plain"})


def test_a_missing_template_file(tmp_path: Path) -> None:
    with pytest.raises(LayerwiseError, match=r"none\.jinja: cannot be read"):
        load(tmp_path, "", {"messages": CHAT}, chat_template=str(tmp_path / "none.jinja"))
