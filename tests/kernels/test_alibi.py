"""Slopes against those that are published with the method and with models."""

import math

import pytest
import torch

from gllm.kernels.alibi import compute_alibi_slopes

PUBLISHED: dict[int, list[float]] = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    # The paper's example.
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    # Those of 8 heads, then every other one of 16, whose first is the root of a half.
    12: [2.0**-k for k in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}


@pytest.mark.parametrize("heads", PUBLISHED)
def test_published_slopes(heads: int) -> None:
    torch.testing.assert_close(compute_alibi_slopes(heads), torch.tensor(PUBLISHED[heads]))


@pytest.mark.parametrize("heads", [16, 32, 40, 64, 71, 112])
def test_slopes_of_other_numbers(heads: int) -> None:
    """One factor from head to head; what is beyond a power of two lies halfway between."""
    slopes = [math.log2(slope) for slope in compute_alibi_slopes(heads).tolist()]
    assert len(slopes) == heads
    lower = 1 << heads.bit_length() - 1
    step = 8 / lower
    wanted = [-step * (head + 1) for head in range(lower)]
    wanted += [-step * (head + 0.5) for head in range(heads - lower)]
    assert slopes == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("heads", [6, 8, 12, 40, 71])
def test_as_transformers_has_them(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, 2, dtype=torch.int64)
    biases = build_alibi_tensor(mask, heads, torch.float32)
    torch.testing.assert_close(compute_alibi_slopes(heads), biases[:, 0, 1])
