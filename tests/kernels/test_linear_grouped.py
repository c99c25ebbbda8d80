"""Linear maps with weights of few bits in every way, bit for bit against a definition in numpy."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels.activation import act_and_mul
from gllm.kernels.gated_linear import gated_linear, prepare_gated
from gllm.kernels.grouped_panels import pack
from gllm.kernels.grouped_weight import (
    GroupedRows,
    GroupedWeight,
    GroupLayout,
    GroupScales,
    dequantize_rows,
    quantize_to_4_bits,
    quantize_to_8_bits,
    slice_rows,
)
from gllm.kernels.linear import linear, lookup_rows, prepare
from gllm.kernels.linear_grouped import GroupedMatrix
from gllm.kernels.native.library import DTYPES
from gllm.kernels.threads import set_num_threads
from gllm.kernels.weight_format import dequantize_weight
from tests.support.examples import num_examples
from tests.support.models.kernel_builds import covers_builds

TYPES = st.sampled_from([*DTYPES])
TABLE = tuple(range(0, 240, 15))
LAYOUTS = {
    "Q4_0": (GroupLayout(4, 32, zero=8), torch.float16, False),
    "Q4_1": (GroupLayout(4, 32), torch.float16, True),
    "Q4_K": (GroupLayout(4, 32), torch.int8, True),
    "Q2_K": (GroupLayout(4, 16), torch.int8, True),
    "Q5_1": (GroupLayout(6, 32), torch.float16, True),
    "Q6_K": (GroupLayout(6, 16, zero=32), torch.int8, False),
    "Q8_0": (GroupLayout(8, 32, zero=128), torch.float16, False),
    "IQ4_NL": (GroupLayout(4, 32, zero=128, table=TABLE), torch.float16, False),
    "NVFP4": (GroupLayout(4, 16, zero=12, table=TABLE), torch.float32, False),
    "GPTQ": (GroupLayout(4, 128), torch.bfloat16, True),
    # Codes without zero, -100 to 155, do not fit into 8 bits.
    "GPTQ-8": (GroupLayout(8, 64, zero=100), torch.float16, False),
}


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """Numbers whose rows differ in size by powers of two."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-6, 6, (shape[0],), generator=generator)
    numbers = torch.randn(*shape, generator=generator)
    return (numbers * sizes.view(-1, *[1] * (len(shape) - 1))).to(dtype)


