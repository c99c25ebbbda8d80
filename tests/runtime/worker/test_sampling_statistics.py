"""Drawn tokens follow the exact probabilities, with every filter, penalty and bias together."""

import math
from typing import Any

import pytest
import torch

from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.worker.cpu.sampler import sample_rows
from gllm.runtime.worker.sampling import build_sampling_metadata, create_sampling_states

NUM_DRAWS, MANY_DRAWS = 1500, 4000
VOCABULARIES = (36, 1500)
PROMPT = [0, 1, 1, 5, 9]
OUTPUT = [5, 5, 2, 7, 5, 11]


def exact(logits: torch.Tensor, spec: SequenceSamplingParams) -> torch.Tensor:
    """Probabilities [vocabulary] of the token after PROMPT and OUTPUT, in float64, step by step as
    the documentation tells them."""
    values = logits.double().clone()
    for token in range(len(values)):
        ending = [*OUTPUT, token]
        banned = any(ending[-len(word) :] == list(word) for word in spec.bad_words)
        early = len(OUTPUT) < spec.min_tokens and token in spec.banned
        if banned or early or (spec.allowed and token not in spec.allowed):
            values[token] = -math.inf
            continue
        value = values[token].item() + spec.logit_bias.get(token, 0.0)
        if token in PROMPT or token in OUTPUT:
            factor = spec.repetition_penalty
            value = value / factor if value > 0 else value * factor
        count = OUTPUT.count(token)
        values[token] = value - spec.frequency_penalty * count - spec.presence_penalty * (count > 0)
    probabilities = (values / spec.temperature).softmax(-1)
    order = probabilities.argsort(descending=True)
    if spec.top_k:
        probabilities[order[spec.top_k :]] = 0
        probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    if spec.top_p < 1:
        probabilities[order[before >= spec.top_p]] = 0
    probabilities[probabilities < spec.min_p * probabilities.max()] = 0
    return probabilities / probabilities.sum()


CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "temperature": 1.4},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.7},
    {"presence_penalty": -1.0, "frequency_penalty": -0.4, "repetition_penalty": 1.2},
    {"logit_bias": {3: 2.0, 5: -3.0, 30: 100.0}, "temperature": 2.0, "top_k": 9},
    {"logit_bias": {3: 1.0, 4: -1.0}, "top_p": 0.7},
    {"allowed": (0, 2, 5, 8, 13, 21)},
    {"allowed": (0, 2, 5, 8, 13, 21), "bad_words": ((2,), (5, 11, 8), (4, 21)), "min_p": 0.05},
    {"min_tokens": 9, "banned": (0, 1, 2), "top_k": 12, "frequency_penalty": 1.0},
    {
        "temperature": 0.8,
        "top_k": 14,
        "top_p": 0.92,
        "min_p": 0.02,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {6: 1.5, 9: 2.0, 11: -1.0},
        "bad_words": ((12,), (11, 6)),
    },
]


@pytest.mark.parametrize(
    ("case", "vocabulary", "num_draws"),
    [(case, VOCABULARIES[i % 2], NUM_DRAWS) for i, case in enumerate(CASES)]
    + [
        pytest.param(case, vocabulary, MANY_DRAWS, marks=pytest.mark.full)
        for case in CASES
        for vocabulary in VOCABULARIES
    ],
)
def test_draws_follow_the_exact_distribution(
    case: dict[str, Any], vocabulary: int, num_draws: int
) -> None:
    """Chi-square at fixed seeds; tokens without a chance never come."""
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    # The tokens that cases treat in their own way have to carry some of the probability.
    logits[:14] = torch.linspace(-1, 9, 14)[torch.arange(14) * 5 % 14]
    wanted = exact(logits, SequenceSamplingParams(**case))
    assert (wanted - exact(logits, SequenceSamplingParams())).abs().max() > 0.01
    counts = torch.zeros(vocabulary, dtype=torch.float64)
    for seeds in range(0, num_draws, 500):
        states = []
        for seed in range(seeds, seeds + 500):
            spec = SequenceSamplingParams(**case, seed=seed)
            state = create_sampling_states(RegisterSequences(0, len(PROMPT), PROMPT, spec))[0]
            for token in OUTPUT:
                state.history.append(token)
            states.append(state)
        owners = [(seq, 0) for seq in range(500)]
        rows = build_sampling_metadata(owners, states, [len(OUTPUT)] * 500)
        tokens = sample_rows(logits.repeat(500, 1), rows).tokens
        counts += torch.bincount(torch.tensor(tokens), minlength=vocabulary)
    assert not counts[wanted == 0].any()
    likely = wanted * num_draws >= 5
    squares = (counts - wanted * num_draws) ** 2 / (wanted * num_draws)
    freedom = max(int(likely.sum()) - 1, 1)
    # Wilson and Hilferty's approximation of the 99.99 % quantile.
    scale = 2 / (9 * freedom)
    assert squares[likely].sum() < freedom * (1 - scale + 3.719 * math.sqrt(scale)) ** 3
