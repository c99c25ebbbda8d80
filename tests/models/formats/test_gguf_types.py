"""Block types of GGUF: the bits of the gguf package's dequantization, and bytes per weight."""

import re
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from gllm.kernels.grouped_weight import GroupedWeight, dequantize_rows
from gllm.kernels.linear_grouped import GroupedFormat
from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import BLOCK_TYPES
from gllm.models.formats.gguf_types import FLOATS, GROUPED_TYPES, grouped_type, view_blocks

KINDS = {kind.name: kind for kind in BLOCK_TYPES.values()}
ROWS, INPUTS = 40, 512
PAGE = Path(__file__).parents[3] / "docs" / "gguf.md"


def random_blocks(name: str) -> bytearray:
    """Return rows of blocks with all codes and scales; float16 units are finite."""
    kind = KINDS[name]
    source = np.random.default_rng(sum(name.encode()))
    blocks = source.integers(0, 256, (ROWS * INPUTS // kind.weights, kind.nbytes), dtype=np.uint8)
    halves = {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,), "MXFP4": ()}.get(
        name, (0, 2) if name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else (0,)
    )
    for begin in halves:
        blocks[:, begin + 1] &= 0xBF  # an exponent below the one of infinity
    if name == "MXFP4":
        # Exponents from denormal numbers up to the last one whose weights are finite.
        blocks[:, 0] = np.arange(len(blocks)) % 250
    return bytearray(blocks.tobytes())


@pytest.mark.parametrize("name", GROUPED_TYPES)
def test_dequantized_bits_are_those_of_the_gguf_package(name):
    data, kind = random_blocks(name), GROUPED_TYPES[name]
    rows = kind.unpack(view_blocks(data, ROWS, KINDS[name]))
    assert rows.codes.dtype == torch.uint8
    expected = gguf.quants.dequantize(
        np.frombuffer(data, np.uint8).reshape(ROWS, -1), gguf.GGMLQuantizationType[name]
    )
    result = dequantize_rows(rows, kind.layout)
    assert torch.equal(result, torch.from_numpy(expected.copy()))


@pytest.mark.parametrize("name", GROUPED_TYPES)
def test_packed_weight_has_the_bytes_and_rows_of_the_type(name):
    data, kind = random_blocks(name), GROUPED_TYPES[name]
    blocks = view_blocks(data, ROWS, KINDS[name])
    weight = GroupedWeight(
        kind.layout, (ROWS, INPUTS), len(data), lambda begin, end: kind.unpack(blocks[begin:end])
    )
    matrix = GroupedFormat().prepare([weight])
    padded_rows = 64  # whole panels
    assert matrix.nbytes == padded_rows * INPUTS * kind.memory_bytes
    ids = torch.tensor([0, 39, 7])
    expected = dequantize_rows(kind.unpack(blocks), kind.layout)[ids]
    assert torch.equal(GroupedFormat().lookup(matrix, ids), expected)


def test_page_has_the_bytes_of_each_type():
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", PAGE.read_text(), re.MULTILINE)
    expected = {
        (name, f"{KINDS[name].nbytes / KINDS[name].weights:.4f}", f"{kind.memory_bytes:.4f}")
        for name, kind in GROUPED_TYPES.items()
    }
    assert set(rows) == expected


def test_type_that_is_not_implemented_is_refused():
    assert grouped_type("F16") is None
    with pytest.raises(ModelError, match="type IQ2_XS is not implemented: choose a file"):
        grouped_type("IQ2_XS")


def test_floats_are_those_of_torch():
    assert all(KINDS[name].nbytes == dtype.itemsize for name, dtype in FLOATS.items())
