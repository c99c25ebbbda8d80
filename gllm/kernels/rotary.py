"""Rotary position embedding: inverse frequencies per kind of scaling, angles of a step, rotation.

Everything is computed in float32. gllm/models/rope.py validates kinds and parameters. Angles are
computed for the positions of a step, once for all layers, so that no table of the length of the
context is needed.

Source: Su et al., "RoFormer" (2021), equation 34. In the half-split layout element i of the rotated
part is paired with element i + dim / 2, in the interleaved one with its neighbour.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Parameters = Mapping[str, Any]
RotaryAngles = tuple[Tensor, Tensor]
"""cos and sin, each [tokens, 1, dim / 2] float32."""


def compute_inverse_frequencies(
    kind: str, dim: int, theta: float, parameters: Parameters
) -> tuple[Tensor, float]:
    """Compute the rotary frequencies for a kind of RoPE scaling, such as "llama3" or "yarn".

    Args:
        kind: name of the RoPE scaling.
        dim: number of rotated elements per head.
        theta: base of the frequencies.
        parameters: parameters of the scaling, by their names in config.json.

    Returns:
        Radians per position of each rotated pair, [dim / 2] float32, and a factor on cos and sin.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return SCALINGS[kind](1.0 / theta**exponents, theta, parameters)


def _default(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    return plain, 1.0


def _linear(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Position interpolation: Chen et al., "Extending Context Window..." (2023), equation 3."""
    return plain / parameters["factor"], 1.0


def _llama3(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Llama 3.1: slow pairs interpolated, fast ones kept, a linear blend between the two.

    The blend depends on the number of rotations of a pair within the original context.
    """
    turns = parameters["original_max_position_embeddings"] * plain / (2 * math.pi)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    # Equal factors leave no pairs between: a step.
    kept = ((turns - low) / ((high - low) or 1e-6)).clamp(0, 1)
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
    """Return the square root of YaRN's attention temperature, applied to cos and sin."""
    # As DeepSeek and vLLM: on top of the factor that YaRN has without it.
    further: float = parameters.get("attn_factor", 1.0)
    if "attention_factor" in parameters:
        return parameters["attention_factor"] * further

    def magnitude(scale: float) -> float:
        log = math.log(parameters["factor"]) if parameters["factor"] > 1 else 0.0
        return 0.1 * scale * log + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return further * magnitude(parameters["mscale"]) / magnitude(parameters["mscale_all_dim"])
    return further * magnitude(1.0)


def _proportional(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Gemma 4: the fastest pairs of a head are rotated, with the frequencies of a whole head."""
    frequencies = plain / parameters.get("factor", 1.0)
    frequencies[parameters["rotated_pairs"] :] = 0.0
    return frequencies, 1.0


def _longrope(plain: Tensor, theta: float, parameters: Parameters) -> tuple[Tensor, float]:
    """Ding et al., "LongRoPE" (2024), equation 1: searched factors, short or long ones.

    All positions of a sequence must use the same factors, so the maximum context length of the
    server (`longest` in parameters) selects them, not the length of each sequence.
    """
    original = parameters["original_max_position_embeddings"]
    is_long = parameters["longest"] > original
    factors = torch.tensor(parameters["long_factor" if is_long else "short_factor"])
    stretch = parameters["factor"]
    factor = parameters.get("attention_factor")
    if factor is None:
        factor = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return plain / factors, factor


SCALINGS: dict[str, Callable[[Tensor, float, Parameters], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _default,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}


def compute_rotary_angles(positions: Tensor, frequencies: Tensor, factor: float) -> RotaryAngles:
    """Compute cos and sin of the rotary angles, each [tokens, 1, dim / 2] float32.

    Args:
        positions: [tokens] int64.
        frequencies: [dim / 2] float32, radians per position.
        factor: factor on cos and sin.
    """
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos() * factor, angles.sin() * factor


def apply_rotary(x: Tensor, angles: RotaryAngles, interleaved: bool = False) -> Tensor:
    """Apply rotary position embedding to x [tokens, heads, head_dim]; return a new tensor.

    Args:
        x: only the first `dim` elements of each head are rotated.
        angles: cos and sin per token, each [tokens, 1, dim / 2].
        interleaved: True pairs neighbouring elements, False pairs element i with i + dim / 2.
    """
    cos, sin = angles
    dim = 2 * cos.shape[-1]
    turned = x[..., :dim].to(torch.float32)
    first, second = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, -1)
    pairs = first * cos - second * sin, second * cos + first * sin
    rotated = torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
    rotated = rotated.to(x.dtype)
    return rotated if dim == x.shape[-1] else torch.cat((rotated, x[..., dim:]), dim=-1)
