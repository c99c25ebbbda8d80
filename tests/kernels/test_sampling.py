"""Sampling against exact probabilities, its independence of the batch, random numbers."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gllm.kernels import sampling
from gllm.kernels.random_numbers import random_uniform, splitmix64
from gllm.kernels.sampling import sample
from gllm.kernels.sampling_plan import SamplingPlan, plan_sampling

MASK = 2**64 - 1

DEFAULTS: dict[str, Any] = {
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 0,
    "choice": 0,
    "index": 0,
}


def plan_of(rows: list[dict[str, Any]]) -> SamplingPlan:
    kinds = {"temperature": np.float32, "top_p": np.float32, "min_p": np.float32}
    columns: dict[str, Any] = {
        name: np.array([(DEFAULTS | row)[name] for row in rows], dtype=kinds.get(name, np.int64))
        for name in DEFAULTS
    }
    return plan_sampling(**columns)


def drawn(logits: torch.Tensor, rows: list[dict[str, Any]]) -> list[int]:
    return sample(logits.clone(), plan_of(rows)).tolist()


def counts_of(logits: torch.Tensor, draws: int, **row: Any) -> torch.Tensor:
    """How often each token of logits [vocabulary] is drawn at output indices 0 .. draws - 1."""
    rows = [row | {"index": index} for index in range(draws)]
    tokens = drawn(logits.expand(draws, -1), rows)
    return torch.bincount(torch.tensor(tokens), minlength=len(logits)).double()


def exact(logits: torch.Tensor, **row: Any) -> torch.Tensor:
    """The distribution by definition, in float64, one filter after the other."""
    spec = DEFAULTS | row
    probabilities = (logits.double() / spec["temperature"]).softmax(-1)
    order = probabilities.argsort(descending=True)
    if spec["top_k"]:
        probabilities[order[spec["top_k"] :]] = 0
        probabilities /= probabilities.sum()
    before = probabilities[order].cumsum(0) - probabilities[order]
    if spec["top_p"] < 1:
        probabilities[order[before >= spec["top_p"]]] = 0
        probabilities /= probabilities.sum()
    probabilities[probabilities < spec["min_p"] * probabilities.max()] = 0
    return probabilities / probabilities.sum()


CASES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.0},
    {"top_k": 3},
    {"top_k": 1},
    {"top_k": 1000},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.8, "min_p": 0.1},
]


@pytest.mark.parametrize(
    ("row", "vocabulary"),
    [
        *((row, 12) for row in CASES),
        *(
            pytest.param(row, 1500, marks=[] if row == CASES[-1] else pytest.mark.full)
            for row in CASES
        ),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(row: dict[str, Any], vocabulary: int) -> None:
    """Chi-square at a fixed seed; the set of tokens with any chance is exact."""
    draws = 4000
    logits = torch.randn(vocabulary, generator=torch.Generator().manual_seed(3)) * 2
    wanted = exact(logits, **row)
    counts = counts_of(logits, draws, seed=11, **row)
    assert not counts[wanted == 0].any()
    likely = wanted * draws >= 5
    statistic = ((counts - wanted * draws) ** 2 / (wanted * draws))[likely].sum().item()
    freedom = max(int(likely.sum()) - 1, 1)
    # Wilson and Hilferty's approximation of the 99.99 % quantile.
    scale = 2 / (9 * freedom)
    assert statistic < freedom * (1 - scale + 3.719 * math.sqrt(scale)) ** 3
    if (wanted > 0).sum() < 8:
        assert counts[wanted > 0].all()


def test_nucleus_wider_than_the_candidates() -> None:
    """Nearly flat logits: the first candidates do not hold the nucleus, all have to be sorted."""
    vocabulary = 3 * sampling.TOP_P_CANDIDATES
    logits = torch.linspace(0, 0.1, vocabulary)
    counts = counts_of(logits, 400, top_p=0.5, seed=1)
    wanted = exact(logits, top_p=0.5)
    assert not counts[wanted == 0].any()
    assert counts[: (wanted == 0).sum() + sampling.TOP_P_CANDIDATES // 4].any()


def test_temperature_zero_is_greedy_whatever_the_rest() -> None:
    logits = torch.randn(4, 99, generator=torch.Generator().manual_seed(0))
    rows = [
        {"temperature": 0.0, **rest} for rest in ({}, {"top_k": 5}, {"top_p": 0.3}, {"seed": 9})
    ]
    assert drawn(logits, rows) == logits.argmax(-1).tolist()
    assert drawn(logits, [{"temperature": 1e-30}] * 4) == logits.argmax(-1).tolist()
    mixed = drawn(logits, [*rows[:2], {"seed": 1}, {"top_k": 1}])
    assert [mixed[0], mixed[1], mixed[3]] == logits.argmax(-1)[[0, 1, 3]].tolist()


def test_a_row_draws_the_same_in_any_batch() -> None:
    rows = [case | {"seed": 5, "index": i} for i in range(4) for case in CASES]
    rows += [{"temperature": 0.0}, {"top_p": 0.99, "temperature": 30.0}]
    logits = torch.randn(len(rows), 5000, generator=torch.Generator().manual_seed(8))
    together = drawn(logits, rows)
    alone = [drawn(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    backwards = drawn(logits.flip(0), rows[::-1])
    assert together == backwards[::-1]


def test_seed_choice_and_index_each_matter() -> None:
    logits = torch.zeros(64, 100_000)
    base = drawn(logits, [{"index": i} for i in range(64)])
    assert base == drawn(logits, [{"index": i} for i in range(64)])
    for other in ({"seed": 1}, {"seed": -(2**63)}, {"choice": 1}):
        changed = drawn(logits, [{"index": i} | other for i in range(64)])
        assert sum(a == b for a, b in zip(base, changed, strict=True)) < 3


def by_definition(logits: torch.Tensor, number: float, **row: Any) -> int:
    """The token of one row, in float64: equal logits by their ids, the draw in the order of ids."""
    spec = DEFAULTS | row
    relative = (logits - logits.max()).tolist()
    order = sorted(range(len(relative)), key=lambda token: (-relative[token], token))
    weights = [math.exp(relative[token] / spec["temperature"]) for token in order]
    count = spec["top_k"] or len(order)
    share = float(np.float32(spec["top_p"])) * math.fsum(weights[:count])
    kept, before = {}, 0.0
    for token, weight in zip(order[:count], weights, strict=False):
        if spec["top_p"] == 1 or before < share:
            kept[token] = weight if weight >= spec["min_p"] else 0.0
        before += weight
    target, passed = number * math.fsum(kept.values()), 0.0
    for token in sorted(kept):
        passed += kept[token]
        if passed > target:
            return token
    raise AssertionError("a number below 1 falls on a token")


@pytest.mark.parametrize("row", CASES, ids=str)
def test_a_draw_is_that_of_the_definition(row: dict[str, Any]) -> None:
    """Among few equal logits and many, more of them than are looked at first."""
    random = torch.randn(3, 2500, generator=torch.Generator().manual_seed(4)) * 3
    rounded = [(random / step).round() * step for step in (0.25, 4.0, 1000.0)]
    logits = torch.cat([random, *rounded])
    rows = [row | {"seed": seed} for seed in range(len(logits))]
    wanted = []
    for seed, one in enumerate(logits):
        counters = (torch.tensor([value]) for value in (seed, 0, 0))
        wanted.append(by_definition(one, random_uniform(*counters).item(), **row))
    assert drawn(logits, rows) == wanted


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.zeros(600)
    logits[::2] = -math.inf
    for row in ({}, {"top_k": 500}, {"top_p": 0.999}, {"temperature": 2.0, "min_p": 0.5}):
        assert not counts_of(logits, 500, **row)[::2].any()


@pytest.mark.parametrize("number", [0.0, 1 - 2**-53])
@pytest.mark.parametrize("size", [1, 512, 513, 3000])
def test_extreme_numbers_pick_tokens_with_weight(number: float, size: int) -> None:
    """Rounding at either end never lands on a token without weight."""
    generator = torch.Generator().manual_seed(size)
    weights = torch.rand(50, size, generator=generator) * (torch.rand(50, size) < 0.3)
    weights[:, size // 2] = 0.5
    numbers = torch.full((50,), number, dtype=torch.float64)
    for row in ({}, {"top_k": size}, {"top_k": max(size // 2, 1)}, {"top_p": 0.999}):
        plan = plan_of([row] * 50)
        groups = [replace(group, number=numbers) for group in plan.random]
        tokens = sample(weights.log(), replace(plan, random=groups))
        assert bool((weights.gather(1, tokens[:, None]) > 0).all())


def test_the_likeliest_is_the_first_of_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, -2.0], [0.0, 0.0, 0.0, 0.0], [-5.0, -9.0, -5.5, -4.0]])
    assert sampling.argmax_rows(logits).tolist() == [1, 0, 3]
    torch.manual_seed(0)
    random = torch.randn(9, 1000)
    assert torch.equal(sampling.argmax_rows(random), random.argmax(dim=-1))


def test_rows_with_anything_that_is_not_finite() -> None:
    logits = torch.zeros(5, 700)
    for row, bad in enumerate((math.nan, math.inf, -math.inf)):
        logits[row, 300 + row] = bad
    assert sampling.list_finite_rows(logits) == [False, False, False, True, True]


TINY: list[dict[str, Any]] = [
    *({"top_p": p} for p in (5e-324, 1e-46, 1e-45, 1e-40, 1.2e-38)),
    *({"top_p": 1e-46, **more} for more in ({"top_k": 3}, {"min_p": 0.5}, {"temperature": 1e-30})),
    *({"min_p": p} for p in (1 - 1e-9, 1.0)),
    *({"temperature": t} for t in (1e-46, 1e-45, 1e-39, 1e-30)),
    *({"temperature": 1e-40, **more} for more in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 1.0})),
    *({"top_k": 1, **more} for more in ({}, {"top_p": 0.5}, {"temperature": 2.0})),
    *({"top_k": 2**31 - 1, **more} for more in ({"top_p": 1e-46}, {"min_p": 1.0})),
]
"""Settings that keep the best token alone; float32 has no number for some of them."""


@pytest.mark.parametrize("flush", [False, True], ids=["denormal", "flushed"])
def test_tiny_settings_keep_the_best_token(flush: bool) -> None:
    """Wherever it is and whatever a grammar forbids; also where arithmetic flushes denormals."""
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(8))
    # As a grammar forbids tokens, the first one among them.
    logits[3:, ::2] = -math.inf
    wanted = logits.argmax(dim=-1).tolist()
    torch.set_flush_denormal(flush)
    try:
        for row in TINY:
            assert drawn(logits, [row | {"seed": seed} for seed in range(6)]) == wanted, row
    finally:
        torch.set_flush_denormal(False)


def test_a_huge_top_k_keeps_all() -> None:
    logits = torch.randn(40, 600, generator=torch.Generator().manual_seed(9))
    seeds = [{"seed": seed, "top_p": 0.9} for seed in range(40)]
    assert drawn(logits, [row | {"top_k": 2**31 - 1} for row in seeds]) == drawn(logits, seeds)


def unsigned(state: int) -> int:
    """SplitMix64 in Python's unbounded integers."""
    z = (state + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def test_known_outputs() -> None:
    """The generator's published first outputs for seeds 0 and 1234567."""
    outputs = splitmix64(torch.tensor([0, 1234567])).numpy().astype(np.uint64).tolist()
    assert outputs == [0xE220A8397B1DCDAF, 6457827717110365317]


@given(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=40))
def test_matches_unsigned_arithmetic(states: list[int]) -> None:
    outputs = splitmix64(torch.tensor(states)).numpy().astype(np.uint64).tolist()
    assert outputs == [unsigned(state & MASK) for state in states]


def test_uniform_is_uniform_over_each_counter() -> None:
    steps = torch.arange(20_000)
    fixed = torch.full_like(steps, 3)
    for counters in ((steps, fixed, fixed), (fixed, steps, fixed), (fixed, fixed, steps)):
        numbers = random_uniform(*counters)
        assert 0 <= numbers.min() < numbers.max() < 1
        counts = torch.histc(numbers, bins=100, min=0, max=1)
        assert (counts - 200).abs().max() < 5 * 200**0.5
        assert torch.corrcoef(torch.stack((numbers[1:], numbers[:-1])))[0, 1].abs() < 0.03
