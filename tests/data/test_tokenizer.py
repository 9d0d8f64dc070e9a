import builtins

import numpy as np
import pytest

from layerwise.data.tokenizer import ByteTokenizer, load_tokenizer
from layerwise.errors import DataError, SpecError, UnsupportedError


def test_bytes_are_framed():
    assert ByteTokenizer().encode("hé").tolist() == [256, 104, 0xC3, 0xA9, 257]
    assert ByteTokenizer().encode(b"\x00\xff").tolist() == [256, 0, 255, 257]
    assert ByteTokenizer().encode("").tolist() == [256, 257]
    assert ByteTokenizer().encode("x").dtype == np.uint16


def test_every_id_is_in_the_vocabulary():
    tokenizer = ByteTokenizer()
    ids = {*tokenizer.encode(bytes(range(256))).tolist(), tokenizer.pad_id}
    assert ids == set(range(tokenizer.vocab_size))


def test_bytes_are_the_default():
    assert isinstance(load_tokenizer(None), ByteTokenizer)


def test_hugging_face_file(word_tokenizer):
    tokenizer = load_tokenizer(word_tokenizer)
    assert tokenizer.vocab_size == 4
    assert tokenizer.encode("b a zebra").tolist() == [2, 1, 0]


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
