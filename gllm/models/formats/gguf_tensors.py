"""Tensors of GGUF files as a model reads them: rows of stored tensors, in the model's order.

A model's tensor may be a part of a stored one (an expert of a stack, the query of a fused
projection), several of them, or have its rows in another order. Rows are read as they are
requested, some at a time, so that no tensor is unpacked as a whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gllm.kernels.grouped_weight import GroupedRows, GroupedWeight, dequantize_rows
from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import GgufBytes, GgufTensor
from gllm.models.formats.gguf_types import FLOATS, GroupedType, grouped_type, view_blocks
from gllm.models.shard import TensorShards
from gllm.models.spec.parts import DimensionShard

Rows = range | NDArray[np.int64]
"""Indices of stored rows, in the order of the model's tensor."""
SLAB_BYTES = 1 << 24
"""Bytes of stored rows that are converted to floats at once."""
SCATTERED = 4
"""Rows are read one run of neighbours after the other if all from the first to the last were more
than this many times their number."""


@dataclass(frozen=True, slots=True)
class GgufRows:
    """Rows of a stored tensor, all its dimensions but the last counted as one."""

    file: GgufBytes
    tensor: GgufTensor
    rows: Rows
    inputs: int
    """Elements per row; 1 for vectors, whose elements are rows."""

    @property
    def row_bytes(self) -> int:
        """Bytes per row in the file."""
        return self.inputs // self.tensor.type.weights * self.tensor.type.nbytes

    @property
    def kind(self) -> GroupedType | None:
        """Type of few bits; None for floats."""
        return grouped_type(self.tensor.type.name)

    def select_rows(self, runs: Sequence[tuple[int, int]]) -> "GgufRows":
        """Return the rows at some ranges of positions, concatenated."""
        if len(runs) == 1:
            return replace(self, rows=self.rows[slice(*runs[0])])
        parts = [np.asarray(self.rows[begin:end]) for begin, end in runs]
        return replace(self, rows=np.concatenate(parts))

    def read_blocks(self, begin: int, end: int, columns: DimensionShard | None) -> Tensor:
        """Return the blocks of the rows at positions [begin, end): [rows, blocks, bytes] uint8.

        columns: elements of each row, at borders of blocks; None for all.
        """
        rows = np.asarray(self.rows[begin:end])
        first, last = int(rows.min()), int(rows.max())
        if last - first + 1 <= SCATTERED * len(rows):
            blocks = self._read(first, last + 1)
            if not np.array_equal(rows, np.arange(first, last + 1)):
                blocks = blocks[torch.from_numpy(rows - first)]
        else:
            borders = [0, *(np.flatnonzero(np.diff(rows) != 1) + 1).tolist(), len(rows)]
            runs = pairwise(borders)
            blocks = torch.cat([self._read(int(rows[a]), int(rows[b - 1]) + 1) for a, b in runs])
        if columns is None:
            return blocks
        size = self.tensor.type.weights
        parts = [blocks[:, a // size : b // size] for a, b in columns.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def _read(self, first: int, end: int) -> Tensor:
        data = self.file.read(
            self.tensor.offset + first * self.row_bytes, (end - first) * self.row_bytes
        )
        return view_blocks(data, end - first, self.tensor.type)

    def read_floats(self, columns: DimensionShard | None) -> Tensor:
        """Return the rows as numbers, [rows, inputs]: in the file's dtype, or float32."""
        kind, dtype = self.kind, FLOATS.get(self.tensor.type.name)
        step = max(1, SLAB_BYTES // self.row_bytes)
        parts = []
        for begin in range(0, len(self.rows), step):
            blocks = self.read_blocks(begin, min(begin + step, len(self.rows)), columns)
            if kind is not None:
                parts.append(dequantize_rows(kind.unpack(blocks), kind.layout))
            else:
                assert dtype is not None, "a type is of few bits or a float"
                parts.append(blocks.contiguous().view(dtype)[..., 0])
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True, slots=True)
class GgufStoredTensor:
    """Tensor of a model in GGUF files; read as a `StoredTensor` is, or packed."""

    parts: tuple[GgufRows, ...]
    """Rows that follow each other."""
    shape: tuple[int, ...]
    """As the model has it."""
    offset: float = 0.0
    """Is subtracted from the numbers: the files have it added."""
    is_transposed: bool = False
    """True if the files have [outputs, inputs] and the model [inputs, outputs]."""

    @property
    def name(self) -> str:
        """Names in the files."""
        return ", ".join(dict.fromkeys(part.tensor.name for part in self.parts))

    @property
    def dtype(self) -> str:
        """Type of the first rows, by ggml's name."""
        return self.parts[0].tensor.type.name

    @property
    def is_grouped(self) -> bool:
        """True if `read_grouped` returns weights of few bits."""
        return not self.is_transposed and all(part.kind is not None for part in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes in memory, packed if the type is of few bits."""
        return sum(_memory_bytes(part, None) for part in self.parts)

    def read(self, shards: TensorShards = ()) -> Tensor:
        """Return the tensor, or the shards of its dimensions, as numbers on the CPU.

        shards: shard of each dimension; empty for the whole tensor.
        """
        parts, columns = self._shard(shards)
        numbers = torch.cat([part.read_floats(columns) for part in parts])
        if self.offset:
            numbers = numbers.float() - self.offset
        if self.is_transposed:
            return numbers.t().contiguous()
        return numbers if len(self.shape) == 2 else numbers.view(-1, *self.shape[1:])

    def read_grouped(self, shards: TensorShards, dtype: torch.dtype) -> list[GroupedWeight]:
        """Return the tensor, or the shards of its dimensions, as weights that are unpacked later.

        Args:
            shards: shard of each dimension; empty for the whole tensor.
            dtype: dtype of the floats that the weights represent.
        """
        parts, columns = self._shard(shards)
        return [_packed(part, columns, dtype) for part in parts]

    def is_equal(self, other: "GgufStoredTensor") -> bool:
        """Return True if two whole matrices are stored as the same bytes."""
        if self.shape != other.shape or self.dtype != other.dtype:
            return False
        pairs = list(zip(self.parts, other.parts, strict=False))
        step = max(1, SLAB_BYTES // self.parts[0].row_bytes)
        return len(self.parts) == len(other.parts) and all(
            torch.equal(
                one.read_blocks(begin, min(begin + step, len(one.rows)), None),
                two.read_blocks(begin, min(begin + step, len(two.rows)), None),
            )
            for one, two in pairs
            for begin in range(0, len(one.rows), step)
        )

    def _shard(self, shards: TensorShards) -> tuple[tuple[GgufRows, ...], DimensionShard | None]:
        """Return the rows of the shards, and the elements of each row."""
        ordered = tuple(reversed(shards)) if self.is_transposed else shards
        rows = ordered[0] if ordered else None
        columns = ordered[1] if len(ordered) > 1 else None
        if columns is not None:
            self._check_columns(columns)
        if rows is None:
            return self.parts, columns
        return tuple(self._shard_rows(rows)), columns

    def _shard_rows(self, rows: DimensionShard) -> Iterator[GgufRows]:
        """Yield the parts' rows of a shard, in its order."""
        for run_begin, run_end in rows.runs:
            begin = 0
            for part in self.parts:
                end = begin + len(part.rows)
                first, last = max(run_begin, begin), min(run_end, end)
                if first < last:
                    yield part.select_rows([(first - begin, last - begin)])
                begin = end

    def _check_columns(self, columns: DimensionShard) -> None:
        """Raise ModelError if a shard of the inputs ends within a block."""
        for part in self.parts:
            size = part.tensor.type.weights
            if all(border % size == 0 for run in columns.runs for border in run):
                continue
            ranks = columns.size // columns.num_elements
            degrees = [
                str(degree)
                for degree in range(1, ranks + 1)
                if columns.size % degree == 0 and columns.size // degree % size == 0
            ]
            raise ModelError(
                f"{part.file.path}: tensor {part.tensor.name!r} has {columns.size} inputs in "
                f"{part.tensor.type.name} blocks of {size}, which {ranks} ranks would split: use "
                f"--tensor-parallel-size {' or '.join(degrees) or '1'}, or a file of a type with "
                "smaller blocks"
            )


@dataclass(frozen=True, slots=True)
class GgufLatentTensor(GgufStoredTensor):
    """Up projection of compressed keys and values, which newer files have as two tensors.

    The parts are those of the keys, [heads, rank, elements], and those of the values, [heads,
    elements, rank]; the model has both of each head, [elements, rank].
    """

    num_heads: int = 1

    @property
    def is_grouped(self) -> bool:
        """False: keys are stored by their inputs."""
        return False

    def read(self, shards: TensorShards = ()) -> Tensor:
        """Return the tensor, or the shards of its dimensions, as numbers on the CPU."""
        keys, values = (part.read_floats(None) for part in self.parts)
        rank = self.shape[1]
        by_head = (
            keys.view(self.num_heads, rank, -1).transpose(1, 2),
            values.view(self.num_heads, -1, rank),
        )
        whole = torch.cat(by_head, 1).flatten(0, 1)
        rows = shards[0] if shards else None
        if rows is None:
            return whole
        return torch.cat([whole[begin:end] for begin, end in rows.runs])


def _num_inputs(part: GgufRows, columns: DimensionShard | None) -> int:
    return part.inputs if columns is None else columns.num_elements


def _memory_bytes(part: GgufRows, columns: DimensionShard | None) -> int:
    """Return the bytes in memory of some inputs of rows."""
    kind, inputs = part.kind, _num_inputs(part, columns)
    size = part.tensor.type.nbytes if kind is None else kind.memory_bytes
    return round(len(part.rows) * inputs * size)


def _packed(part: GgufRows, columns: DimensionShard | None, dtype: torch.dtype) -> GroupedWeight:
    """Return rows of few bits as a weight that is unpacked later."""
    kind = part.kind
    assert kind is not None, "only weights of few bits are packed"

    def read(begin: int, end: int) -> GroupedRows:
        return kind.unpack(part.read_blocks(begin, end, columns))

    shape = len(part.rows), _num_inputs(part, columns)
    return GroupedWeight(kind.layout, shape, _memory_bytes(part, columns), read, dtype)
