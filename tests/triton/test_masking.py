"""Masks and bad words for GPUs against the reference, under Triton's interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from gllm.kernels import masking as reference
from gllm.kernels.masking import build_token_bitmask
from gllm.kernels.triton import masking
from tests.kernels.test_masking import phrases_of, tokens, words
from tests.support.examples import num_examples
from tests.support.models.histories import laid_out


@settings(max_examples=num_examples(10, 150), deadline=None, derandomize=True)
@given(st.sampled_from([1, 31, 64, 150]), st.integers(0, 99))
def test_masks_keep_what_their_bits_say(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(4, size + 2, generator=generator)
    drawn = torch.rand(2, size, generator=generator) < 0.5
    masks = torch.stack([build_token_bitmask(row.nonzero()[:, 0], size) for row in drawn])
    rows = torch.randperm(4, generator=generator)[:2]
    expected = logits.clone()
    reference.apply_token_bitmask(expected[:, :size], rows, masks)
    masking.apply_token_bitmask(logits[:, :size], rows, masks, tile=64)
    assert torch.equal(logits, expected)


@settings(max_examples=num_examples(12, 200), deadline=None, derandomize=True)
@given(st.lists(st.tuples(tokens, tokens), min_size=2, max_size=2), st.data())
def test_phrases(texts: list[tuple[list[int], list[int]]], data: st.DataObject) -> None:
    given_words = data.draw(st.lists(st.tuples(st.integers(0, 1), words), min_size=1, max_size=6))
    prompts, outputs = ([*column] for column in zip(*texts, strict=True))
    table, histories = laid_out([2, 0], [[1, *prompt] for prompt in prompts], outputs, 3, seed=1)
    owners, alone = [owner for owner, _ in given_words], [word for _, word in given_words]
    phrases = phrases_of(owners, alone, 5)
    logits = torch.randn(3, 3)
    expected = logits.clone()
    reference.apply_bad_words(expected, table, histories, phrases)
    masking.apply_bad_words(logits, table, histories, phrases, phrase=2)
    assert torch.equal(logits, expected)
