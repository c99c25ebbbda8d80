"""Rotary position embedding: frequencies for each kind of scaling, angles of a step, rotation.

Owns the formulas; everything is computed in float32. Does not know configuration files: kinds and
their parameters come checked (gllm/models/config.py). Angles are computed for the positions of a
step, once for all layers, so that no table has to be as long as the context.

Source: Su et al., "RoFormer" (2021), equation 34, in the half-split layout: element i of a head is
paired with element i + head_dim / 2.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Parameters = Mapping[str, float]


def inverse_frequencies(
    kind: str, head_dim: int, theta: float, parameters: Parameters
) -> tuple[Tensor, float]:
    """Radians per position of each pair, [head_dim / 2] float32, and the factor on cos and sin."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return SCALINGS[kind](1.0 / theta**exponents, theta, parameters)


def _default(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    return plain, 1.0


def _linear(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Position interpolation: Chen et al., "Extending Context Window..." (2023), equation 3."""
    return plain / parameters["factor"], 1.0


def _llama3(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Llama 3.1: slow pairs interpolated, fast ones kept, a linear blend between the two.

    What counts is how often a pair turns within the original context.
    """
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / parameters["factor"] + kept * plain, 1.0


def _yarn(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Peng et al., "YaRN" (2023): section 3.2 (blend by turns) and equation 22 (temperature)."""
    pairs = len(plain)
    original = parameters["original_max_position_embeddings"]

    def pair_with(turns: float) -> float:
        """Index of the pair that turns this often within the original context."""
        return pairs * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low = pair_with(parameters.get("beta_fast", 32))
    high = pair_with(parameters.get("beta_slow", 1))
    if parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    # A ramp of no width would divide by zero: it becomes a step.
    width = (high - low) or 1e-3
    slowed = ((torch.arange(pairs, dtype=torch.float32) - low) / width).clamp(0, 1)
    blended = slowed * plain / parameters["factor"] + (1 - slowed) * plain
    return blended, _yarn_attention_factor(parameters)


def _yarn_attention_factor(parameters: Parameters) -> float:
    """The square root of YaRN's attention temperature, applied to cos and sin."""
    if "attention_factor" in parameters:
        return parameters["attention_factor"]

    def magnitude(scale: float) -> float:
        log = math.log(parameters["factor"]) if parameters["factor"] > 1 else 0.0
        return 0.1 * scale * log + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return magnitude(1.0)


SCALINGS: dict[str, Callable[[Tensor, float, Parameters], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def rotary_angles(positions: Tensor, frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each [tokens, 1, head_dim / 2] float32, for positions [tokens] int64."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def apply_rotary(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """x [tokens, heads, head_dim] rotated by the angles of its tokens; same shape and dtype."""
    cos, sin = angles
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.to(x.dtype)
