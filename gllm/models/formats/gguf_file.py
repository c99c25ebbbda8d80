"""Reader of the header of GGUF files: metadata, and where each tensor lies.

The file is not trusted. Every count, length and offset is held against the size of the file before
anything is allocated or read, so a damaged file raises ModelError and costs no more memory than a
valid one of its size. The bytes of tensors are read with `read_bytes`, not mapped: a file that
becomes shorter later raises an error as well, and pages that were read do not stay in memory.

Source: ggml's docs/gguf.md; versions 2 and 3, which differ in the byte order alone.
"""

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Self, TypeAlias

from gllm.models.errors import ModelError

MAGIC = b"GGUF"
"""First bytes of a file."""
VERSIONS = (2, 3)
"""Versions of the format that are read."""
DEFAULT_ALIGNMENT = 32
"""Bytes of which offsets of tensors are multiples, unless the metadata say otherwise."""
MAX_HEADER_BYTES = 1 << 28
"""Largest header that is read, in bytes; a vocabulary of 260,000 tokens has 16 MiB."""
MAX_DIMENSIONS = 4
"""Most dimensions of a tensor."""

SPLIT_COUNT = "split.count"
"""Key with the number of files that a model is split into."""
SCALARS = {
    0: ("B", 1),
    1: ("b", 1),
    2: ("H", 2),
    3: ("h", 2),
    4: ("I", 4),
    5: ("i", 4),
    6: ("f", 4),
    7: ("?", 1),
    10: ("Q", 8),
    11: ("q", 8),
    12: ("d", 8),
}
"""Code of the `struct` module and bytes of each scalar type of metadata, by its number."""
STRING, ARRAY = 8, 9
"""Numbers of the other types of metadata."""

Scalar: TypeAlias = int | float | bool | str
Value: TypeAlias = Scalar | list[int] | list[float] | list[bool] | list[str]
"""Value of a key of the metadata."""


@dataclass(frozen=True, slots=True)
class BlockType:
    """Type of a tensor: how neighbouring weights of a row are stored together."""

    name: str
    weights: int
    """Weights per block."""
    nbytes: int
    """Bytes per block."""


BLOCK_TYPES: Mapping[int, BlockType] = MappingProxyType(
    {
        0: BlockType("F32", 1, 4),
        1: BlockType("F16", 1, 2),
        2: BlockType("Q4_0", 32, 18),
        3: BlockType("Q4_1", 32, 20),
        6: BlockType("Q5_0", 32, 22),
        7: BlockType("Q5_1", 32, 24),
        8: BlockType("Q8_0", 32, 34),
        9: BlockType("Q8_1", 32, 40),
        10: BlockType("Q2_K", 256, 84),
        11: BlockType("Q3_K", 256, 110),
        12: BlockType("Q4_K", 256, 144),
        13: BlockType("Q5_K", 256, 176),
        14: BlockType("Q6_K", 256, 210),
        15: BlockType("Q8_K", 256, 292),
        16: BlockType("IQ2_XXS", 256, 66),
        17: BlockType("IQ2_XS", 256, 74),
        18: BlockType("IQ3_XXS", 256, 98),
        19: BlockType("IQ1_S", 256, 50),
        20: BlockType("IQ4_NL", 32, 18),
        21: BlockType("IQ3_S", 256, 110),
        22: BlockType("IQ2_S", 256, 82),
        23: BlockType("IQ4_XS", 256, 136),
        24: BlockType("I8", 1, 1),
        25: BlockType("I16", 1, 2),
        26: BlockType("I32", 1, 4),
        27: BlockType("I64", 1, 8),
        28: BlockType("F64", 1, 8),
        29: BlockType("IQ1_M", 256, 56),
        30: BlockType("BF16", 1, 2),
        34: BlockType("TQ1_0", 256, 54),
        35: BlockType("TQ2_0", 256, 66),
        39: BlockType("MXFP4", 32, 17),
        40: BlockType("NVFP4", 64, 36),
        41: BlockType("Q1_0", 128, 18),
    }
)
"""Every type that files may have, by its number."""


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Tensor of a file: where it is, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    """As torch orders dimensions, [outputs, inputs]: the file has the last one first."""
    type: BlockType
    offset: int
    """Position of its first byte in the file."""
    nbytes: int


