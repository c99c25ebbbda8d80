"""Kernels of recurrent layers: convolution, linear recurrences and gated norm.

Each is held against its formula, token by token in float64, and against itself with the same tokens
in other segments, to the last bit.
"""

import math
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.causal_conv import causal_conv
from gllm.kernels.gated_norm import gated_rms_norm
from gllm.kernels.linear_recurrence import linear_recurrence
from gllm.kernels.recurrence_inputs import (
    RecurrenceInputs,
    RecurrenceParameters,
    ScanInputs,
    ScanParameters,
)
from gllm.kernels.selective_scan import selective_scan
from gllm.kernels.state_plan import StatePlan
from tests.support.models.state_plans import Segment, plan_states

TOKENS, SLOTS = 23, 5
DIVISIONS: list[list[Segment]] = [
    [(23, -1, 2)],
    [(1, -1, 2)] + [(1, 2, 2)] * 22,
    [(2, -1, 0), (9, 0, 4), (12, 4, 2)],
]
"""The tokens of one sequence in one segment, token by token and with checkpoints."""
HEADS, KEY_HEADS, KEY_DIM, VALUE_DIM = 4, 2, 19, 37


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def check_same(way: str, one: Tensor, other: Tensor) -> None:
    """Compiled kernels compute each token alike in every batch; torch sums in another order."""
    if way == "torch":
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(one, other)


def steps_of(segments: list[Segment]) -> list[tuple[slice, StatePlan]]:
    """Each segment as a step of its own."""
    ends = torch.tensor([0] + [rows for rows, _, _ in segments]).cumsum(0).tolist()
    spans = [slice(*pair) for pair in pairwise(ends)]
    return [(span, plan_states([segment])) for span, segment in zip(spans, segments, strict=True)]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("channels", [3, 300])
def test_a_convolution_sees_the_last_tokens(way: str, channels: int, size: int) -> None:
    x, weight = random(TOKENS, channels + 5)[:, :channels], random(size, channels, seed=1)
    bias = random(channels, seed=2)
    padded = functional.pad(x.double().t(), (size - 1, 0))
    filters = weight.double().t()[:, None]
    wanted = functional.conv1d(padded[None], filters, bias.double(), groups=channels)[0].t()
    wanted = functional.silu(wanted).float()
    results = []
    for segments in DIVISIONS:
        states = torch.full((SLOTS, size - 1, channels), math.nan)
        output = causal_conv(x, weight, bias, "silu", states, plan_states(segments))
        torch.testing.assert_close(output, wanted, rtol=1e-5, atol=1e-5)
        assert torch.equal(states[2], x[TOKENS - size + 1 :])
        parts = torch.full_like(states, math.nan)
        pieces = [
            causal_conv(x[span], weight, bias, "silu", parts, plan)
            for span, plan in steps_of(segments)
        ]
        check_same(way, torch.cat(pieces), output)
        results.append(output)
    for result in results[1:]:
        check_same(way, result, results[0])


@dataclass(frozen=True)
class Rule:
    """A variant of the recurrence."""

    inputs: RecurrenceInputs
    parameters: RecurrenceParameters


def rule(name: str) -> Rule:
    """Inputs of TOKENS tokens, in rows that are apart in memory."""
    fused = random(TOKENS, 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM + 3)
    sizes = KEY_HEADS * KEY_DIM, KEY_HEADS * KEY_DIM, HEADS * VALUE_DIM, 3
    query, key, value, _ = fused.split(sizes, dim=1)
    inputs = RecurrenceInputs(
        query.view(TOKENS, KEY_HEADS, KEY_DIM),
        key.view(TOKENS, KEY_HEADS, KEY_DIM),
        value.view(TOKENS, HEADS, VALUE_DIM),
        random(TOKENS, HEADS, seed=1),
        random(TOKENS, HEADS, seed=2),
    )
    rate, bias = -random(HEADS, seed=3).exp(), random(HEADS, seed=4)
    parameters = RecurrenceParameters(rate, bias, None, query_scale=0.3, is_normalized=True)
    if name == "delta":
        return Rule(inputs, parameters)
    if name == "delta per key":
        step, bias = random(TOKENS, HEADS, KEY_DIM, seed=1), random(HEADS, KEY_DIM, seed=4)
        return Rule(replace(inputs, step=step), replace(parameters, bias=bias))
    if name == "delta per key, bounded":
        return bounded(rule("delta per key"))
    if name == "delta, bounded":
        return bounded(Rule(inputs, parameters))
    skip = random(HEADS, seed=5)
    limited = RecurrenceParameters(rate, bias, skip, min_step=0.3, max_step=1.5)
    return Rule(replace(inputs, beta=None), limited)


