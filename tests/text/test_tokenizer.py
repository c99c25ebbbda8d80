"""The tokenizer of a model folder."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, normalizers, pre_tokenizers

from gllm.text.tokenizer import Tokenizer, TooManyTokensError, compute_max_token_characters
from tests.support.examples import num_examples
from tests.support.text import tokenizers as some


def test_round_trip_and_special_ids(tmp_path):
    tokenizer = Tokenizer.load(some.save(tmp_path, some.byte_level()))
    ids = tokenizer.encode("Grüße <|end|>")
    assert tokenizer.decode(ids) == "Grüße "
    assert tokenizer.decode(ids, skip_special_tokens=False) == "Grüße <|end|>"
    assert tokenizer.special_token_ids == {0, 1, 2}
    assert tokenizer.vocab_size == 402
    assert tokenizer.id_to_token(10**6) is None
    assert tokenizer.id_to_token(-1) is None


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


def test_a_text_that_cannot_fit_is_not_tokenized():
    """By its characters, whatever it says: no token of this vocabulary is as long."""
    tokenizer = Tokenizer(some.byte_level())
    longest = max(map(len, some.byte_level().get_vocab()))
    with pytest.raises(TooManyTokensError) as raised:
        tokenizer.encode("x" * (longest * 7 + 1), max_tokens=7)
    assert (raised.value.count, raised.value.is_exact) == (8, False)


def test_others_run_while_a_long_text_is_tokenized():
    """The longest time without a turn is a part of the whole, not all of it."""
    tokenizer = Tokenizer(some.byte_level())
    text = some.CORPUS[0] * 3000
    times: list[float] = []

    def encode() -> None:
        times.append(time.perf_counter())
        tokenizer.encode(text)
        times.append(time.perf_counter())

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(encode)
        turns = []
        while not done.done():
            turns.append(time.perf_counter())
    begin, end = times
    inside = [begin, *(turn for turn in turns if begin < turn < end), end]
    assert max(b - a for a, b in itertools.pairwise(inside)) < 0.5 * (end - begin)


def test_too_many_tokens():
    tokenizer = Tokenizer(some.byte_level())
    count = len(tokenizer.encode("Hello world"))
    assert len(tokenizer.encode("Hello world", max_tokens=count)) == count
    with pytest.raises(TooManyTokensError) as raised:
        tokenizer.encode("Hello world", max_tokens=count - 1)
    assert (raised.value.count, raised.value.is_exact) == (count, True)


@settings(max_examples=num_examples(40, 1500), deadline=None)
@given(st.text(st.sampled_from("aHelo world\n\t 你e\u0301🎉\u1f82\u1100\u1161\u11a8"), max_size=60))
def test_no_text_has_fewer_tokens_than_its_length_tells(text):
    composing = some.byte_level()
    composing.normalizer = normalizers.NFC()
    for backend in (some.byte_level(), composing, some.sentencepiece(), some.metaspace()):
        longest = compute_max_token_characters(backend)
        assert longest is not None
        assert len(text) <= longest * len(backend.encode(text, add_special_tokens=False))


def test_tokenizers_that_may_drop_text_have_no_longest_token():
    dropping, swallowing, lossy = some.byte_level(), some.byte_level(), some.byte_level()
    dropping.pre_tokenizer = pre_tokenizers.Whitespace()
    swallowing.add_special_tokens([AddedToken("<pad>", lstrip=True)])
    lossy.normalizer = normalizers.Strip()
    for backend in (some.word_piece(), dropping, swallowing, lossy):
        assert compute_max_token_characters(backend) is None
