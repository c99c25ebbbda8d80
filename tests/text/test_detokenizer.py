"""Pieces of text join to what decoding everything at once gives."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.text.detokenizer import IncrementalDetokenizer, StopStrings
from gllm.text.tokenizer import Tokenizer
from tests.support.examples import num_examples
from tests.support.text import tokenizers as some

KINDS = {
    "byte-level": Tokenizer(some.byte_level()),
    "llama": Tokenizer(some.sentencepiece()),
    "gemma": Tokenizer(some.sentencepiece(strip=False)),
    "metaspace": Tokenizer(some.metaspace()),
    "wordpiece": Tokenizer(some.word_piece()),
}


def ids_of(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Random ids, a few outside the vocabulary among them."""
    return st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40)


def pieces_of(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer)
    return [stream.push([i])[0] for i in ids] + [stream.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=num_examples(50, 2000), deadline=None)
@given(data=st.data())
def test_random_ids(kind, data):
    tokenizer = KINDS[kind]
    ids = data.draw(ids_of(tokenizer))
    assert "".join(pieces_of(tokenizer, ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "gemma"])
@settings(max_examples=num_examples(40, 2000), deadline=None)
@given(text=st.text(max_size=30))
def test_texts_are_never_cut_inside_a_character(kind, text):
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    if "\ufffd" not in tokenizer.decode(ids):
        assert not any("\ufffd" in piece for piece in pieces)


@settings(max_examples=num_examples(40, 2000), deadline=None)
@given(data=st.data())
def test_cuts_do_not_matter(data):
    tokenizer = KINDS["byte-level"]
    ids = data.draw(ids_of(tokenizer))
    cut = data.draw(st.integers(0, len(ids)))
    stream = IncrementalDetokenizer(tokenizer)
    text = stream.push(ids[:cut])[0] + stream.push(ids[cut:])[0] + stream.finish()
    assert text == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_cost_of_a_token_does_not_grow(kind):
    tokenizer = KINDS[kind]
    # Bytes that never make a character are the worst case: nothing can be shown for good.
    bad = next(
        i for i in range(tokenizer.vocab_size) if tokenizer.id_to_token(i) in ("<0xFF>", "ÿ")
    )
    ids = [bad] * 20_000 + tokenizer.encode("Hello") * 5_000
    stream = IncrementalDetokenizer(tokenizer)
    start = time.monotonic()
    text = "".join(stream.push([i])[0] for i in ids) + stream.finish()
    assert time.monotonic() - start < 5
    assert text == tokenizer.decode(ids)


def test_stop_string_says_which_token_completed_it():
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode("Hello world, how are you today?")
    stream = IncrementalDetokenizer(tokenizer, StopStrings(["how are"]))
    text, used, stop = stream.push(ids)
    assert (text, stop) == ("Hello world, ", "how are")
    assert "how are" in tokenizer.decode(ids[:used])
    assert "how are" not in tokenizer.decode(ids[: used - 1])


def test_unfinished_stop_string_is_shown_at_the_end():
    tokenizer = KINDS["byte-level"]
    stream = IncrementalDetokenizer(tokenizer, StopStrings(["you!"]))
    shown, used, stop = stream.push(tokenizer.encode("thank you"))
    assert (shown, stop) == ("thank ", None)
    assert used == len(tokenizer.encode("thank you"))
    assert stream.finish() == "you"


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=num_examples(30, 1000), deadline=None)
@given(data=st.data())
def test_special_tokens_are_shown_where_asked(kind, data):
    tokenizer = KINDS[kind]
    ids = data.draw(ids_of(tokenizer))
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
    pieces = [stream.push([i])[0] for i in ids] + [stream.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("stop", ["wor", "lo w", "d"])
def test_stop_strings_are_shown_where_asked(stop):
    tokenizer = KINDS["byte-level"]
    ids = tokenizer.encode("Hello world, you")
    cut = IncrementalDetokenizer(tokenizer, StopStrings([stop])).push(ids)
    kept = IncrementalDetokenizer(tokenizer, StopStrings([stop]), include_stop=True).push(ids)
    assert cut[1:] == kept[1:] == (kept[1], stop)
    assert kept[0] == cut[0] + stop
    assert "Hello world, you".startswith(kept[0])


def test_a_stop_string_at_the_very_end_is_shown_where_asked():
    tokenizer = KINDS["llama"]
    ids = tokenizer.encode("Hello \u00e9")
    for include, wanted in ((False, "Hello "), (True, "Hello \u00e9")):
        stream = IncrementalDetokenizer(tokenizer, StopStrings(["\u00e9"]), include_stop=include)
        assert stream.push(ids)[0] + stream.finish() == wanted


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
def test_some_special_tokens_are_shown(kind):
    tokenizer = KINDS[kind]
    names = [
        name for i in tokenizer.special_token_ids if (name := tokenizer.id_to_token(i)) is not None
    ]
    assert len(names) == len(tokenizer.special_token_ids)
    shown, hidden = sorted(names)[:2]
    ids = [i for token in (shown, hidden, shown) if (i := tokenizer.token_to_id(token)) is not None]
    assert len(ids) == 3
    stream = IncrementalDetokenizer(tokenizer, visible_special_tokens=[shown, "no such token"])
    assert "".join(stream.push([i])[0] for i in ids) + stream.finish() == shown * 2


@settings(max_examples=num_examples(100, 5000), deadline=None)
@given(
    text=st.text("ab", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    min_tokens=st.integers(0, 13),
    cut=st.integers(0, 12),
)
def test_stop_strings_that_end_before_min_tokens_do_not_end_the_text(text, stops, min_tokens, cut):
    tokenizer = KINDS["byte-level"]
    ids = [tokenizer.encode(char)[0] for char in text]
    stream = IncrementalDetokenizer(tokenizer, StopStrings(stops), min_tokens=min_tokens)
    shown, num_used, stop = stream.push(ids[:cut])
    if stop is None:
        more, num_more, stop = stream.push(ids[cut:])
        shown, num_used = shown + more, num_used + num_more
    shown += stream.finish() if stop is None else ""
    ends = range(min_tokens + 1, len(text) + 1)
    end = next((end for end in ends if text[:end].endswith(tuple(stops))), None)
    if end is None:
        assert (shown, stop) == (text, None)
    else:
        assert stop is not None
        assert stop == max(filter(text[:end].endswith, stops), key=len)
        assert (shown, num_used) == (text[: end - len(stop)], end)
