"""Products by weights of few bits on a GPU against the floats that they stand for.

The interpreter cuts bfloat16 off where GPUs round, always towards zero.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.experts import StackedExperts, run_stacked, stack_experts
from gllm.kernels.grouped_weight import (
    GroupedRows,
    GroupedWeight,
    dequantize_rows,
    quantize_to_4_bits,
)
from gllm.kernels.grouped_words import GroupedStack, GroupedWords, choose_span, pack_for_gpu
from gllm.kernels.linear import linear, lookup_rows, prepare
from gllm.kernels.linear_grouped import GroupedFormat, GroupedMatrix
from gllm.kernels.triton import experts as gpu
from gllm.kernels.triton import tiles
from gllm.kernels.triton.linear_grouped import choose_num_parts, linear_grouped
from gllm.kernels.weight_format import dequantize_weight
from tests.kernels.test_linear_grouped import LAYOUTS, random_rows, stored
from tests.support.full_cases import full_but

QUICK = {"Q4_K", "NVFP4", "Q6_K", "Q8_0"}
"""Layouts of every `make test`: each width, a table, units, minimums, groups of 16."""


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def packed(name: str, rows: Sequence[GroupedRows]) -> GroupedWords:
    (words,) = pack_for_gpu([stored(name, part) for part in rows])
    return words


def close(actual: Tensor, wanted: Tensor, rounding: float = 1e-5) -> None:
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < rounding


def expected(x: Tensor, name: str, rows: Sequence[GroupedRows]) -> Tensor:
    """In float64, by weights as the interpreter converts them to the dtype of x."""
    floats = torch.cat([dequantize_rows(part, LAYOUTS[name][0]) for part in rows])
    if x.dtype == torch.bfloat16:
        floats = (floats.view(torch.int32) & -0x10000).view(torch.float32)
    return functional.linear(x.double(), floats.to(x.dtype).double())


@pytest.mark.parametrize("name", full_but(QUICK, LAYOUTS))
def test_products(name: str) -> None:
    """Of rows that are wider than the weight's, into a part of wider ones; outputs of two parts."""
    rows = [random_rows(name, 12, 256, 1), random_rows(name, 21, 256, 2)]
    x, bias = random(3, torch.bfloat16, 3, 259)[:, :256], random(4, torch.bfloat16, 33)
    out = torch.full((4, 40), torch.nan)
    linear_grouped(x, packed(name, rows), bias, out[:3, 5:38])
    close(out[:3, 5:38], expected(x, name, rows) + bias.double())
    assert int(out.isfinite().sum()) == 3 * 33


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_activations_and_inputs_that_fill_no_span(dtype: torch.dtype) -> None:
    """Results of the dtype of x; 70 inputs in spans of 32, with a group of 128."""
    for name in ("Q4_0", "GPTQ"):
        rows, x = [random_rows(name, 7, 70)], random(1, dtype, 2, 70)
        actual = linear_grouped(x, packed(name, rows), None)
        assert actual.dtype == dtype
        close(actual, expected(x, name, rows), 1e-3 if dtype == torch.float16 else 1e-5)
    assert linear_grouped(x[:0], packed(name, rows), None).shape == (0, 7)


def test_inputs_in_another_order() -> None:
    """As act-order of GPTQ has them; weights with two orders stay apart, experts are refused."""
    rows, order = random_rows("GPTQ", 7, 128), torch.arange(128).roll(3).flip(0)
    weight = replace(stored("GPTQ", rows), order=order)
    (words,) = pack_for_gpu([weight])
    x = random(1, torch.float32, 2, 128)
    close(linear_grouped(x, words, None), expected(x[:, order], "GPTQ", [rows]))
    assert torch.equal(words.floats(), dequantize_weight(weight))
    assert len(pack_for_gpu([weight, weight, stored("GPTQ", rows)])) == 2
    with pytest.raises(ValueError, match=r"another order.*desc_act false.*--device cpu"):
        stack_experts(1, [[weight]])


@pytest.mark.usefixtures("ordered_products")
def test_bits_depend_on_no_other_row_and_on_no_split() -> None:
    """5 spans in parts of 2, by one program or one each, in tiles of 16 and of 32 rows."""
    rows, bias = [random_rows("Q4_1", 20, 5 * 32)], random(1, torch.bfloat16, 20)
    words, x = packed("Q4_1", rows), random(0, torch.bfloat16, 17, 5 * 32)
    whole = linear_grouped(x, words, bias, num_parts=3, split=False)
    close(whole, expected(x, "Q4_1", rows) + bias.double(), 1e-2)
    out = torch.full((17, 24), torch.nan, dtype=torch.bfloat16)
    linear_grouped(x, words, bias, out[:, 2:22], num_parts=3, split=True)
    assert torch.equal(out[:, 2:22], whole)
    assert int(out.isfinite().sum()) == 17 * 20
    for split in (False, True):
        assert torch.equal(linear_grouped(x[3:5], words, bias, None, 3, split), whole[3:5])


