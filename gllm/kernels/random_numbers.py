"""Counter-based random numbers: a number depends on its counters alone, not on the call order.

The arithmetic is on integers, so the numbers are the same on every device.

Source: Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators" (OOPSLA 2014),
the SplitMix64 generator, here chained as a hash over the counters.
"""

import torch
from torch import Tensor


def _signed(bits: int) -> int:
    """Reinterpret an unsigned 64-bit constant as int64."""
    return bits - 2**64 if bits >= 2**63 else bits


GAMMA = _signed(0x9E3779B97F4A7C15)
"""Increment of SplitMix64."""
MULTIPLIER_1 = _signed(0xBF58476D1CE4E5B9)
"""First multiplier of the SplitMix64 mix function."""
MULTIPLIER_2 = _signed(0x94D049BB133111EB)
"""Second multiplier of the SplitMix64 mix function."""


def _xor_shifted(x: Tensor, bits: int) -> Tensor:
    """Return x ^ (x >>> bits); int64 shifts are arithmetic, so sign copies are masked off."""
    return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))


def splitmix64(state: Tensor) -> Tensor:
    """Return the output of the SplitMix64 generator for each state of an int64 tensor.

    Arithmetic wraps around at 64 bits.
    """
    mixed = _xor_shifted(state + GAMMA, 30) * MULTIPLIER_1
    mixed = _xor_shifted(mixed, 27) * MULTIPLIER_2
    return _xor_shifted(mixed, 31)


def random_uniform(seed: Tensor, choice: Tensor, index: Tensor) -> Tensor:
    """Return uniform float64 random numbers in [0, 1) that depend only on the arguments.

    The arguments are int64 tensors of one shape, which is that of the result: seed of the request,
    index of the choice within the request, index of the token in the output.
    """
    mixed = splitmix64(splitmix64(splitmix64(seed) ^ choice) ^ index)
    top_bits = (mixed >> 11) & ((1 << 53) - 1)
    return top_bits.to(torch.float64) * 2.0**-53
