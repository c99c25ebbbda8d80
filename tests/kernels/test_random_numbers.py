"""The counter-based generator against known values and an unsigned twin."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from gllm.kernels.random_numbers import random_uniform, splitmix64

MASK = 2**64 - 1


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
