"""The kernels of one line against their formulas, and their precision in bfloat16."""

import torch

from gllm.kernels.activation import act_and_mul as gated
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
