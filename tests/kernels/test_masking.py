"""Masks, places and phrases on rows of logits against lists of ids and token by token."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.kernels.bad_words import BadWords
from gllm.kernels.masking import (
    add_to_logits,
    apply_bad_words,
    apply_token_bitmask,
    build_token_bitmask,
)
from tests.support.examples import num_examples
from tests.support.models.histories import laid_out

SIZES = st.sampled_from([1, 31, 32, 33, 64, 100])


@settings(max_examples=num_examples(60, 1000), deadline=None, derandomize=True)
@given(SIZES, st.data())
def test_a_mask_keeps_what_a_list_keeps(size: int, data: st.DataObject) -> None:
    """Other rows stay, ids out of the vocabulary are nobody's."""
    ids = st.lists(st.integers(0, size - 1), min_size=1)
    allowed = [torch.tensor(data.draw(ids)) for _ in range(2)]
    rows = torch.tensor(data.draw(st.permutations(range(4)))[:2])
    logits = torch.randn(4, size)
    expected = logits.clone()
    for row, kept in zip(rows.tolist(), allowed, strict=True):
        is_banned = torch.ones(size, dtype=torch.bool)
        is_banned[kept] = False
        expected[row, is_banned] = -math.inf
    masks = [
        build_token_bitmask(torch.cat((kept, torch.tensor([size, size + 70]))), size)
        for kept in allowed
    ]
    apply_token_bitmask(logits, rows, torch.stack(masks))
    assert torch.equal(logits, expected)


def test_places_get_their_values() -> None:
    logits = torch.arange(6.0).view(2, 3)
    places = torch.tensor([1, 1, 5, 3])
    add_to_logits(logits, places, torch.tensor([2.5, -math.inf, -1.5, -math.inf]))
    assert logits.tolist() == [[0, -math.inf, 2], [-math.inf, 4, 3.5]]


tokens = st.lists(st.integers(0, 2), max_size=7)
words = st.lists(st.integers(0, 2), min_size=2, max_size=5)


def phrases_of(owners: list[int], given: list[list[int]], width: int) -> BadWords:
    """Words as phrases for these histories; what is ahead of a phrase is poison."""
    before = torch.full((len(given), width), -(10**12))
    for row, word in zip(before, given, strict=True):
        row[width - len(word) + 1 :] = torch.tensor(word[:-1])
    lengths = [len(word) - 1 for word in given]
    last = torch.tensor([word[-1] for word in given])
    return BadWords(torch.tensor(owners), torch.tensor(lengths), before, last)


@settings(max_examples=num_examples(70, 2000), deadline=None, derandomize=True)
@given(st.lists(st.tuples(tokens, tokens), min_size=2, max_size=2), st.data())
def test_a_phrase_forbids_its_end_behind_its_beginning(
    texts: list[tuple[list[int], list[int]]], data: st.DataObject
) -> None:
    """Of the output alone: a prompt may end with it."""
    given_words = data.draw(st.lists(st.tuples(st.integers(0, 1), words), min_size=1, max_size=6))
    prompts, outputs = ([[*part] for part in column] for column in zip(*texts, strict=True))
    table, histories = laid_out([2, 0], [[1, *p] for p in prompts], outputs, 3, seed=1)
    logits = torch.randn(3, 3)
    expected = logits.clone()
    for owner, word in given_words:
        output = outputs[owner]
        if output[max(len(output) - len(word) + 1, 0) :] == word[:-1]:
            expected[[2, 0][owner], word[-1]] = -math.inf
    owners, alone = [owner for owner, _ in given_words], [word for _, word in given_words]
    apply_bad_words(logits, table, histories, phrases_of(owners, alone, 5))
    assert torch.equal(logits, expected)