def bounded(chosen: Rule) -> Rule:
    return replace(chosen, parameters=replace(chosen.parameters, decay_bound=-1.5))


def recur_plainly(chosen: Rule) -> tuple[Tensor, Tensor]:
    """Outputs and the state after all tokens, head by head in float64."""
    inputs, parameters = chosen.inputs, chosen.parameters
    outputs = torch.empty(TOKENS, HEADS, VALUE_DIM, dtype=torch.float64)
    states = torch.zeros(HEADS, KEY_DIM, VALUE_DIM, dtype=torch.float64)
    for head in range(HEADS):
        state = states[head]
        for t in range(TOKENS):
            query = inputs.query[t, head // 2].double()
            key = inputs.key[t, head // 2].double()
            value = inputs.value[t, head].double()
            if parameters.is_normalized:
                query = query / (query @ query + 1e-6).sqrt()
                key = key / (key @ key + 1e-6).sqrt()
            biased = (inputs.step[t, head] + parameters.bias[head]).double()
            step = functional.softplus(biased).clamp(parameters.min_step, parameters.max_step)
            logarithm = parameters.rate[head] * step
            if parameters.decay_bound:
                logarithm = parameters.decay_bound * (-parameters.rate[head] * biased).sigmoid()
            state *= logarithm.exp().view(-1, 1)
            if inputs.beta is None:
                change = value * step
            else:
                change = (value - state.t() @ key) * inputs.beta[t, head].double().sigmoid()
            state += key[:, None] * change
            outputs[t, head] = state.t() @ query * parameters.query_scale
            if parameters.skip is not None:
                outputs[t, head] += parameters.skip[head] * value
    return outputs.float(), states.float()


RULES = ["delta", "delta, bounded", "delta per key", "delta per key, bounded", "selective"]


@pytest.mark.parametrize("name", RULES)
def test_a_recurrence_is_its_formula(way: str, name: str) -> None:
    chosen = rule(name)
    wanted, last = recur_plainly(chosen)
    results = []
    for segments in DIVISIONS:
        states = torch.full((SLOTS, HEADS, KEY_DIM, VALUE_DIM), math.nan)
        output = linear_recurrence(chosen.inputs, chosen.parameters, states, plan_states(segments))
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(states[2], last, rtol=1e-4, atol=1e-4)
        results.append((output, states[2]))
    for output, state in results[1:]:
        check_same(way, output, results[0][0])
        check_same(way, state, results[0][1])


@pytest.mark.parametrize("name", ["delta", "selective"])
def test_sequences_do_not_see_each_other(way: str, name: str) -> None:
    """A batch of two sequences: the same as each alone; a source that is kept, stays as it is."""
    chosen = rule(name)
    before = random(SLOTS, HEADS, KEY_DIM, VALUE_DIM, seed=9)
    together = before.clone()
    plan = plan_states([(10, 3, 3)], [(4, 1, 0), (9, 0, 4)])
    output = linear_recurrence(chosen.inputs, chosen.parameters, together, plan)
    assert torch.equal(together[1:3], before[1:3])
    for span, segments, last in (
        (slice(0, 10), [(10, 3, 3)], 3),
        (slice(10, 23), [(13, 1, 4)], 4),
    ):
        names = ("query", "key", "value", "step", "beta")
        fields = {key: getattr(chosen.inputs, key) for key in names}
        given: dict[str, Any] = {
            key: None if one is None else one[span] for key, one in fields.items()
        }
        part = RecurrenceInputs(**given)
        alone = before.clone()
        result = linear_recurrence(part, chosen.parameters, alone, plan_states(segments))
        check_same(way, output[span], result)
        check_same(way, together[last], alone[last])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_states_of_16_bit_models_are_float32(way: str, dtype: torch.dtype) -> None:
    """Inputs are rounded, the state is not: it is that of the rounded inputs in float32."""
    chosen = rule("delta")
    inputs = chosen.inputs
    assert inputs.beta is not None
    names = ("query", "key", "value", "step", "beta")
    low = {name: getattr(inputs, name).to(dtype) for name in names}
    rounded = RecurrenceInputs(**low)
    exact = RecurrenceInputs(**{name: one.float() for name, one in low.items()})
    wanted, last = recur_plainly(replace(chosen, inputs=exact))
    states = torch.zeros(SLOTS, HEADS, KEY_DIM, VALUE_DIM)
    plan = plan_states([(TOKENS, -1, 2)])
    output = linear_recurrence(rounded, chosen.parameters, states, plan)
    assert output.dtype == dtype
    torch.testing.assert_close(output.float(), wanted, rtol=0.02, atol=0.02)
    torch.testing.assert_close(states[2], last, rtol=1e-4, atol=1e-4)


CHANNELS, SIZE = 37, 5


def scan_rule() -> tuple[ScanInputs, ScanParameters]:
    """Inputs of TOKENS tokens, in rows that are apart in memory; steps small and large."""
    fused = random(TOKENS, 2 * CHANNELS + 2 * SIZE + 3)
    value, step, key, query, _ = fused.split((CHANNELS, CHANNELS, SIZE, SIZE, 3), dim=1)
    step[3] *= 20
    rate = -random(SIZE, CHANNELS, seed=3).exp()
    parameters = ScanParameters(rate, random(CHANNELS, seed=4), random(CHANNELS, seed=5))
    return ScanInputs(value, step, key, query), parameters


def test_a_scan_is_its_formula(way: str) -> None:
    inputs, parameters = scan_rule()
    wanted = torch.empty(TOKENS, CHANNELS, dtype=torch.float64)
    last = torch.zeros(SIZE, CHANNELS, dtype=torch.float64)
    for t in range(TOKENS):
        step = functional.softplus((inputs.step[t] + parameters.bias).double())
        last = last * (parameters.rate * step).exp()
        last = last + inputs.key[t].double()[:, None] * (inputs.value[t] * step)
        wanted[t] = inputs.query[t].double() @ last + parameters.skip * inputs.value[t]
    results = []
    for segments in DIVISIONS:
        states = torch.full((SLOTS, SIZE, CHANNELS), math.nan)
        output = selective_scan(inputs, parameters, states, plan_states(segments))
        torch.testing.assert_close(output, wanted.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(states[2], last.float(), rtol=1e-5, atol=1e-5)
        results.append((output, states[2]))
    for output, state in results[1:]:
        check_same(way, output, results[0][0])
        check_same(way, state, results[0][1])


def test_scans_of_several_sequences(way: str) -> None:
    """A batch of two sequences: the same as each alone, also in 16 bits; states are float32."""
    inputs, parameters = scan_rule()
    before = random(SLOTS, SIZE, CHANNELS, seed=9)
    together = before.clone()
    plan = plan_states([(10, 3, 3)], [(4, 1, 0), (9, 0, 4)])
    output = selective_scan(inputs, parameters, together, plan)
    assert torch.equal(together[1:3], before[1:3])
    fields = inputs.value, inputs.step, inputs.key, inputs.query
    alone = before.clone()
    part = ScanInputs(*(one[10:] for one in fields))
    result = selective_scan(part, parameters, alone, plan_states([(13, 1, 4)]))
    check_same(way, output[10:], result)
    check_same(way, together[4], alone[4])
    rounded = ScanInputs(*(one.bfloat16() for one in fields))
    low = selective_scan(rounded, parameters, before.clone(), plan)
    assert low.dtype == torch.bfloat16
    exact = selective_scan(
        ScanInputs(*(one.bfloat16().float() for one in fields)), parameters, before.clone(), plan
    )
    torch.testing.assert_close(low.float(), exact, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("is_gated_first", [False, True])
def test_a_norm_with_a_gate(way: str, is_gated_first: bool, activation: str) -> None:
    x, weight = random(7, 3, 21), random(3, 21, seed=1)
    gate = random(7, 80, seed=2)[:, :63]
    gates = gate.view(7, 3, 21).sigmoid()
    if activation == "silu":
        gates = gates * gate.view(7, 3, 21)
    values = x * gates if is_gated_first else x
    wanted = values / (values.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    wanted = wanted if is_gated_first else wanted * gates
    result = gated_rms_norm(x, gate, weight, 1e-5, activation, is_gated_first)
    torch.testing.assert_close(result, wanted, rtol=1e-5, atol=1e-5)
    half = (x.bfloat16(), gate.bfloat16(), weight[0].bfloat16())
    shared = gated_rms_norm(*half, 1e-5, activation, is_gated_first)
    torch.testing.assert_close(shared.float(), wanted / weight * weight[0], rtol=0.05, atol=0.05)