class GgufFile:
    """Header of a GGUF file, and its bytes."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: the file cannot be read, is damaged, or has an unknown version or type.
        """
        self.path = path
        header = _read_header(path)
        self.metadata: Mapping[str, Value] = MappingProxyType(header.metadata)
        """Values by key, as the file has them."""
        self.tensors: Mapping[str, GgufTensor] = MappingProxyType(header.tensors)
        """Tensors by name, in the file's order."""

    @property
    def architecture(self) -> str:
        """Name of the model's architecture, such as "llama". Raises ModelError without one."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str) or not name:
            raise ModelError(
                f"{self.path} names no architecture: the key 'general.architecture' is missing or "
                "no text; convert the model again"
            )
        return name

    def open(self) -> "GgufBytes":
        """Return a reader of the tensors' bytes. Raises ModelError."""
        return GgufBytes(self.path)


def open_gguf_files(paths: Sequence[Path]) -> list[GgufFile]:
    """Return a model's file, or the files that it is split into.

    Raises:
        ModelError: a file cannot be read, or one is missing.
    """
    files = [GgufFile(path) for path in paths]
    count = files[0].metadata.get(SPLIT_COUNT, 1)
    if isinstance(count, int) and count > 1 and count > len(files):
        raise ModelError(
            f"{paths[0]} is one of {count} files, of which {len(files)} are beside it: download "
            "the others to the same folder"
        )
    return files


class GgufBytes:
    """Reader of parts of a file; a context manager."""

    def __init__(self, path: Path) -> None:
        """Open the file. Raises ModelError."""
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ModelError(f"{path} cannot be read: {error.strerror}") from error

    def __enter__(self) -> Self:
        """Return the reader."""
        return self

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        os.close(self._file)

    def read(self, offset: int, nbytes: int) -> bytearray:
        """Return `nbytes` bytes from `offset`.

        Raises:
            ModelError: the file is shorter, or cannot be read.
        """
        buffer = bytearray(nbytes)
        view, done = memoryview(buffer), 0
        while done < nbytes:
            try:
                count = os.preadv(self._file, [view[done:]], offset + done)
            except OSError as error:
                raise ModelError(f"{self.path} cannot be read: {error.strerror}") from error
            if count == 0:
                raise ModelError(
                    f"{self.path} has become shorter while it was read: start again when nothing "
                    "writes to it"
                )
            done += count
        return buffer


@dataclass(slots=True)
class _Header:
    """Content of a header."""

    metadata: dict[str, Value]
    tensors: dict[str, GgufTensor]


