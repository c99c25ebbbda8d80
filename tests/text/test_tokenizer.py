"""The tokenizer of a model folder."""

import pytest

from gllm.text.tokenizer import Tokenizer
from tests.text import tokenizers_for_tests as some


def test_round_trip_and_special_ids(tmp_path):
    tokenizer = Tokenizer.load(some.save(tmp_path, some.byte_level()))
    ids = tokenizer.encode("Grüße <|end|>")
    assert tokenizer.decode(ids) == "Grüße "
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Grüße <|end|>"
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 402
    assert tokenizer.token(10**6) is None
    assert tokenizer.token(-1) is None


def test_no_truncation_from_the_training_run(tmp_path):
    backend = some.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    tokenizer = Tokenizer.load(some.save(tmp_path, backend))
    assert tokenizer.decode(tokenizer.encode(some.CORPUS[0])) == some.CORPUS[0]


def test_kinds():
    assert Tokenizer(some.byte_level()).is_byte_level
    assert not Tokenizer(some.sentencepiece()).is_byte_level


def test_bytes_of_single_tokens():
    byte_level, pieces = Tokenizer(some.byte_level()), Tokenizer(some.sentencepiece())
    text = "Grüße 🎉, two words"
    ids = byte_level.encode(text)
    assert b"".join(byte_level.token_bytes(i) for i in ids) == text.encode()
    ids = pieces.encode("Hello world é\n🎉")
    assert b"".join(pieces.token_bytes(i) for i in ids) == " Hello world é\n🎉".encode()
    assert byte_level.token_bytes(2) == b"<|im_end|>"
    assert pieces.token_bytes(1) == b"<s>"
    assert pieces.token_bytes(10**6) == b""


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)


def test_broken_file_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": 1}')
    with pytest.raises(ValueError, match=r"tokenizer\.json is no tokenizer"):
        Tokenizer.load(tmp_path)


def test_broken_template_is_told(tmp_path):
    some.save(tmp_path, some.byte_level(), chat_template="{% for %}")
    with pytest.raises(ValueError, match="chat template is broken"):
        Tokenizer.load(tmp_path)
