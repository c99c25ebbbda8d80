"""Products by weights in 8-bit floats against floats."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.linear_fp8 import dequantize, stack_fp8
from gllm.kernels.triton import tiles
from gllm.kernels.triton.linear_fp8 import choose_num_parts, linear_fp8, quantize
from tests.kernels.test_linear_fp8 import quantized
from tests.support.examples import num_examples

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


class Poison(TorchFunctionMode):
    """Memory full of NaN for what is allocated, whose sizes are kept."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[tuple[int, ...]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.empty:
            self.sizes.append(args)
            if result.is_floating_point():
                result.fill_(torch.nan)
        return result


def close(actual: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    """Up to the rounding of the result, and of sums."""
    error = (actual.double() - wanted.double()).norm() / wanted.double().norm()
    assert error < {torch.float16: 1e-3, torch.bfloat16: 5e-3}.get(dtype, 1e-5)


def expected(x: torch.Tensor, matrix: Fp8Matrix, group: int | None) -> torch.Tensor:
    """In float64; x as codes and scales of groups, if any."""
    numbers = x.double()
    if group is not None:
        codes, scales = quantize(x, group)
        numbers = codes.view(torch.float8_e4m3fn).to(torch.float32).double()
        numbers = numbers * scales.repeat_interleave(group, 1)[:, : x.shape[1]].double()
    return functional.linear(numbers, dequantize(matrix).double())


@settings(max_examples=num_examples(5, 30), deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 3, 17, 33]),
    st.sampled_from([1, 40]),
    st.sampled_from([10, 64, 150]),
    st.sampled_from([(16, 32), (8, 64), (128, 128), None]),
    st.sampled_from(DTYPES),
    st.booleans(),
)
def test_products(
    tokens: int,
    outputs: int,
    inputs: int,
    block: tuple[int, int] | None,
    dtype: torch.dtype,
    fp8: bool,
) -> None:
    matrix = quantized(outputs, inputs, block)
    x = torch.randn(tokens, inputs + 3, generator=torch.Generator().manual_seed(1)).to(dtype)
    x = x[:, :inputs]
    out = torch.full((tokens + 1, outputs), torch.nan)
    assert linear_fp8(x, matrix, None, out[:tokens], fp8).isfinite().all()
    assert out[tokens].isnan().all()
    group = min(128, block[1] if block and block[1] < inputs else 128)
    close(out[:tokens], expected(x, matrix, group if fp8 else None), torch.float32)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_stacked_with_a_bias(dtype: torch.dtype, fp8: bool) -> None:
    matrix = stack_fp8([quantized(20, 70, (8, 32), 1), quantized(12, 70, (8, 32), 2)])
    x = torch.randn(2, 70, generator=torch.Generator().manual_seed(4)).to(dtype)
    bias = torch.arange(32.0).to(dtype)
    actual = linear_fp8(x, matrix, bias, fp8=fp8)
    assert actual.dtype == dtype
    wanted = expected(x, matrix, 32 if fp8 else None) + bias.double()
    close(actual, wanted, dtype)
    assert linear_fp8(x[:0], matrix, bias, fp8=fp8).shape == (0, 32)


@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize(
    ("parts", "fp8", "biased"),
    [
        (2, False, True),
        (3, True, False),
        pytest.param(2, True, True, marks=pytest.mark.full),
        pytest.param(3, False, False, marks=pytest.mark.full),
    ],
)
def test_inputs_are_cut_into_parts(parts: int, fp8: bool, biased: bool) -> None:
    """Into 2 and 3 of 9 groups, the last one smaller; each output is the same however often."""
    matrix = quantized(40, 280, (16, 32))
    x = torch.randn(3, 280, generator=torch.Generator().manual_seed(1)).bfloat16()
    bias = torch.arange(40.0).bfloat16() if biased else None
    out = torch.full((3, 40), torch.nan)
    with Poison() as poison:
        linear_fp8(x, matrix, bias, out, fp8=fp8, num_parts=parts)
    assert (parts, 3, 40) in poison.sizes
    wanted = expected(x, matrix, 32 if fp8 else None) + (0 if bias is None else bias.double())
    close(out, wanted, torch.float32)
    again = linear_fp8(x, matrix, bias, torch.empty(3, 40), fp8=fp8, num_parts=parts)
    assert torch.equal(again, out)


@pytest.mark.parametrize(
    ("tokens", "outputs", "inputs", "parts"),
    [
        (1, 3584, 3584, 4),
        (16, 3584, 3584, 4),
        (16, 3584, 18_944, 4),
        (16, 4608, 3584, 3),
        (16, 37_888, 3584, 1),
        (16, 4096, 14_336, 4),
        (64, 3584, 3584, 3),
        (64, 3584, 18_944, 4),
        (256, 3584, 3584, 1),
    ],
)
def test_as_many_parts_as_an_h200_needs(tokens: int, outputs: int, inputs: int, parts: int) -> None:
    """For the linear maps of Qwen2.5-7B and Llama-3.1-8B."""
    use = tiles.find_default_row("linear_fp8", {"tokens": tokens}).use
    grid = -(-outputs // use["columns"]), -(-tokens // use["rows"])
    assert choose_num_parts(tokens, inputs, inputs // 128, grid, use, processors=132) == parts


def test_every_code() -> None:
    """All weights that there are, NaN among them, in both ways."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    matrix = Fp8Matrix(codes[:, None].clone(), torch.ones(1, 1), 256, 1, torch.float32)
    x = torch.ones(1, 1)
    for fp8 in (False, True):
        actual = linear_fp8(x, matrix, None, fp8=fp8)[0]
        assert torch.equal(actual.isnan(), codes.to(torch.float32).isnan())
        finite = actual.isfinite()
        torch.testing.assert_close(actual[finite], codes.to(torch.float32)[finite])


def test_activations_are_rounded_to_the_nearest() -> None:
    """As torch rounds, at and between all codes; scales by the largest of a group."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    between = torch.cat((values, -values, (values[1:] + values[:-1]) / 2, values[1:] * 1.01))
    between = between.clamp(-448, 448)
    x = functional.pad(between, (0, -len(between) % 127)).view(-1, 127)
    x = functional.pad(x, (1, 0), value=448.0).reshape(1, -1)
    codes, scales = quantize(x)
    assert torch.equal(scales, torch.ones_like(scales))
    wanted = x.to(torch.float8_e4m3fn).to(torch.float32)
    assert torch.equal(codes.view(torch.float8_e4m3fn).to(torch.float32), wanted)
    codes, scales = quantize(torch.tensor([[0.0, 0.0], [-7.0, 3.5], [torch.nan, 1.0]]))
    assert scales[:2].flatten().tolist() == [1.0, 7 / 448]
    made = codes.view(torch.float8_e4m3fn).to(torch.float32)
    assert made[:2].tolist() == [[0.0, 0.0], [-448.0, 224.0]]
    assert made[2, 0].isnan()


def test_blocks_that_tiles_do_not_fit() -> None:
    with pytest.raises(ValueError, match="blocks of 48 inputs"):
        linear_fp8(torch.ones(1, 100), quantized(4, 100, (4, 48)), None, fp8=False)
