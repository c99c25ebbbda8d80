"""Rotary frequencies against transformers for each scaling; rotation against complex numbers."""

import cmath
from typing import Any

import pytest
import torch

from gllm.kernels.rotary import (
    SCALINGS,
    apply_rotary,
    compute_inverse_frequencies,
    compute_rotary_angles,
)

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS_UNDER_TEST: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 4.0}),
    ("dynamic", {"factor": 4.0}),
    ("llama3", LLAMA3 | {"original_max_position_embeddings": 8192}),
    ("llama3", LLAMA3 | {"high_freq_factor": 1.0, "original_max_position_embeddings": 8192}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32768}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False}),
    (
        "yarn",
        {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2}
        | {"mscale": 0.7, "mscale_all_dim": 1.0},
    ),
    ("yarn", {"factor": 1.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}),
]


@pytest.mark.parametrize(("kind", "parameters"), SCALINGS_UNDER_TEST, ids=str)
def test_scalings_match_transformers(kind: str, parameters: dict[str, Any]) -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theta = 500_000.0
    config = transformers.LlamaConfig(
        max_position_embeddings=32768,
        head_dim=128,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[kind](config)
    frequencies, factor = compute_inverse_frequencies(kind, 128, theta, parameters)
    torch.testing.assert_close(frequencies, wanted, rtol=2e-6, atol=0)
    assert factor == pytest.approx(wanted_factor)


@pytest.mark.parametrize(
    "other", [{}, {"attention_factor": 1.2}, {"mscale": 0.7, "mscale_all_dim": 1}]
)
def test_attn_factor_scales_what_yarn_has_without_it(other: dict[str, float]) -> None:
    """In DeepSeek-R1-0528-Qwen3-8B the product is 1; transformers ignores it."""
    parameters = {"factor": 4.0, "original_max_position_embeddings": 32768, **other}
    plain, factor = compute_inverse_frequencies("yarn", 128, 1e6, parameters)
    further = {"attn_factor": 0.8782488562869419}
    scaled, scaled_factor = compute_inverse_frequencies("yarn", 128, 1e6, parameters | further)
    assert torch.equal(plain, scaled)
    assert scaled_factor == pytest.approx(factor * 0.8782488562869419)
    if not other:
        assert scaled_factor == pytest.approx(1.0)


def test_rotation_is_a_complex_product() -> None:
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    frequencies, factor = compute_inverse_frequencies("default", 8, 10.0, {})
    positions = torch.tensor([0, 1, 7, 100, 5])
    actual = apply_rotary(x, compute_rotary_angles(positions, frequencies, factor))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(
        torch.ones(5, 1, 4), positions[:, None, None] * frequencies
    )
    torch.testing.assert_close(actual, torch.cat((turned.real, turned.imag), dim=-1))


LONG = {
    "short_factor": [1.0 + pair / 100 for pair in range(64)],
    "long_factor": [1.0 + pair / 4 for pair in range(64)],
    "original_max_position_embeddings": 4096,
    "factor": 32.0,
}


@pytest.mark.parametrize("given_factor", [{}, {"attention_factor": 1.3}], ids=str)
@pytest.mark.parametrize("longest", [100, 4096, 4097, 131072])
def test_longrope_matches_transformers(longest: int, given_factor: dict[str, float]) -> None:
    """The longest text that is served picks the factors, where the library goes by each text."""
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = transformers.Phi3Config(
        hidden_size=1024,
        num_attention_heads=8,
        max_position_embeddings=131072,
        original_max_position_embeddings=4096,
        rope_parameters={"rope_type": "longrope", "rope_theta": 1e4, **LONG, **given_factor},
    )
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=longest)
    parameters = LONG | given_factor | {"longest": longest}
    frequencies, factor = compute_inverse_frequencies("longrope", 128, 1e4, parameters)
    torch.testing.assert_close(frequencies, wanted, rtol=2e-6, atol=0)
    assert factor == pytest.approx(wanted_factor)


def test_a_short_text_is_rotated_as_the_longest_is() -> None:
    short, _ = compute_inverse_frequencies("longrope", 128, 1e4, LONG | {"longest": 4096})
    stretched, _ = compute_inverse_frequencies("longrope", 128, 1e4, LONG | {"longest": 4097})
    ratio = torch.tensor(LONG["long_factor"]) / torch.tensor(LONG["short_factor"])
    torch.testing.assert_close(short / stretched, ratio)


def test_proportional_frequencies_are_those_of_transformers() -> None:
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    written = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    config = transformers.LlamaConfig(head_dim=128, rope_parameters=written)
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS["proportional"](config)
    frequencies, factor = compute_inverse_frequencies(
        "proportional", 128, 1e6, {"rotated_pairs": 16}
    )
    torch.testing.assert_close(frequencies, wanted, rtol=2e-6, atol=0)
    assert factor == wanted_factor


def test_every_kind_is_held_against_transformers() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    tested = {kind for kind, _ in SCALINGS_UNDER_TEST}
    assert tested | {"default", "longrope", "proportional"} == set(SCALINGS)
    assert set(SCALINGS) - {"default"} <= set(ROPE_INIT_FUNCTIONS)


def test_neighbours_are_pairs_where_it_is_interleaved() -> None:
    """Each pair is a complex number, turned by position times frequency."""
    x = torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(0))
    frequencies, factor = compute_inverse_frequencies("default", 6, 100.0, {})
    positions = [0, 3, 50, 7]
    actual = apply_rotary(
        x, compute_rotary_angles(torch.tensor(positions), frequencies, factor), interleaved=True
    )
    for token, position in enumerate(positions):
        for pair in range(3):
            turn = cmath.exp(1j * position * 100.0 ** (-pair / 3))
            for head in range(2):
                real, imaginary = x[token, head, 2 * pair : 2 * pair + 2].tolist()
                wanted = complex(real, imaginary) * turn
                found = complex(*actual[token, head, 2 * pair : 2 * pair + 2].tolist())
                assert found == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_beyond_the_rotated_part_passes_through(
    interleaved: bool, dtype: torch.dtype
) -> None:
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    frequencies, factor = compute_inverse_frequencies("default", 6, 10.0, {})
    angles = compute_rotary_angles(torch.arange(5), frequencies, factor)
    actual = apply_rotary(x, angles, interleaved)
    assert actual.dtype == dtype
    assert torch.equal(actual[..., 6:], x[..., 6:])
    assert torch.equal(actual[..., :6], apply_rotary(x[..., :6], angles, interleaved))
    assert not torch.equal(actual[1:, :, :6], x[1:, :, :6])
