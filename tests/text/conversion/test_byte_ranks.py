"""Vocabularies of tiktoken give the same encodings as tokenizers, whatever their ranks."""

import random

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from gllm.text.conversion.byte_ranks import build_byte_tokenizer, find_merges, parse_ranks
from tests.support.examples import num_examples
from tests.support.text.tokenizers import tiktoken_file

BYTES = {bytes([byte]): byte for byte in range(256)}


@given(seed=st.integers(0, 2**32))
@settings(max_examples=num_examples(12, 1000), deadline=None)
def test_random_vocabularies_are_joined_as_tiktoken_does(seed: int) -> None:
    """Over two letters, where pairs overlap and runs are long, and some tokens are never joined."""
    rng = random.Random(seed)
    ranks = dict(BYTES)
    while len(ranks) < 272:
        left, right = rng.choices([token for token in ranks if set(token) <= {97, 98}], k=2)
        ranks.setdefault(left + right, len(ranks))
    ours = build_byte_tokenizer(ranks, "[ab]+", [AddedToken("<s>")], num_leading=1)
    theirs = tiktoken.Encoding("random", pat_str="[ab]+", mergeable_ranks=ranks, special_tokens={})
    for _ in range(20):
        word = "".join(rng.choices("ab", k=rng.randint(1, 24)))
        ids = [index - 1 for index in ours.encode(word).ids]
        assert ids == theirs.encode_ordinary(word), (word, find_merges(ranks))


def test_a_token_that_nothing_makes_occurs_as_a_word_alone() -> None:
    ranks = BYTES | {b"abc": 256}
    assert find_merges(ranks) == []
    tokenizer = build_byte_tokenizer(ranks, r"\w+|\W+", [])
    assert tokenizer.encode("abc abcd").ids == [256, *b" abcd"]


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"version https://git-lfs\n", "no tiktoken file"),
        (b"!!! 0\n", "no tiktoken file"),
        (b"YQ== x\n", "no tiktoken file"),
        (b"", "single bytes"),
        (
            tiktoken_file({token: rank for token, rank in BYTES.items() if rank < 255}),
            "single bytes",
        ),
        (tiktoken_file(BYTES | {b"ab": 257}), "missing or occur twice"),
        (tiktoken_file(BYTES | {b"ab": 255}), "missing or occur twice"),
    ],
    ids=["lfs", "base64", "id", "empty", "byte", "gap", "twice"],
)
def test_other_files_are_refused(data: bytes, named: str) -> None:
    with pytest.raises(ValueError, match=f"x.tiktoken .*{named}"):
        parse_ranks(data, "x.tiktoken")
