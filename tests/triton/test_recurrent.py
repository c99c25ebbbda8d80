"""Kernels of recurrent layers for GPUs against the references, interpreted."""

import pytest
import torch

from gllm.kernels.causal_conv import causal_conv
from gllm.kernels.linear_recurrence import linear_recurrence
from gllm.kernels.selective_scan import selective_scan
from gllm.kernels.triton import recurrent as gpu
from tests.kernels.test_recurrent import (
    CHANNELS,
    HEADS,
    KEY_DIM,
    SIZE,
    SLOTS,
    VALUE_DIM,
    random,
    rule,
    scan_rule,
)
from tests.support.models.kernel_builds import using_build
from tests.support.models.state_plans import plan_states

PLAN = [(4, -1, 0), (1, 0, 3), (6, 3, 3)], [(12, 1, 4)]
"""Segments of two sequences: from zeros and from a state, with a checkpoint, in place."""


@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("has_bias", [False, True])
def test_convolution(has_bias: bool, activation: str | None) -> None:
    x, weight = random(23, 140)[:, :133], random(4, 133, seed=1)
    bias = random(133, seed=2) if has_bias else None
    plan = plan_states(*PLAN)
    states = random(SLOTS, 3, 133, seed=3)
    expected_states = states.clone()
    with using_build("torch"):
        expected = causal_conv(x, weight, bias, activation, expected_states, plan)
    result = gpu.causal_conv(x, weight, bias, activation, states, plan)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(states, expected_states)


@pytest.mark.parametrize("name", ["delta", "delta per key", "delta per key, bounded", "selective"])
def test_recurrence(name: str) -> None:
    chosen = rule(name)
    plan = plan_states(*PLAN)
    states = random(SLOTS, HEADS, KEY_DIM, VALUE_DIM, seed=9)
    expected_states = states.clone()
    with using_build("torch"):
        expected = linear_recurrence(chosen.inputs, chosen.parameters, expected_states, plan)
    result = gpu.linear_recurrence(chosen.inputs, chosen.parameters, states, plan)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)


def test_selective_scan() -> None:
    inputs, parameters = scan_rule()
    plan = plan_states(*PLAN)
    states = random(SLOTS, SIZE, CHANNELS, seed=9)
    expected_states = states.clone()
    with using_build("torch"):
        expected = selective_scan(inputs, parameters, expected_states, plan)
    result = gpu.selective_scan(inputs, parameters, states, plan)
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states, expected_states, rtol=1e-4, atol=1e-4)