@pytest.mark.parametrize(
    ("outputs", "inputs", "width", "parts"),
    [
        (4608, 3584, 4, 6),
        (3584, 3584, 4, 7),
        (3584, 18_944, 4, 8),
        (37_888, 3584, 4, 1),
        (4096, 14_336, 8, 4),
        (64, 64, 4, 1),
    ],
)
def test_as_many_parts_as_an_h200_needs(outputs: int, inputs: int, width: int, parts: int) -> None:
    """For the linear maps of Qwen2.5-7B and Llama-3.1-8B, whatever the number of tokens."""
    span = choose_span(inputs)
    with tiles.override_tiles({}, tiles.read_tile_file(tiles.DEFAULT).tables):
        assert choose_num_parts(outputs, inputs // span, span, width, 132) == parts


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_words_are_those_of_the_file(name: str) -> None:
    """All outputs and some of them, as a table of embeddings is read."""
    rows = random_rows(name, 34, 256)
    words, wanted = packed(name, [rows]), dequantize_rows(rows, LAYOUTS[name][0])
    assert torch.equal(words.floats(), wanted)
    ids = torch.tensor([33, 0, 17, 17])
    assert torch.equal(words.floats(ids), wanted[ids])
    bits = {4: 4, 6: 6, 8: 8}[LAYOUTS[name][0].width]
    assert words.codes.nbytes + (0 if words.high is None else words.high.nbytes) == 34 * 32 * bits


def stacks(name: str, count: int, hidden: int, inner: int) -> tuple[GroupedStack, GroupedStack]:
    """Gate and up projections, as two parts, and down projections of experts."""

    def weights(seed: int, outputs: int, inputs: int) -> GroupedWeight:
        return stored(name, random_rows(name, outputs, inputs, seed))

    up = ([weights(n, inner, hidden), weights(10 + n, inner, hidden)] for n in range(count))
    down = ([weights(20 + n, hidden, inner)] for n in range(count))
    return stack_experts(count, up), stack_experts(count, down)


@pytest.mark.parametrize("name", full_but({"Q5_1"}, [*LAYOUTS]))
def test_experts(name: str) -> None:
    """As the weights in floats; whatever shares the batch."""
    hidden, inner = 256, 256 if name.endswith("_K") else 40
    up, down = stacks(name, 3, hidden, inner)
    floats = [torch.stack([stack[n].floats() for n in range(3)]) for stack in (up, down)]
    x, chosen = random(0, torch.float32, 5, hidden), torch.tensor([[0, 2]] * 4 + [[2, 0]])
    shares = random(1, torch.float32, 5, 2)
    biases = random(2, torch.float32, 3, 2 * inner), random(3, torch.float32, 3, hidden)
    actual = gpu.run_experts(x, chosen, shares, up, down, "relu", biases=biases)
    stacked = StackedExperts(floats[0], floats[1], "relu", *biases)
    wanted = run_stacked(x, chosen, shares, stacked)
    close(actual, wanted.double(), 1e-4)


def test_experts_of_two_types_are_refused() -> None:
    """Such as gate and up projections in 4 bits beside 6."""
    parts = [stored(name, random_rows(name, 4, 32)) for name in ("Q4_0", "Q4_1")]
    for experts in ([parts], [parts[:1], parts[1:]]):
        with pytest.raises(ValueError, match=r"different types of few bits.*--device cpu"):
            stack_experts(len(experts), experts)


def test_weights_are_rounded_to_4_bits_on_a_gpu() -> None:
    """A matrix and a stack of them have what a CPU's matrix has."""
    weight = random(0, torch.float32, 12, 64)
    wanted = lookup_rows(prepare(weight, "int4"), torch.arange(12))
    (words,) = pack_for_gpu([quantize_to_4_bits(weight)])
    matrix = GroupedMatrix((words,), torch.float32)
    assert torch.equal(lookup_rows(matrix, torch.arange(12)), wanted)
    stack = stack_experts(2, [[weight[:6], weight[6:]]] * 2, "int4")
    assert torch.equal(stack[1].floats(), wanted)
    x = random(1, torch.float32, 2, 64)
    close(linear(x, matrix, None), x.double() @ wanted.t().double())
    close(
        linear(x, GroupedFormat().select_expert(stack, 1), None), x.double() @ wanted.t().double()
    )