def _read_header(path: Path) -> _Header:
    """Read a file's header. Raises ModelError."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size == 0:
                raise ModelError(f"{path} is empty: download it again")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data, size).read_header()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error


class _Cursor:
    """Position in a header; every read is within the file."""

    def __init__(self, path: Path, data: mmap.mmap, size: int) -> None:
        """Begin at the first byte."""
        self._path, self._data, self._size = path, data, size
        self._end = min(size, MAX_HEADER_BYTES)
        self._position = 0
        self._item = "the header"
        """Name of the part that is read, for errors."""

    def read_header(self) -> _Header:
        """Return the header. Raises ModelError."""
        if self._data[:4] != MAGIC:
            raise ModelError(
                f"{self._path} is no GGUF file: its first bytes are not 'GGUF'. Name a GGUF file, "
                "or a model folder"
            )
        self._position = 4
        self._check_version(self._scalar("I", 4))
        num_tensors, num_keys = self._count(32), self._count(13)
        metadata: dict[str, Value] = {}
        for index in range(num_keys):
            self._item = f"key {index} of {num_keys}"
            key = self._string()
            if key in metadata:
                raise self._error(f"has the key {key!r} twice")
            self._item = f"the value of {key!r}"
            metadata[key] = self._value()
        self._item = "the header"
        return _Header(metadata, self._tensors(num_tensors, self._alignment(metadata)))

    def _check_version(self, version: int) -> None:
        if version in VERSIONS:
            return
        if version & 0xFFFF == 0 and version:
            raise self._error(
                "is written for big-endian machines, which is not implemented: convert the model "
                "without --bigendian"
            )
        if version > VERSIONS[-1]:
            raise self._error(
                f"has version {version} of the format, but this gllm reads {VERSIONS[0]} and "
                f"{VERSIONS[-1]}: update gllm, or convert the model with an older llama.cpp"
            )
        raise self._error(
            f"has version {version} of the format, which is no longer read: convert the model "
            "again, or download a newer file"
        )

    def _alignment(self, metadata: Mapping[str, Value]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        is_number = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_number or not 0 < alignment <= MAX_HEADER_BYTES or alignment & (alignment - 1):  # type: ignore[operator]
            raise self._error(
                f"has general.alignment {alignment!r}, which has to be a power of two"
            )
        return alignment  # type: ignore[return-value]

    def _tensors(self, count: int, alignment: int) -> dict[str, GgufTensor]:
        """Return the tensors, whose offsets count from the end of the header."""
        tensors: dict[str, GgufTensor] = {}
        for index in range(count):
            self._item = f"tensor {index} of {count}"
            tensor = self._tensor(alignment)
            if tensor.name in tensors:
                raise self._error(f"has the tensor {tensor.name!r} twice")
            tensors[tensor.name] = tensor
        begin = -(-self._position // alignment) * alignment
        placed = {
            name: GgufTensor(name, t.shape, t.type, begin + t.offset, t.nbytes)
            for name, t in tensors.items()
        }
        self._check_places(placed)
        return placed

    def _check_places(self, tensors: Mapping[str, GgufTensor]) -> None:
        """Check that tensors lie in the file, one after the other."""
        previous: GgufTensor | None = None
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            end = tensor.offset + tensor.nbytes
            if end > self._size:
                raise self._error(
                    f"has {self._size} bytes, but its tensor {tensor.name!r} ends at byte {end}: "
                    "the file is cut off or damaged; download it again"
                )
            if previous is not None and tensor.offset < previous.offset + previous.nbytes:
                raise self._error(
                    f"is damaged: its tensors {previous.name!r} and {tensor.name!r} overlap; "
                    "download it again"
                )
            previous = tensor

    def _tensor(self, alignment: int) -> GgufTensor:
        name = self._string()
        self._item = f"the tensor {name!r}"
        num_dimensions = self._scalar("I", 4)
        if not 0 < num_dimensions <= MAX_DIMENSIONS:
            raise self._error(
                f"is damaged: its tensor {name!r} has {num_dimensions} dimensions; download it "
                "again"
            )
        shape = tuple(reversed([self._scalar("Q", 8) for _ in range(num_dimensions)]))
        number = self._scalar("I", 4)
        offset = self._scalar("Q", 8)
        if number not in BLOCK_TYPES:
            raise self._error(
                f"has the tensor {name!r} of type {number}, which this gllm does not know: update "
                "gllm, or choose another file of the model"
            )
        kind = BLOCK_TYPES[number]
        if 0 in shape or shape[-1] % kind.weights:
            raise self._error(
                f"is damaged: its tensor {name!r} has shape {shape}, which {kind.name} cannot "
                f"have in blocks of {kind.weights}; download it again"
            )
        nbytes = kind.nbytes
        for length in (*shape[:-1], shape[-1] // kind.weights):
            nbytes *= length
        if offset % alignment:
            raise self._error(
                f"is damaged: its tensor {name!r} begins at {offset}, which is no multiple of "
                f"{alignment}; download it again"
            )
        return GgufTensor(name, shape, kind, offset, nbytes)

    def _value(self) -> Value:
        kind = self._scalar("I", 4)
        if kind == STRING:
            return self._string()
        if kind == ARRAY:
            return self._array()
        if kind not in SCALARS:
            raise self._unknown_type(kind)
        code, size = SCALARS[kind]
        number: int | float | bool = self._scalar(code, size)
        return number

    def _array(self) -> Value:
        kind = self._scalar("I", 4)
        if kind == STRING:
            return [self._string() for _ in range(self._count(8))]
        if kind not in SCALARS:  # also arrays of arrays, which no key has
            raise self._unknown_type(kind)
        code, size = SCALARS[kind]
        count = self._count(size)
        numbers: list[int] = list(struct.unpack(f"<{count}{code}", self._bytes(count * size)))
        return numbers

    def _string(self) -> str:
        data = self._bytes(self._count(1))
        try:
            return data.decode()
        except UnicodeDecodeError as error:
            raise self._error(
                f"is damaged: a text in {self._item} is no UTF-8; download it again"
            ) from error

    def _count(self, least_bytes: int) -> int:
        """Return a number of items that are at least that long each, which the file can hold."""
        count: int = self._scalar("Q", 8)
        if count * least_bytes > self._end - self._position:
            raise self._error(
                f"is cut off or damaged: {self._item} has a count or length of {count}, but "
                f"{self._end - self._position} bytes follow; download it again"
            )
        return count

    def _scalar(self, code: str, size: int) -> int:
        number: int = struct.unpack("<" + code, self._bytes(size))[0]
        return number

    def _bytes(self, count: int) -> bytes:
        begin, end = self._position, self._position + count
        if end > self._end:
            raise self._error(f"is cut off or damaged in {self._item}: download it again")
        self._position = end
        return self._data[begin:end]

    def _unknown_type(self, kind: int) -> ModelError:
        return self._error(
            f"has type {kind} in {self._item}, which this gllm does not know: update gllm, or "
            "download the file again"
        )

    def _error(self, text: str) -> ModelError:
        return ModelError(f"{self._path} {text}")
