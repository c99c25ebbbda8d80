"""Every registered weight format, through the interface that models use."""

import pytest
import torch

from gllm.config.engine import QUANTIZATIONS
from gllm.kernels.gated_linear import gated_linear, prepare_gated
from gllm.kernels.linear import has_lookup, linear, lookup_rows, prepare
from gllm.kernels.weight_format import WEIGHT_FORMATS, WeightFormat, format_of, weight_format
from tests.kernels.test_linear_fp8 import quantized

FLOAT_FORMATS = sorted(WEIGHT_FORMATS.keys() - {"fp8", "grouped"})
"""Formats that are made from floats; the others are those of checkpoints only."""
ERRORS = {"int4": 0.12}
"""Largest relative error of a product, where it is not 2 %."""


@pytest.mark.parametrize("name", WEIGHT_FORMATS)
def test_registered_class_implements_the_interface(name: str) -> None:
    assert isinstance(weight_format(name), WeightFormat)
    assert weight_format(name) is weight_format(name)


def test_every_option_of_quantization_is_a_format_made_from_floats() -> None:
    assert set(QUANTIZATIONS) <= set(FLOAT_FORMATS)


@pytest.mark.parametrize("name", FLOAT_FORMATS)
def test_formats_made_from_floats_agree_with_torch(way: str, name: str) -> None:
    generator = torch.Generator().manual_seed(4)
    parts = [torch.randn(rows, 32, generator=generator) for rows in (24, 8)]
    x, weight = torch.randn(3, 32, generator=generator), torch.cat(parts)
    matrix = prepare(parts, name)
    assert weight_format(matrix.format).has_lookup == weight_format(name).has_lookup
    assert matrix.nbytes > 0
    expected, error = x @ weight.t(), ERRORS.get(name, 0.02)
    assert (linear(x, matrix, None) - expected).norm() < error * expected.norm()
    halves = list(weight.chunk(2))
    gate, up = (x @ half.t() for half in halves)
    product = torch.relu(gate) * up
    actual = gated_linear(x, prepare_gated(halves, None, "relu", name))
    assert (actual - product).norm() < 1.5 * error * product.norm()
    if has_lookup(matrix):
        rows = lookup_rows(prepare([weight], name), torch.tensor([31, 0]))
        assert (rows - weight[[31, 0]]).norm() < error * rows.norm()


@pytest.mark.parametrize("name", FLOAT_FORMATS)
@pytest.mark.parametrize("rows", [32, 40])
def test_a_weight_is_unpacked_again(way: str, name: str, rows: int) -> None:
    """Also one that is merged for a gated MLP, whose halves end within a panel."""
    weight = torch.randn(rows, 64, generator=torch.Generator().manual_seed(4))
    plain, gated = prepare([weight], name), prepare_gated([*weight.chunk(2)], None, "silu", name)
    if not has_lookup(plain):
        return
    for matrix in (plain, gated.gate_up):
        unpacked = weight_format(matrix.format).unpack(matrix)
        assert unpacked.shape == weight.shape
        if name == "none":
            assert torch.equal(unpacked, weight)
        else:
            rows_of = lookup_rows(plain, torch.arange(rows))
            assert torch.equal(unpacked, rows_of)
            assert (unpacked - weight).norm() < ERRORS.get(name, 0.02) * weight.norm()


def test_weights_of_a_checkpoint_keep_their_format_unless_parts_differ() -> None:
    stored, floats = quantized(4, 6, (4, 3)), torch.ones(4, 6)
    assert format_of(prepare([stored, stored])) is weight_format("fp8")
    assert format_of(prepare([stored, floats])) is weight_format("none")
    assert format_of(prepare([stored], "int8")) is weight_format("int8")
