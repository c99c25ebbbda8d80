"""Rotary frequencies against transformers for each scaling; rotation against complex numbers."""

from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gllm.kernels.rotary import apply_rotary, inverse_frequencies, rotary_angles

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: list[tuple[str, dict[str, Any]]] = [
    ("linear", {"factor": 4.0}),
    ("llama3", LLAMA3 | {"original_max_position_embeddings": 8192}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 32768}),
    ("yarn", {"factor": 4.0, "original_max_position_embeddings": 4096, "truncate": False}),
    (
        "yarn",
        {"factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16, "beta_slow": 2}
        | {"mscale": 0.7, "mscale_all_dim": 1.0},
    ),
    ("yarn", {"factor": 1.0, "original_max_position_embeddings": 64, "attention_factor": 1.2}),
]


@pytest.mark.parametrize(("kind", "parameters"), SCALINGS, ids=str)
def test_scalings_match_transformers(kind: str, parameters: dict[str, Any]) -> None:
    theta = 500_000.0
    config = transformers.LlamaConfig(
        max_position_embeddings=32768,
        head_dim=128,
        rope_parameters={"rope_type": kind, "rope_theta": theta, **parameters},
    )
    wanted, wanted_factor = ROPE_INIT_FUNCTIONS[kind](config)
    frequencies, factor = inverse_frequencies(kind, 128, theta, parameters)
    torch.testing.assert_close(frequencies, wanted, rtol=2e-6, atol=0)
    assert factor == pytest.approx(wanted_factor)


def test_rotation_is_a_complex_product() -> None:
    x = torch.randn(5, 3, 8, generator=torch.Generator().manual_seed(0))
    frequencies, factor = inverse_frequencies("default", 8, 10.0, {})
    positions = torch.tensor([0, 1, 7, 100, 5])
    actual = apply_rotary(x, rotary_angles(positions, frequencies, factor))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(
        torch.ones(5, 1, 4), positions[:, None, None] * frequencies
    )
    torch.testing.assert_close(actual, torch.cat((turned.real, turned.imag), dim=-1))
