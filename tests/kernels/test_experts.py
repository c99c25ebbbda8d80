"""Routing and experts against a token at a time, written plainly."""

import math
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels.activation import act_and_mul
from gllm.kernels.experts import (
    Routing,
    StackedExperts,
    route,
    run_experts,
    run_stacked,
    stack_experts,
)
from gllm.kernels.fp8_weights import Fp8Stack
from gllm.kernels.gated_linear import prepare_gated
from gllm.kernels.linear import prepare
from gllm.kernels.linear_fp8 import dequantize
from tests.kernels.test_linear_fp8 import quantized
from tests.support.examples import num_examples

FIVE = range(5)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def picked(logits: list[float], routing: Routing, correction: list[float]) -> dict[int, float]:
    """Weights by expert for one token, in Python's own numbers."""
    count = len(logits)
    total = sum(math.exp(x) for x in logits)
    scores = [sigmoid(x) if routing.scoring == "sigmoid" else math.exp(x) / total for x in logits]
    picking = [score + extra for score, extra in zip(scores, correction, strict=True)]
    size = count // routing.num_groups
    groups = [range(g * size, (g + 1) * size) for g in range(routing.num_groups)]

    def judged(group: range) -> float:
        best = sorted((picking[e] for e in group), reverse=True)
        return sum(best[: 2 if routing.group_scoring == "best two" else 1])

    allowed = [e for group in sorted(groups, key=judged)[-routing.top_k_groups :] for e in group]
    chosen = sorted(allowed, key=lambda e: picking[e])[-routing.top_k :]
    norm = sum(scores[e] for e in chosen) if routing.renormalize else 1.0
    return {e: routing.scaling_factor * scores[e] / norm for e in chosen}


routings = st.builds(
    Routing,
    top_k=st.integers(1, 4),
    scoring=st.sampled_from(["softmax", "sigmoid"]),
    renormalize=st.booleans(),
    scaling_factor=st.sampled_from([1.0, 2.5]),
    num_groups=st.sampled_from([1, 2, 4]),
    top_k_groups=st.integers(1, 4),
    group_scoring=st.sampled_from(["best", "best two"]),
)
"""For 16 experts: the smallest choice of groups, one of four, still has four to pick."""


def distinct_logits(tokens: int, seed: int) -> Tensor:
    """[tokens, 16]: no two alike in a row, so that there is one right choice."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.stack([torch.randperm(16, generator=generator) for _ in range(tokens)])
    return ranks * 0.37 - 3 + torch.rand(tokens, 1, generator=generator)


@settings(max_examples=num_examples(70, 2000), deadline=None)
@given(routings, st.integers(1, 5), st.booleans(), st.integers(0, 2**31))
def test_routing_matches_a_token_at_a_time(
    routing: Routing, tokens: int, corrected: bool, seed: int
) -> None:
    logits = distinct_logits(tokens, seed)
    correction = (
        torch.rand(16, generator=torch.Generator().manual_seed(seed)) if corrected else None
    )
    experts, weights = route(logits, routing, correction)
    assert experts.shape == weights.shape == (tokens, routing.top_k)
    extra = [0.0] * 16 if correction is None else correction.tolist()
    for row, chosen, shares in zip(logits, experts.tolist(), weights.tolist(), strict=True):
        wanted = picked(row.tolist(), routing, extra)
        assert dict(zip(chosen, shares, strict=True)) == pytest.approx(wanted, rel=1e-4)


def test_correction_picks_but_does_not_weigh() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    routing = Routing(top_k=1, scoring="sigmoid", renormalize=False, scaling_factor=1.0)
    experts, weights = route(logits, routing, torch.tensor([5.0, 0.0, 0.0]))
    assert (experts.item(), weights.item()) == (0, 0.5)


def test_groups_are_judged_by_their_best_or_their_best_two() -> None:
    """The first group has the best expert, the second the better pair."""
    logits = torch.tensor([[4.0, -4.0, 1.0, 1.5]])
    scorings: tuple[tuple[Literal["best", "best two"], int], ...] = (("best", 0), ("best two", 3))
    for scoring, wanted in scorings:
        routing = Routing(1, "sigmoid", False, 1.0, 2, 1, scoring)
        assert route(logits, routing, None)[0].item() == wanted


def test_half_precision_logits_are_routed_in_float32() -> None:
    routing = Routing(top_k=2, scoring="softmax", renormalize=True, scaling_factor=1.0)
    _, weights = route(torch.randn(3, 8).bfloat16(), routing, None)
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.sum(-1), torch.ones(3))


def run(
    x: Tensor, experts: Tensor, weights: Tensor, up: Tensor, down: Tensor, activation: str = "silu"
) -> Tensor:
    """up [experts, 2 * inner, hidden], down [experts, hidden, inner]."""
    gated = [prepare_gated(weight, None, activation) for weight in up]
    return run_experts(x, experts, weights, gated, [prepare(weight) for weight in down])


def made(seed: int, tokens: int) -> tuple[Tensor, ...]:
    """x, experts, weights, up and down of 5 experts, two of them for each token."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, 6, generator=generator)
    scores = torch.rand(tokens, 5, generator=generator)
    weights, experts = scores.topk(2, dim=-1)
    up = torch.randn(5, 8, 6, generator=generator)
    return x, experts, weights, up, torch.randn(5, 6, 4, generator=generator)


