"""Encode the modules of a model's part, such as a decoder layer, as plain values and tensors.

Only tensors, plain values and instances of classes in gllm.models and gllm.kernels can be encoded.
Decoding creates instances of such classes and nothing else, and calls no code of them.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gllm.models.ranks import Ranks

ALIGNMENT = 64
"""Bytes: addresses of encoded tensors are those of the original ones modulo this."""
ROOMS = ("gllm.models.", "gllm.kernels.")
"""Packages whose classes can be encoded."""
PLAIN = (type(None), bool, int, float, str)


class NotEncodableError(Exception):
    """A part of a model has something that is neither a tensor, a plain value nor a module."""


@dataclass(frozen=True, slots=True)
class MemorySpan:
    """Bytes of a tensor, or of several that share memory, and their place in the encoded part."""

    address: int
    """Address of the first byte; valid as long as the part exists."""
    num_bytes: int
    offset: int
    """Bytes from the begin of the encoded part's data."""


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part of a model as a tree of plain values, and the memory of its tensors."""

    tree: Any
    """Nested lists of None, booleans, numbers and strings."""
    spans: Sequence[MemorySpan]
    """In ascending order of their offsets."""
    num_bytes: int
    """Size of the data: the end of the last span."""
    dtypes: frozenset[torch.dtype]
    """Dtypes of all tensors."""


def encode_part(part: object, ranks: Ranks) -> EncodedPart:
    """Encode a part of a model.

    Objects and memory that are used several times in the part are encoded once.

    Args:
        part: modules, or a tuple of them.
        ranks: ranks of the part's modules, which a decoded part gets anew.

    Raises:
        NotEncodableError: the part has other objects, or tensors that are not in host memory.
    """
    tensors = _TensorTable()
    tree = _Encoder(ranks, tensors).encode(part)
    spans, places, num_bytes = tensors.lay_out()
    return EncodedPart([places, tree], spans, num_bytes, frozenset(tensors.dtypes))


class _TensorTable:
    """Tensors of a part."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self.dtypes: set[torch.dtype] = set()

    def add(self, tensor: Tensor) -> int:
        """Return the index of a tensor in `places`."""
        if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.requires_grad:
            raise NotEncodableError(f"a tensor on {tensor.device}")
        self._tensors.append(tensor)
        self.dtypes.add(tensor.dtype)
        return len(self._tensors) - 1

    def lay_out(self) -> tuple[list[MemorySpan], list[list[Any]], int]:
        """Return the spans, the place of each tensor and the size of the data.

        A place is [dtype, offset in bytes, shape, strides].
        """
        spans: list[MemorySpan] = []
        offsets = [0] * len(self._tensors)
        end = 0
        for run in _merge([(each.data_ptr(), _end_of(each)) for each in self._tensors]):
            offset = -(-end // ALIGNMENT) * ALIGNMENT + run.first % ALIGNMENT
            spans.append(MemorySpan(run.first, run.last - run.first, offset))
            for index in run.indices:
                offsets[index] = offset + self._tensors[index].data_ptr() - run.first
            end = offset + run.last - run.first
        places = [
            [
                str(tensor.dtype).removeprefix("torch."),
                offset,
                list(tensor.shape),
                list(tensor.stride()),
            ]
            for tensor, offset in zip(self._tensors, offsets, strict=True)
        ]
        return spans, places, end


def _end_of(tensor: Tensor) -> int:
    """Return the address after the last element of a tensor."""
    if not tensor.numel():
        return tensor.data_ptr()
    steps = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return tensor.data_ptr() + (steps + 1) * tensor.element_size()


@dataclass(slots=True)
class _Run:
    """Addresses of tensors that overlap."""

    first: int
    last: int
    """Address after the last byte."""
    indices: list[int]
    """Indices of the tensors."""


def _merge(ranges: Sequence[tuple[int, int]]) -> list[_Run]:
    """Return the addresses of tensors, those that overlap as one run; empty ones are left out.

    They are in the order of the tensors, not of the addresses: all processes write the same file.
    """
    runs: list[_Run] = []
    for index in sorted(range(len(ranges)), key=ranges.__getitem__):
        first, last = ranges[index]
        if first == last:
            continue
        if runs and first < runs[-1].last:
            runs[-1].last = max(last, runs[-1].last)
            runs[-1].indices.append(index)
        else:
            runs.append(_Run(first, last, [index]))
    return sorted(runs, key=lambda run: min(run.indices))


class _Encoder:
    """Encodes objects as lists [kind, ...]; plain values stay as they are."""

    def __init__(self, ranks: Ranks, tensors: _TensorTable) -> None:
        self._ranks, self._tensors = ranks, tensors
        self._seen: dict[int, int] = {}
        """Number of each encoded object by its identity."""
        self._objects: list[object] = []
        """Keeps the objects, so that no other one gets the identity of one that is gone."""

    def encode(self, value: Any) -> Any:
        """Encode a value. Raises NotEncodableError."""
        if type(value) in PLAIN:
            return value
        if type(value) in (tuple, list):
            return [type(value).__name__, [self.encode(item) for item in value]]
        if type(value) is dict:
            pairs = [[self.encode(key), self.encode(item)] for key, item in value.items()]
            return ["dict", pairs]
        if isinstance(value, torch.dtype):
            return ["dtype", str(value).removeprefix("torch.")]
        if type(value) is torch.device and value.type == "cpu":
            return ["device", "cpu"]
        if type(value) is range:
            return ["range", [value.start, value.stop, value.step]]
        if value is self._ranks:
            return ["ranks"]
        if (number := self._seen.get(id(value))) is not None:
            return ["same", number]
        self._seen[id(value)] = len(self._objects)
        self._objects.append(value)
        if type(value) is Tensor:
            return ["tensor", self._tensors.add(value)]
        return self._encode_record(value)

    def _encode_record(self, value: object) -> list[Any]:
        kind = type(value)
        if not kind.__module__.startswith(ROOMS) or "<locals>" in kind.__qualname__:
            raise NotEncodableError(f"an object of {kind.__module__}.{kind.__qualname__}")
        slots = [name for base in kind.__mro__ for name in base.__dict__.get("__slots__", ())]
        names = [*getattr(value, "__dict__", ()), *slots]
        fields = [[name, self.encode(getattr(value, name))] for name in names]
        return ["record", kind.__module__, kind.__qualname__, fields]


def decode_part(tree: Any, data: Tensor, ranks: Ranks) -> Any:
    """Return the part of a model that `encode_part` encoded; its tensors are views of `data`.

    Args:
        tree: tree of an EncodedPart.
        data: [bytes] uint8: the spans at their offsets, aligned to ALIGNMENT bytes.
        ranks: ranks of the part's modules.

    Raises:
        ValueError: the tree is not of this version of gllm.
    """
    try:
        places, root = tree
        tensors = [_place(data, *place) for place in places]
        return _Decoder(tensors, ranks).decode(root)
    except (TypeError, KeyError, IndexError, AttributeError, ImportError, RuntimeError) as error:
        raise ValueError(f"it is not of this version: {error}") from error


def _place(
    data: Tensor, dtype: str, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> Tensor:
    empty = torch.empty(0, dtype=getattr(torch, dtype))
    if 0 in shape:
        return empty.new_empty(0).as_strided(shape, strides)
    start = data.storage_offset() + offset
    return empty.set_(data.untyped_storage(), start // empty.element_size(), shape, strides)


class _Decoder:
    """Decodes what `_Encoder` encodes."""

    def __init__(self, tensors: Sequence[Tensor], ranks: Ranks) -> None:
        self._tensors, self._ranks = tensors, ranks
        self._objects: list[object] = []

    def decode(self, value: Any) -> Any:
        """Decode a value."""
        if not isinstance(value, list):
            return value
        kind, *content = value
        match kind:
            case "tuple":
                return tuple(map(self.decode, content[0]))
            case "list":
                return list(map(self.decode, content[0]))
            case "dict":
                return {self.decode(key): self.decode(item) for key, item in content[0]}
            case "dtype":
                return getattr(torch, content[0])
            case "device":
                return torch.device(content[0])
            case "range":
                return range(*content[0])
            case "ranks":
                return self._ranks
            case "same":
                return self._objects[content[0]]
            case "tensor":
                self._objects.append(self._tensors[content[0]])
                return self._objects[-1]
            case "record":
                return self._decode_record(*content)
        raise ValueError(f"it has a value of the unknown kind {kind!r}")

    def _decode_record(self, module: str, name: str, fields: Sequence[tuple[str, Any]]) -> object:
        kind: Any = importlib.import_module(module) if module.startswith(ROOMS) else None
        for part in name.split("."):
            kind = getattr(kind, part)
        if not isinstance(kind, type) or kind.__module__ != module:
            raise ValueError(f"it names {module}.{name}, which is no class of gllm")
        record: object = object.__new__(kind)
        # Before its fields, as in the encoder.
        self._objects.append(record)
        for field, value in fields:
            # Records may be frozen.
            object.__setattr__(record, field, self.decode(value))
        return record
