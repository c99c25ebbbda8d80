"""Prediction of output lengths by similar prompts: kinds are told apart, memory is bounded."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.routing.lengths.features import (
    HEAD_TOKENS,
    NUM_FEATURES,
    TAIL_TOKENS,
    hash_ngrams,
    hash_prompt,
    sparse_features,
)
from gllm.routing.lengths.nearest import (
    NUM_DIMENSIONS,
    WINDOW_REQUESTS,
    NearestPromptPredictor,
    random_signs,
)
from gllm.scheduler.output_lengths import LengthQuery

PROMPTS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=400)


def make_prompt(rng: Random, system: int, instruction: int, num_content: int) -> list[int]:
    """Return a prompt: a system prompt, content of random tokens, an instruction."""
    content = [rng.randrange(10_000, 60_000) for _ in range(num_content)]
    head = [100 * system + index for index in range(12)]
    return [*head, *content, *(5000 + 100 * instruction + index for index in range(8))]


def query_of(prompt: list[int], max_tokens: int = 4000) -> LengthQuery:
    return LengthQuery(len(prompt), max_tokens, prompt)


@pytest.mark.parametrize(
    ("kinds", "num_content"),
    [
        # Applications with a system prompt of their own, and one with several instructions.
        ([(1, 0, 5), (2, 0, 300), (3, 0, 1000)], (10, 80)),
        ([(1, 0, 5), (1, 1, 300), (1, 2, 1000)], (10, 500)),
    ],
)
def test_kinds_of_requests_are_told_apart(
    kinds: list[tuple[int, int, int]], num_content: tuple[int, int]
) -> None:
    rng, lengths = Random(0), NearestPromptPredictor()
    num_right = 0
    for number in range(400):
        system, instruction, mean = rng.choice(kinds)
        prompt = make_prompt(rng, system, instruction, rng.randint(*num_content))
        estimate = lengths.estimate(query_of(prompt))
        if number >= 100:
            num_right += 0.7 < estimate.likely() / mean < 1.4
            num_right += 0.7 < estimate.expected() / mean < 1.4
        estimate.record(max(1, round(mean * rng.uniform(0.8, 1.2))))
    assert num_right >= 0.95 * 2 * 300


def test_old_requests_are_replaced() -> None:
    lengths = NearestPromptPredictor(num_kept=64)
    first, second = [1, 2, 3, 4, 5, 6], [11, 12, 13, 14, 15, 16]
    for length in (10,) * 80 + (300,) * 32:
        lengths.estimate(query_of(first)).record(length)
        lengths.estimate(query_of(second)).record(900)
    assert lengths.estimate(query_of(first)).expected() == pytest.approx(300)
    assert lengths.estimate(query_of(second)).expected() == pytest.approx(900)


def test_requests_without_similar_ones_are_predicted_by_their_prompts_length() -> None:
    rng, lengths = Random(1), NearestPromptPredictor()
    for _ in range(30):
        for size, length in ((20, 7), (900, 70)):
            prompt = [rng.randrange(2**31) for _ in range(size)]
            lengths.estimate(query_of(prompt)).record(length)
    for size, length in ((20, 7), (900, 70)):
        prompt = [rng.randrange(2**31) for _ in range(size)]
        assert lengths.estimate(query_of(prompt)).expected() == pytest.approx(length)
        assert lengths.estimate(LengthQuery(size)).expected() == pytest.approx(length)


def test_a_kind_that_appears_later_is_learned() -> None:
    """Counts and vectors are those of the recent requests."""
    rng, lengths = Random(2), NearestPromptPredictor(num_kept=256)
    for _ in range(WINDOW_REQUESTS + 10):
        lengths.estimate(query_of(make_prompt(rng, 1, 1, 5))).record(30)
    for number in range(200):
        estimate = lengths.estimate(query_of(make_prompt(rng, 2, 2, 5)))
        if number >= 120:
            assert estimate.likely() == pytest.approx(900)
        estimate.record(900)
        lengths.estimate(query_of(make_prompt(rng, 1, 1, 5))).record(30)
    assert lengths.estimate(query_of(make_prompt(rng, 1, 1, 5))).likely() == pytest.approx(30)


@given(PROMPTS, st.sampled_from([list, tuple, lambda ids: np.array(ids, np.int32)]))
def test_features_depend_on_both_ends_of_the_tokens_alone(prompt, make) -> None:
    parts = hash_prompt(make(prompt))
    longer = [*prompt[:HEAD_TOKENS], *[7] * 500, *prompt[-TAIL_TOKENS:]]
    if len(prompt) >= TAIL_TOKENS:
        for part, other in zip(parts, hash_prompt(longer), strict=True):
            assert part.tolist() == other.tolist()
    indices, values = sparse_features(LengthQuery(len(prompt), 50, make(prompt)))
    assert len(set(indices.tolist())) == len(indices) == len(values)
    assert 0 <= indices.min() <= indices.max() < NUM_FEATURES
    # Each part of the prompt has the norm 1, and each of the two sizes.
    assert (values**2).sum() == pytest.approx(4)


def test_random_directions_are_nearly_orthogonal() -> None:
    signs = random_signs(hash_ngrams(range(100)))
    assert signs.shape == (199, NUM_DIMENSIONS)
    assert set(np.unique(signs)) == {-1, 1}
    products = signs @ signs.T / NUM_DIMENSIONS
    np.fill_diagonal(products, 0)
    assert abs(products).max() < 0.6
    assert np.std(products) == pytest.approx(NUM_DIMENSIONS**-0.5, rel=0.1)


def test_hashes_are_the_same_in_every_process() -> None:
    """Coefficients in files belong to them."""
    assert hash_ngrams([1, 2]).tolist() == HASHES_OF_1_2
    assert sparse_features(LengthQuery(2, 50, [1, 2]))[0].tolist() == FEATURES_OF_1_2


HASHES_OF_1_2 = [2884538015903254989, 8779001701403039817, 11346137847981043235]
FEATURES_OF_1_2 = [73, 461, 1571, 4169, 4557, 5667, 6146, 6183]