def random_scales(seed: int, kind: torch.dtype, outputs: int, groups: int) -> GroupScales:
    generator = torch.Generator().manual_seed(seed)
    if kind != torch.int8:
        return GroupScales(torch.randn(outputs, groups, generator=generator).to(kind))
    numbers = torch.randint(-128, 128, (outputs, groups), generator=generator, dtype=torch.int8)
    return GroupScales(numbers, torch.randn(outputs, groups // 4, generator=generator).half())


def random_rows(name: str, outputs: int, inputs: int, seed: int = 0) -> GroupedRows:
    layout, kind, has_minimums = LAYOUTS[name]
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 1 << layout.width, (outputs, inputs), generator=generator)
    groups = -(-inputs // layout.group)
    return GroupedRows(
        codes.to(torch.uint8),
        random_scales(seed + 1, kind, outputs, groups),
        random_scales(seed + 2, kind, outputs, groups) if has_minimums else None,
    )


def stored(name: str, rows: GroupedRows) -> GroupedWeight:
    outputs, inputs = rows.codes.shape
    return GroupedWeight(LAYOUTS[name][0], (outputs, inputs), 0, partial(slice_rows, rows))


def packed(weights: Sequence[GroupedWeight]) -> GroupedMatrix:
    matrix = prepare(weights)
    assert isinstance(matrix, GroupedMatrix)
    return matrix


def numbers_of(scales: GroupScales) -> np.ndarray:
    numbers = scales.numbers.float().numpy()
    if scales.units is None:
        return numbers
    shared = numbers.shape[1] // scales.units.shape[1]
    return numbers * np.repeat(scales.units.float().numpy(), shared, 1)


def quantized(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers [rows, padded inputs] and scales [rows, blocks] of x [rows, inputs]."""
    numbers = np.pad(x.float().numpy(), ((0, 0), (0, -x.shape[1] % 32)))
    blocks = numbers.reshape(len(numbers), -1, 32)
    most = np.abs(blocks).max(axis=2)
    inverse = (np.float32(127) / np.maximum(most, np.float32(2.0**-120)))[:, :, None]
    whole = np.where(most[:, :, None] < 2.0**-120, 0, np.rint(blocks * inverse))
    return whole.astype(np.int64).reshape(numbers.shape), most / np.float32(127)


def wanted(x: Tensor, name: str, rows: GroupedRows, bias: Tensor | None) -> Tensor:
    """Result of the definition for finite numbers."""
    layout, codes = LAYOUTS[name][0], rows.codes.numpy().astype(np.int64)
    if layout.table is not None:
        codes = np.array(layout.table)[codes]
    codes = np.pad(codes - layout.zero, ((0, 0), (0, -codes.shape[1] % 32)))
    whole, x_scales = quantized(x)
    scales, size = numbers_of(rows.scales), min(layout.group, 32)
    result = np.zeros((len(x), len(codes)), np.float32)
    parts = [slice(begin, begin + size) for begin in range(0, x.shape[1], size)]
    for part in parts:
        sums = (whole[:, part] @ codes[:, part].T).astype(np.float32)
        scale = scales[:, part.start // layout.group]
        result += sums * (scale * x_scales[:, part.start // 32, None])
    if rows.minimums is not None:
        minimums = numbers_of(rows.minimums)
        for part in parts:
            totals = whole[:, part].sum(1).astype(np.float32) * x_scales[:, part.start // 32]
            result -= minimums[:, part.start // layout.group] * totals[:, None]
    if bias is not None:
        result += bias.float().numpy()
    return torch.from_numpy(result).to(x.dtype)


def same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, int, int]:
    """A layout, and numbers of outputs and inputs; types with units have whole numbers of those."""
    name = draw(st.sampled_from(sorted(LAYOUTS)))
    layout, kind, _ = LAYOUTS[name]
    whole = 4 * layout.group if kind == torch.int8 else 1
    return name, draw(st.integers(1, 70)), draw(st.integers(1, 300 // whole)) * whole


@settings(max_examples=num_examples(40, 2000), deadline=None)
@given(TYPES, shapes(), st.integers(1, 34), st.booleans(), st.integers(0, 99))
def test_products_are_those_of_the_definition(
    way: str, dtype: torch.dtype, shape: tuple[str, int, int], rows: int, biased: bool, seed: int
) -> None:
    name, outputs, inputs = shape
    weight = random_rows(name, outputs, inputs, seed)
    x, bias = random(seed, dtype, rows, inputs), random(seed + 2, dtype, outputs)
    actual = linear(x, prepare([stored(name, weight)]), bias if biased else None)
    same_bits(actual, wanted(x, name, weight, bias if biased else None))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_largest_sums_are_exact(way: str, name: str) -> None:
    """All codes at their ends: nothing saturates."""
    outputs, inputs = 18, 512
    rows = random_rows(name, outputs, inputs)
    rows.codes.fill_((1 << LAYOUTS[name][0].width) - 1)
    rows.codes[::2, 1::2] = 0
    x = torch.ones(3, inputs)
    x[1, ::2] = -1
    x[2] = -1
    same_bits(linear(x, prepare([stored(name, rows)]), None), wanted(x, name, rows, None))


@covers_builds(name=sorted(LAYOUTS), dtype=[*DTYPES])
def test_packed_weights_are_those_of_the_file(way: str, name: str, dtype: torch.dtype) -> None:
    """Unpacked, dequantized and looked up, for outputs beyond those of one slab."""
    rows = random_rows(name, 130, 256)
    weight = stored(name, rows)
    part = pack(weight)
    made = part.unpack()
    expected = dequantize_rows(rows, weight.layout)
    assert torch.equal(dequantize_weight(weight), expected)
    assert torch.equal(made.scales.floats(), rows.scales.floats())
    ids = torch.tensor([129, 0, 17, 17])
    same_bits(lookup_rows(GroupedMatrix((part,), dtype), ids), expected[ids].to(dtype))
    with pytest.raises(IndexError, match="130 rows"):
        lookup_rows(GroupedMatrix((part,), dtype), torch.tensor([130]))


def test_slabs_are_packed_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows("Q4_K", 70, 256)
    whole = pack(stored("Q4_K", rows))
    monkeypatch.setattr("gllm.kernels.grouped_weight.SLAB_WEIGHTS", 1)
    slabs = pack(stored("Q4_K", rows))
    assert torch.equal(slabs.codes, whole.codes)
    assert torch.equal(slabs.scales.floats(), whole.scales.floats())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(way: str, dtype: torch.dtype) -> None:
    x, matrix = random(0, dtype, 64, 96), prepare([stored("Q4_1", random_rows("Q4_1", 50, 96))])
    whole = linear(x, matrix, None)
    for rows in range(1, 65):
        same_bits(linear(x[-rows:], matrix, None), whole[-rows:])


@covers_builds(name=sorted(LAYOUTS), rows=[7, 16, 19, 23])
def test_many_rows_and_inputs(way: str, name: str, rows: int) -> None:
    """More inputs than are multiplied at once, in tiles of rows of all kinds."""
    weight, x = random_rows(name, 50, 1152), random(0, torch.bfloat16, rows, 1152)
    matrix, expected = prepare([stored(name, weight)]), wanted(x, name, weight, None)
    same_bits(linear(x, matrix, None), expected)
    for row in (0, rows - 1):
        same_bits(linear(x[row : row + 1], matrix, None), expected[row : row + 1])


@covers_builds(name=["GPTQ", "Q6_K"], dtype=[*DTYPES], inputs=[64, 256])
def test_inputs_in_another_order(way: str, name: str, dtype: torch.dtype, inputs: int) -> None:
    """As act-order of GPTQ has them: columns of codes multiply the inputs that `order` names."""
    rows, order = random_rows(name, 35, inputs), torch.arange(inputs).roll(5).flip(0)
    matrix = prepare([replace(stored(name, rows), order=order)])
    for count in (1, 7):
        x = random(1, dtype, count, inputs)
        same_bits(linear(x, matrix, None), wanted(x[:, order], name, rows, None))


@covers_builds(name=["Q4_K", "IQ4_NL", "GPTQ"], sizes=[(64, 32, 7), (32, 7, 32), (40, 33)])
def test_neighbours_of_a_kind_are_one(way: str, name: str, sizes: tuple[int, ...]) -> None:
    """In one call as far as panels are whole, with the bits of separate weights."""
    rows = [random_rows(name, count, 256, seed) for seed, count in enumerate(sizes)]
    matrix = packed([stored(name, part) for part in rows])
    cuts = [count for count in sizes[:-1] if count % 32]
    assert len(matrix.parts) == 1 + len(cuts)
    x, bias = random(1, torch.bfloat16, 3, 256), random(2, torch.bfloat16, sum(sizes))
    expected = [
        wanted(x, name, part, own) for part, own in zip(rows, bias.split(sizes), strict=True)
    ]
    same_bits(linear(x, matrix, bias), torch.cat(expected, 1))


def test_weights_of_two_kinds_stay_apart() -> None:
    rows = random_rows("GPTQ", 32, 128)
    weight, order = stored("GPTQ", rows), torch.arange(128).flip(0)
    others = [replace(weight, order=order), stored("Q4_0", random_rows("Q4_0", 32, 128)), weight]
    matrix = packed([weight, *others])
    assert [part.outputs for part in matrix.parts] == [32] * 4
    assert len(packed([others[0], replace(weight, order=order.clone())]).parts) == 1


@covers_builds(activation=["silu", "swiglu_oai"], outputs=[32, 160, 40], rows=[1, 5, 23])
def test_gated_products_are_those_of_two_kernels(
    way: str, activation: str, outputs: int, rows: int
) -> None:
    """One kernel multiplies and gates whole panels of outputs, without other bits."""
    parts = [stored("Q4_K", random_rows("Q4_K", outputs, 256, seed)) for seed in (0, 1)]
    bias = random(2, torch.bfloat16, 2 * outputs)
    matrix = prepare_gated(parts, bias, activation)
    x = random(3, torch.bfloat16, rows, 256)
    expected = act_and_mul(activation, linear(x, matrix.gate_up, bias))
    same_bits(gated_linear(x, matrix), expected)


def test_many_rows_and_threads(way: str) -> None:
    """More rows than a task has, over two threads."""
    x, rows = random(0, torch.bfloat16, 401, 64), random_rows("Q6_K", 50, 64)
    set_num_threads(2)
    try:
        actual = linear(x, prepare([stored("Q6_K", rows)]), None)
    finally:
        set_num_threads(1)
    same_bits(actual, wanted(x, "Q6_K", rows, None))


@pytest.mark.parametrize("names", [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q4_0")])
def test_parts_of_different_types(way: str, names: Sequence[str]) -> None:
    """Such as the query, key and value projections of a mixture."""
    x, outputs = random(0, torch.bfloat16, 5, 256), [20, 33, 16][: len(names)]
    parts = [random_rows(name, n, 256) for name, n in zip(names, outputs, strict=True)]
    bias = random(1, torch.bfloat16, sum(outputs))
    matrix = prepare([stored(*each) for each in zip(names, parts, strict=True)])
    out = torch.empty(5, sum(outputs))
    expected = torch.cat(
        [wanted(x, name, part, None).float() for name, part in zip(names, parts, strict=True)], 1
    )
    actual = linear(x, matrix, bias, out)
    torch.testing.assert_close(actual, expected + bias.float(), rtol=0.02, atol=0.02)
    same_bits(linear(x, matrix, bias), actual.bfloat16())


@covers_builds(dtype=[*DTYPES], bad=[torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(way: str, dtype: torch.dtype, bad: float) -> None:
    x, matrix = random(0, dtype, 8, 70), prepare([stored("Q4_1", random_rows("Q4_1", 70, 70))])
    good = linear(x, matrix, None)
    for column in (0, 69):
        broken = x.clone()
        broken[3, column] = bad
        result = linear(broken, matrix, None)
        assert result[3].isnan().all()
        others = [0, 1, 2, 4, 5, 6, 7]
        same_bits(result[others], good[others])


def test_no_rows(way: str) -> None:
    matrix = prepare([stored("Q4_0", random_rows("Q4_0", 7, 9))])
    assert linear(torch.empty(0, 9), matrix, None).shape == (0, 7)


def test_weights_are_rounded_to_4_bits(way: str) -> None:
    """With less error than without the search of the clip, and half a step at most elsewhere."""
    weight = random(0, torch.float32, 40, 96)
    matrix = prepare(weight, "int4")
    made = lookup_rows(matrix, torch.arange(40))
    groups, rounded = weight.unflatten(1, (-1, 32)), made.unflatten(1, (-1, 32))
    most = groups.abs().amax(2, keepdim=True)
    error = (rounded - groups).square().sum(2)
    plain = ((groups / most * 7).round() * most / 7 - groups).square().sum(2)
    assert (error <= plain * 1.01).float().mean() > 0.8
    assert error.sum() < 0.95 * plain.sum()
    assert matrix.nbytes == 64 * 96 * 4.5 / 8


@pytest.mark.parametrize(
    ("width", "group", "words"),
    [(5, 32, "codes of 5 bits"), (4, 24, "groups of 24 inputs"), (4, 0, "groups of 0 inputs")],
)
def test_layouts_without_a_kernel_are_refused(width: int, group: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GroupLayout(width, group)


@pytest.mark.parametrize("quantize", [quantize_to_4_bits, quantize_to_8_bits])
def test_rounded_weights_stay_on_their_device(
    quantize: Callable[[Tensor], GroupedWeight],
) -> None:
    """A tensor without numbers stands for one of a GPU."""
    assert quantize(torch.empty(50, 256, device="meta")).device.type == "meta"
