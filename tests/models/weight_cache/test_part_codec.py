"""Parts of a model as plain values and memory, and back."""

import ctypes
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from gllm.kernels.linear_unquantized import UnquantizedMatrix
from gllm.models.ranks import Ranks
from gllm.models.spec.parts import NormSpec
from gllm.models.weight_cache.part_codec import (
    ALIGNMENT,
    EncodedPart,
    NotEncodableError,
    decode_part,
    encode_part,
)

RANKS = Ranks(1, 2)


def copy_data(part: EncodedPart) -> Tensor:
    """Return the data as a file would have them, at an address of the same alignment."""
    memory = torch.zeros(part.num_bytes + ALIGNMENT, dtype=torch.uint8)
    data = memory[-memory.data_ptr() % ALIGNMENT :]
    for span in part.spans:
        ctypes.memmove(data.data_ptr() + span.offset, span.address, span.num_bytes)
    return data


def restore(part: object, ranks: Ranks = RANKS) -> Any:
    """Return a part that was encoded, sent as bytes and decoded."""
    encoded = encode_part(part, RANKS)
    tree = json.loads(json.dumps(encoded.tree))
    return decode_part(tree, copy_data(encoded), ranks)


def test_values_come_back_with_their_types() -> None:
    values = (
        *(None, True, 3, -2.5, float("inf"), "text", (), [1, (2,)], {"a": 1, 2: [None]}),
        *(torch.bfloat16, torch.device("cpu"), range(2, 9, 3)),
    )
    back = restore(values)
    assert back == values
    assert list(map(type, back)) == list(map(type, values))


def test_modules_and_their_ranks_come_back() -> None:
    spec = NormSpec("norm", "rms", 1e-5)
    mine = Ranks(1, 2)
    matrix = UnquantizedMatrix(torch.arange(12.0).view(3, 4), 3, False)
    back, same, ranks, same_spec = restore((spec, matrix, RANKS, spec), mine)
    assert back == spec
    assert same_spec is back
    assert ranks is mine
    assert type(same) is UnquantizedMatrix
    assert torch.equal(same.weight, matrix.weight)
    assert (same.outputs, same.is_packed) == (3, False)


def test_memory_is_shared_as_before() -> None:
    whole = torch.arange(40, dtype=torch.int32)
    table, column = whole[3:33].view(5, 6), whole[3:33].view(5, 6)[:, 2]
    encoded = encode_part([table, column, table, whole[36:]], RANKS)
    assert sum(span.num_bytes for span in encoded.spans) == (30 + 4) * 4
    first, second, third, last = restore([table, column, table, whole[36:]])
    assert third is first
    assert torch.equal(first, table)
    assert torch.equal(second, column)
    assert torch.equal(last, whole[36:])
    assert second.stride() == column.stride()
    assert second.data_ptr() - first.data_ptr() == column.data_ptr() - table.data_ptr()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.empty(0, 3),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.arange(6.0).view(2, 3).t(),
        torch.ones(1).expand(4),
        torch.randn(7, 5).to(torch.float8_e4m3fn),
    ],
)
def test_shapes_strides_and_alignment_stay(tensor: Tensor) -> None:
    (back,) = restore((tensor,))
    assert (back.shape, back.stride(), back.dtype) == (tensor.shape, tensor.stride(), tensor.dtype)
    assert torch.equal(back.float(), tensor.float())
    assert not tensor.numel() or back.data_ptr() % ALIGNMENT == tensor.data_ptr() % ALIGNMENT


@dataclass
class Foreign:
    """A class of no room whose classes can be encoded."""

    number: int = 1


@pytest.mark.parametrize(
    "value", [Foreign(), print, {1, 2}, torch.empty(2, device="meta"), Ranks(0, 3).join]
)
def test_other_objects_cannot_be_encoded(value: object) -> None:
    with pytest.raises(NotEncodableError):
        encode_part([1, value], RANKS)


@pytest.mark.parametrize(
    "tree",
    [
        ["record", "os", "system", []],
        ["record", "tests.models.weight_cache.test_part_codec", "Foreign", []],
        ["record", "gllm.models.ranks", "no_such_class", []],
        ["record", "gllm.models.weight_cache.part_codec", "importlib.import_module", []],
        ["record", "gllm.models.weight_cache.part_codec", "decode_part", []],
        ["record", "gllm.models.weight_cache.part_codec", "Tensor", []],
        ["same", 0],
        ["tensor", 0],
        ["other"],
    ],
)
def test_only_classes_of_gllm_are_created(tree: object) -> None:
    with pytest.raises(ValueError, match="it "):
        decode_part([[], tree], torch.empty(0, dtype=torch.uint8), RANKS)
