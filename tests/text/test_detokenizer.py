"""Pieces of text join to what decoding everything at once gives."""

import time

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders

from gllm.text.detokenizer import IncrementalDetokenizer, StopStrings
from gllm.text.tokenizer import BYTE_TOKEN, Tokenizer
from tests.support.examples import num_examples
from tests.support.text import tokenizers as some


def with_steps(*steps: decoders.Decoder) -> tokenizers.Tokenizer:
    """Byte-level, decoded in these steps."""
    backend = some.byte_level()
    backend.decoder = decoders.Sequence(list(steps))
    return backend


def pieces(strip: bool = True) -> tokenizers.Tokenizer:
    """As Llama 2, with a token for what decoding writes in place of an invalid byte."""
    backend = some.sentencepiece(strip)
    backend.add_tokens([AddedToken("\ufffd", normalized=False)])
    return backend


KINDS = {
    "byte-level": Tokenizer(some.byte_level()),
    "nested": Tokenizer(with_steps(decoders.ByteLevel())),
    "fused": Tokenizer(with_steps(decoders.ByteLevel(), decoders.Fuse())),
    "stripped": Tokenizer(with_steps(decoders.ByteLevel(), decoders.Strip(" ", 1, 0))),
    "replaced": Tokenizer(with_steps(decoders.Replace("two", "\u2581"), decoders.ByteLevel())),
    "llama": Tokenizer(pieces()),
    "gemma": Tokenizer(pieces(strip=False)),
    "metaspace": Tokenizer(some.metaspace()),
    "wordpiece": Tokenizer(some.word_piece()),
}
VISIBLE = [kind for kind in KINDS if kind != "wordpiece"]
"""Kinds whose tokens do not change the text before them."""


def decoded(tokenizer: Tokenizer, ids: list[int], skip_special_tokens: bool = True) -> str:
    """As the library, but a run of bytes loses only those that are invalid, as in SentencePiece."""
    skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset()
    ids = [i for i in ids if i not in skipped and tokenizer.id_to_token(i) is not None]
    replacement = tokenizer.token_to_id("\ufffd")
    if tokenizer.has_byte_fallback and replacement is not None:
        raw = b"".join(_single_byte(tokenizer, i) for i in ids)
        valid = [
            char < "\udc80" or char > "\udcff"
            for char in raw.decode(errors="surrogateescape")
            for _ in char.encode(errors="surrogateescape")
        ]
        ids = [i if is_valid else replacement for i, is_valid in zip(ids, valid, strict=True)]
    return tokenizer.decode(ids, False)


def _single_byte(tokenizer: Tokenizer, token_id: int) -> bytes:
    """The byte of a byte token, and any other for a piece of text."""
    is_byte = BYTE_TOKEN.fullmatch(tokenizer.id_to_token(token_id) or "")
    return tokenizer.token_bytes(token_id) if is_byte else b"x"


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
    assert "".join(pieces_of(tokenizer, ids)) == decoded(tokenizer, ids)


@pytest.mark.parametrize("kind", VISIBLE)
@pytest.mark.parametrize("skips", [True, False])
@settings(max_examples=num_examples(30, 1000), deadline=None)
@given(data=st.data())
def test_text_continues_the_prompt(kind, skips, data):
    """It is what the whole text has after the prompt's: the first word keeps its space."""
    tokenizer = KINDS[kind]
    prompt, ids = data.draw(ids_of(tokenizer)), data.draw(ids_of(tokenizer))
    if tokenizer.has_byte_tokens or tokenizer.has_byte_fallback:
        # A character that begins in the prompt is not part of the output.
        raw = b"".join(map(tokenizer.token_bytes, prompt))
        prompt = prompt if raw.decode(errors="ignore").encode() == raw else []
    before, whole = decoded(tokenizer, prompt, skips), decoded(tokenizer, prompt + ids, skips)
    stream = IncrementalDetokenizer(tokenizer, skip_special_tokens=skips, prompt=prompt)
    assert before + stream.push(ids)[0] + stream.finish() == whole


def test_the_first_word_of_a_continuation_keeps_its_space():
    tokenizer = KINDS["llama"]
    ids = [i for word in ("▁world", "▁Hello") if (i := tokenizer.token_to_id(word))]
    stream = IncrementalDetokenizer(tokenizer, StopStrings([" wor"]), prompt=[ids[1], 1])
    assert stream.push(ids) == ("", 1, " wor")
    # A prompt of special tokens alone has no text.
    stream = IncrementalDetokenizer(tokenizer, prompt=[1, 1])
    assert stream.push(ids)[0] == "world Hello"


@pytest.mark.parametrize("kind", ["llama", "gemma"])
@settings(max_examples=num_examples(40, 1000), deadline=None)
@given(text=st.text(st.sampled_from("aé你🎉 \n"), min_size=1, max_size=8))
def test_each_character_of_bytes_is_shown_at_once(kind, text):
    tokenizer = KINDS[kind]
    ids = [i for byte in text.encode() if (i := tokenizer.token_to_id(f"<0x{byte:02X}>"))]
    stream = IncrementalDetokenizer(tokenizer, prompt=tokenizer.encode("x"))
    shown, sizes = "", [len(char.encode()) for char in text]
    for number, size in enumerate(sizes):
        *begin, end = ids[sum(sizes[:number]) : sum(sizes[: number + 1])]
        assert [stream.push([i])[0] for i in begin] == [""] * (size - 1)
        shown += stream.push([end])[0]
        assert shown == text[: number + 1]


def test_a_stop_string_of_bytes_ends_the_text_with_its_last_byte():
    tokenizer = KINDS["llama"]
    ids = [i for byte in "a🎉b🎉".encode() if (i := tokenizer.token_to_id(f"<0x{byte:02X}>"))]
    assert IncrementalDetokenizer(tokenizer, StopStrings(["🎉"])).push(ids) == ("a", 5, "🎉")


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


@pytest.mark.parametrize("kind", ["byte-level", "fused", "llama"])
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
    assert text == decoded(tokenizer, ids)


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
    assert "".join(pieces) == decoded(tokenizer, ids, skip_special_tokens=False)


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
