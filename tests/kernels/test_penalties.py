"""Penalties and edits of logits against their definitions, token by token."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.kernels.penalties import SeenTokens, apply_history_penalties, apply_penalties
from tests.support.examples import num_examples
from tests.support.models.histories import laid_out

VOCABULARY = 9
LARGEST = torch.finfo(torch.float32).max


def by_definition(
    logit: float, in_prompt: bool, count: int, repetition: float, frequency: float, presence: float
) -> float:
    """One logit, penalised."""
    if in_prompt or count:
        logit = logit / repetition if logit > 0 else logit * repetition
    return logit - frequency * count - presence * bool(count)


def entries(prompts: list[list[int]], outputs: list[list[int]]) -> SeenTokens:
    rows, ids, counts = [], [], []
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        for token in sorted({*prompt, *output}):
            rows.append(row)
            ids.append(token)
            counts.append(output.count(token))
    columns = (torch.tensor(rows).long(), torch.tensor(ids).long(), torch.tensor(counts).double())
    return SeenTokens(*columns)


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=12)
row = st.tuples(
    tokens,
    tokens,
    st.floats(0.2, 5),
    st.floats(-2, 2),
    st.floats(-2, 2),
    st.lists(st.floats(-50, 50, width=32), min_size=VOCABULARY, max_size=VOCABULARY),
)


@settings(max_examples=num_examples(50, 3000), deadline=None)
@given(st.lists(row, min_size=1, max_size=4))
def test_penalties_follow_the_definition(rows) -> None:
    columns = (list(column) for column in zip(*rows, strict=True))
    prompts, outputs, repetition, frequency, presence, values = columns
    logits = torch.tensor(values)
    numbers = (torch.tensor(c, dtype=torch.float64) for c in (repetition, frequency, presence))
    apply_penalties(logits, entries(prompts, outputs), *numbers)
    for i, (prompt, output, *penalties, before) in enumerate(rows):
        for token in range(VOCABULARY):
            count = output.count(token)
            wanted = by_definition(before[token], token in prompt, count, *penalties)
            assert logits[i, token].item() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
            if token not in prompt and not count:
                assert logits[i, token] == before[token]


@pytest.mark.parametrize("repetition", [5e-324, 1e-40, 1e40, 1.7e308])
def test_extreme_penalties_keep_finite_logits_finite(repetition: float) -> None:
    logits = torch.tensor([[0.0, -0.0, 3.0, -3.0, LARGEST, -LARGEST, -math.inf]])
    seen = entries([list(range(7))], [[]])
    off = torch.zeros(1, dtype=torch.float64)
    apply_penalties(logits, seen, torch.tensor([repetition], dtype=torch.float64), off, off)
    assert logits[0, :6].isfinite().all()
    assert logits[0, 6] == -math.inf


@settings(max_examples=num_examples(30, 1000), deadline=None, derandomize=True)
@given(st.lists(row, min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 99))
def test_histories_are_penalized_as_entries_are(rows, block_size, seed) -> None:
    """Bit by bit; rows without a history stay."""
    columns = (list(column) for column in zip(*rows, strict=True))
    prompts, outputs, repetition, frequency, presence, values = columns
    prompts = [[3, *prompt] for prompt in prompts]
    logits = torch.cat((torch.tensor(values), torch.full((1, VOCABULARY), 2.0)))
    logits[0, ::3] = -math.inf
    expected = logits.clone()
    settings = torch.tensor([repetition, frequency, presence], dtype=torch.float64)
    apply_penalties(expected, entries(prompts, outputs), *settings)
    order = list(range(len(rows)))[::-1]
    prompts, outputs = ([column[row] for row in order] for column in (prompts, outputs))
    table, histories = laid_out(order, prompts, outputs, block_size, seed)
    apply_history_penalties(logits, table, histories, settings[:, order])
    assert torch.equal(logits, expected)
