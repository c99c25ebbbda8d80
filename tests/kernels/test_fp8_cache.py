"""Numbers of a KV cache in FP8."""

import pytest
import torch

from gllm.kernels.fp8_cache import select_converted
from gllm.kernels.native.library import DTYPES


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_the_number_that_torch_reads(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(32, 4, 2).view(torch.float8_e4m3fn)
    rows = torch.tensor([31, 0, 15, 16, *range(32)])
    wanted = codes.to(dtype)[rows]
    actual = select_converted(codes, rows, dtype)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.signbit(), wanted.signbit())
    assert actual.isnan().sum() == 4  # codes 127 and 255, each in a row that is read twice


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_other_caches_are_converted_as_they_are(kept: torch.dtype) -> None:
    cached = torch.randn(5, 3).to(kept)
    rows = torch.tensor([4, 4, 0])
    assert torch.equal(select_converted(cached, rows, torch.float32), cached.float()[rows])
