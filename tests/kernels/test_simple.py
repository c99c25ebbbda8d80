"""Short kernels and layer normalization against their formulas; precision in bfloat16."""

import pytest
import torch
from torch import Tensor

from gllm.kernels.activation import act_and_mul as gated
from gllm.kernels.layer_norm import layer_norm
from gllm.kernels.rms_norm import rms_norm


def test_rms_norm_takes_the_mean_in_float32() -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0)) * 100
    weight = torch.rand(33)
    wanted = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-6), wanted)
    rounded = rms_norm(x.bfloat16(), weight.bfloat16(), 1e-6)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), wanted, rtol=0.02, atol=0.02)


def test_the_first_half_gates() -> None:
    gate, up = torch.randn(2, 5, 9, generator=torch.Generator().manual_seed(0))
    wanted = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(gated("silu", torch.cat((gate, up), dim=-1)), wanted)


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    x = x.double()
    centred = x - x.mean(-1, keepdim=True)
    scaled = centred / (centred.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    return (scaled if bias is None else scaled + bias).float()


@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("shape", [(33,), (5, 33)], ids=["one scale", "each head's"])
def test_matches_its_formula(shape: tuple[int, ...], biased: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, 5, 33, generator=generator) * 50 + 20
    weight = torch.rand(shape, generator=generator)
    bias = torch.randn(shape, generator=generator) if biased else None
    wanted = plain(x, weight, bias, 1e-5)
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-5), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", [(33,), (5, 33)], ids=["one scale", "each head's"])
def test_mean_and_variance_are_taken_in_float32(shape: tuple[int, ...]) -> None:
    """In bfloat16 the sum of so many squares would be off by far more."""
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(7, 5, 33, generator=generator) * 0.5 + 30).bfloat16()
    weight = torch.rand(shape, generator=generator).bfloat16()
    rounded = layer_norm(x, weight, None, 1e-5)
    assert rounded.dtype == torch.bfloat16
    wanted = plain(x, weight, None, 1e-5)
    torch.testing.assert_close(rounded.float(), wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(2,), (1, 2)], ids=["one scale", "each head's"])
def test_epsilon_is_below_the_root(shape: tuple[int, ...]) -> None:
    x = torch.tensor([[1e-3, -1e-3]])
    wanted = 1e-3 / (1e-6 + 1e-2) ** 0.5
    actual = layer_norm(x, torch.ones(shape), None, 1e-2)
    torch.testing.assert_close(actual, torch.tensor([[wanted, -wanted]]))
