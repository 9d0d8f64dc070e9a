import builtins

import numpy as np
import pytest

from layerwise.data.tokenizer import ByteTokenizer, load_tokenizer
from layerwise.errors import DataError, SpecError, UnsupportedError


def test_bytes_are_framed():
    text, data, empty = ByteTokenizer().encode(["hé", b"\x00\xff", ""])
    assert text.tolist() == [256, 104, 0xC3, 0xA9, 257]
    assert data.tolist() == [256, 0, 255, 257]
    assert empty.tolist() == [256, 257]
    assert text.dtype == np.uint16


def test_every_id_is_in_the_vocabulary():
    tokenizer = ByteTokenizer()
    ids = {*tokenizer.encode([bytes(range(256))])[0].tolist(), tokenizer.pad_id}
    assert ids == set(range(tokenizer.vocab_size))


def test_rendered_bytes_know_their_characters():
    ids, starts = ByteTokenizer().encode_rendered("aé€")
    assert bytes(ids.tolist()) == "aé€".encode()
    assert starts.tolist() == [0, 1, 1, 2, 2, 2]


def test_bytes_are_the_default():
    assert isinstance(load_tokenizer(None), ByteTokenizer)


def test_hugging_face_file(word_tokenizer):
    tokenizer = load_tokenizer(word_tokenizer)
    assert tokenizer.vocab_size == 4
    assert [ids.tolist() for ids in tokenizer.encode(["b a zebra", b"a"])] == [[2, 1, 0], [1]]
    ids, starts = tokenizer.encode_rendered("b a zebra")
    assert ids.tolist() == [2, 1, 0]
    assert starts.tolist() == [0, 2, 4]


def test_a_vocabulary_with_gaps(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "a": 7}, unk_token="[UNK]"))
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path / "tokenizer.json").vocab_size == 8


def test_a_file_that_asks_for_truncation_and_padding_loses_nothing(tmp_path, word_tokenizer):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(word_tokenizer)
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=6)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (ids,) = load_tokenizer(tmp_path / "tokenizer.json").encode(["a b c a"])
    assert ids.tolist() == [1, 2, 3, 1]


def test_missing_file(tmp_path):
    with pytest.raises(SpecError, match=r"none\.json.*no such file"):
        load_tokenizer(tmp_path / "none.json")


@pytest.mark.parametrize("text", ["", "{", '{"model": 3}'])
def test_half_written_file(tmp_path, text):
    path = tmp_path / "tokenizer.json"
    path.write_text(text)
    with pytest.raises(DataError, match=r"tokenizer\.json: not a readable tokenizer"):
        load_tokenizer(path)


def test_missing_package_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def without_tokenizers(name, *args, **kwargs):
        if name == "tokenizers":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_tokenizers)
    with pytest.raises(UnsupportedError, match=r"layerwise\[train\]"):
        load_tokenizer("tokenizer.json")
