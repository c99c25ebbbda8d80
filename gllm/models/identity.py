"""Identity of a model: a digest of its configuration and weight files, without reading all of them.

Routers and engines compare it, so that requests never continue on another model.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from gllm.models.errors import ModelError
from gllm.models.formats.gguf_file import GgufFile
from gllm.models.pooling_config import POOLING_FILES, dense_weight_files
from gllm.models.weight_files import find_weight_files, is_lfs_pointer, lfs_error

MAX_SAMPLED_TENSORS = 256
"""Tensors per file that are sampled, because fine-tuned models differ in tensor contents only."""
SAMPLED_BYTES = 64
"""Bytes that are read in the middle of such a tensor."""
MAX_HEADER_BYTES = 100_000_000
"""Limit of the format for the header of a file."""


def hash_model(folder: Path) -> str:
    """Return a SHA-256 digest that identifies a model, in hexadecimal.

    It covers config.json, the names, sizes and headers of the weight files, safetensors or GGUF,
    and a few bytes of their tensors; of an embedding model also the files of its pooling.

    Raises:
        ModelError: a file is missing or damaged.
    """
    digest = hashlib.sha256()
    try:
        digest.update((folder / "config.json").read_bytes())
        for path in find_weight_files(folder):
            _hash_weights(digest, path)
        pooling = [path for name in POOLING_FILES for path in sorted(folder.glob(name))]
        for path in (*pooling, *(folder / name for name in dense_weight_files(folder))):
            digest.update(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{folder} cannot be read: {error}") from error
    return digest.hexdigest()


def hash_numerics(model_hash: str, numerics: str) -> str:
    """Return a digest of everything that affects the computed tokens: weights, dtypes, kernels.

    Args:
        model_hash: digest of the model, from `hash_model`.
        numerics: dtypes, quantization, devices and kernels, from `describe_numerics`.
    """
    return hashlib.sha256(f"{model_hash}\n{numerics}".encode()).hexdigest()


def describe_numerics(
    executors: Iterable[str], layer_counts: Sequence[int], degrees: Sequence[int]
) -> str:
    """Describe the settings of a pipeline that affect the exact floating-point results.

    Args:
        executors: dtypes, quantization, device, kernels and ranks of each worker.
        layer_counts: number of layers of each stage.
        degrees: tensor parallel degree of each stage.
    """
    texts = sorted(set(executors))
    if len(set(degrees)) > 1:
        ranks = (
            str(degree) for n, degree in zip(layer_counts, degrees, strict=True) for _ in range(n)
        )
        texts.append(f"ranks by layer {','.join(ranks)}")
    return "; ".join(texts)


def _hash_weights(digest: "hashlib._Hash", path: Path) -> None:
    """Add name, size, header and samples of a file to a digest."""
    if is_lfs_pointer(path):
        raise ModelError(lfs_error(path))
    size = path.stat().st_size
    if path.suffix == ".gguf":
        _hash_gguf(digest, path)
        return
    with path.open("rb") as file:
        header, start = _read_header(file, path)
        digest.update(struct.pack("<QQ", size, len(header)) + path.name.encode() + header)
        for offset in _sample_offsets(header, path):
            file.seek(start + offset)
            digest.update(file.read(SAMPLED_BYTES))


def _hash_gguf(digest: "hashlib._Hash", path: Path) -> None:
    """Add name, size, header and samples of a GGUF file to a digest."""
    tensors = GgufFile(path).tensors.values()
    spans = sorted((tensor.offset, tensor.offset + tensor.nbytes) for tensor in tensors)
    size = path.stat().st_size
    digest.update(struct.pack("<Q", size) + path.name.encode())
    with path.open("rb") as file:
        digest.update(file.read(spans[0][0] if spans else size))
        for offset in _offsets_of(spans):
            file.seek(offset)
            digest.update(file.read(SAMPLED_BYTES))


def _read_header(file: BinaryIO, path: Path) -> tuple[bytes, int]:
    """Return the header of a safetensors file, and where its data begin."""
    prefix = file.read(8)
    num_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else MAX_HEADER_BYTES + 1
    header = file.read(num_bytes) if num_bytes <= MAX_HEADER_BYTES else b""
    if len(header) != num_bytes:
        raise ModelError(f"{path} is no safetensors file")
    return header, 8 + num_bytes


def _sample_offsets(header: bytes, path: Path) -> list[int]:
    """Return offsets in the data, in the middle of tensors all over the file."""
    try:
        tensors: dict[str, Any] = json.loads(header)
        spans = sorted(
            (int(begin), int(end))
            for name, tensor in tensors.items()
            if name != "__metadata__"
            for begin, end in (tensor["data_offsets"],)
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{path} has no readable header: {error}") from error
    return _offsets_of(spans)


def _offsets_of(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return offsets in the middle of some tensors, all over a file.

    spans: begin and end of each tensor, in ascending order.
    """
    step = max(1, -(-len(spans) // MAX_SAMPLED_TENSORS))
    return [max(begin, (begin + end - SAMPLED_BYTES) // 2) for begin, end in spans[::step]]