@settings(max_examples=num_examples(30, 600), deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 12), st.sampled_from(["silu", "gelu", "relu"]))
def test_experts_match_a_token_at_a_time(seed: int, tokens: int, activation: str) -> None:
    x, experts, weights, up, down = made(seed, tokens)
    wanted = torch.zeros_like(x)
    for token in range(tokens):
        for expert, weight in zip(experts[token].tolist(), weights[token].tolist(), strict=True):
            inner = act_and_mul(activation, (up[expert] @ x[token])[None])[0]
            wanted[token] += weight * (down[expert] @ inner)
    actual = run(x, experts, weights, up, down, activation)
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@settings(max_examples=num_examples(20, 600), deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 7), min_size=2, max_size=4))
def test_tokens_do_not_change_each_other(seed: int, counts: list[int]) -> None:
    """Whole or in parts a batch gives the same, but for the rounding of products."""
    x, experts, weights, up, down = made(seed, sum(counts))
    whole = run(x, experts, weights, up, down)
    ends = [sum(counts[:i]) for i in range(len(counts) + 1)]
    parts = [run(x[a:b], experts[a:b], weights[a:b], up, down) for a, b in pairwise(ends)]
    torch.testing.assert_close(whole, torch.cat(parts), rtol=1e-5, atol=1e-5)


def test_a_bad_token_spoils_no_other() -> None:
    x, experts, weights, up, down = made(3, 6)
    wanted = run(x, experts, weights, up, down)
    x[2] = math.nan
    actual = run(x, experts, weights, up, down)
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(actual[others], wanted[others], rtol=1e-5, atol=1e-5)
    assert actual[2].isnan().all()


def test_parts_are_added_in_float32() -> None:
    x, experts, weights, up, down = made(5, 9)
    wanted = run(x, experts, weights, up, down)
    half = run(x.bfloat16(), experts, weights, up.bfloat16(), down.bfloat16())
    assert half.dtype == torch.bfloat16
    assert ((half - wanted).norm() / wanted.norm()).item() < 0.02


@pytest.mark.parametrize("tokens", [0, 1, 9])
@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_halves_of_experts_add_up(quantization: str, tokens: int) -> None:
    """Two ranks with half of the intermediate elements each: in float32, without rounding."""
    x, experts, weights, up, down = made(7, tokens)
    whole = [prepare_gated(weight, None, "silu", quantization) for weight in up]
    wanted = run_experts(x, experts, weights, whole, [prepare(one, quantization) for one in down])
    scales_rows = quantization == "int8"
    magnitudes: list[Tensor] = []
    # The first pass finds the magnitudes of each half, the second one computes.
    for _ in range(2):
        outs = []
        for begin in (0, 2):
            rows = [begin, begin + 1, begin + 4, begin + 5]
            gated = [prepare_gated(weight[rows], None, "silu", quantization) for weight in up]
            own = [
                prepare(
                    one[:, begin : begin + 2].contiguous(),
                    quantization,
                    one.abs().amax(dim=1) if scales_rows else None,
                )
                for one in down
            ]

            def reduce_magnitudes(values: Tensor) -> Tensor:
                magnitudes.append(values)
                return torch.stack(magnitudes[:2]).amax(dim=0)

            out = torch.full_like(x, torch.nan)
            reduce = reduce_magnitudes if scales_rows else None
            result = run_experts(x, experts, weights, gated, own, None, out, reduce)
            assert result is out
            outs.append(result)
    torch.testing.assert_close(outs[0] + outs[1], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("block", "scales"), [((4, 3), 1), (None, 1), (None, 4)])
def test_stacked_weights_in_8_bit_floats(block: tuple[int, int] | None, scales: int) -> None:
    """Gates of 4 outputs lie above as many others; each expert has scales of its own."""
    x, experts, weights, *_ = made(6, 7)
    up = [[quantized(4, 6, block, n, scales), quantized(4, 6, block, n + 9, scales)] for n in FIVE]
    down = [[quantized(6, 4, block, n)] for n in FIVE]
    stacked = StackedExperts(stack_experts(5, iter(up)), stack_experts(5, iter(down)), "silu")
    assert isinstance(stacked.gate_up_proj, Fp8Stack)
    assert stacked.gate_up_proj.shape == (5, 8, 6)
    wide_up, wide_down = (
        torch.stack([torch.cat([*map(dequantize, one)]) for one in each]) for each in (up, down)
    )
    wanted = run_stacked(x, experts, weights, StackedExperts(wide_up, wide_down, "silu"))
    torch.testing.assert_close(run_stacked(x, experts, weights, stacked), wanted)


def test_experts_that_are_not_stored_alike_are_not_stacked() -> None:
    eight, plain = quantized(4, 6, (4, 3)), torch.ones(4, 6)
    cases: tuple[tuple[Any, str], ...] = (
        ([[eight], [plain]], "different formats"),
        ([[plain], [eight]], "different formats"),
        ([[plain], [torch.ones(5, 6)]], "different shapes"),
        ([[eight], [quantized(4, 6, (2, 3))]], "blocks of different sizes"),
    )
    for parts, named in cases:
        with pytest.raises(ValueError, match=named):
            stack_experts(2, parts)
