from pathlib import Path

import pytest


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> str:
    """The path of a Hugging Face tokenizer file that knows the words a, b and c as 1, 2 and 3."""
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    path = tmp_path / "words" / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return str(path)
