"""File with the packed weights of one part of a model: written once, then mapped read-only.

The data come first, from the begin of the file, so that addresses are aligned. A header with the
structure and the checksum of the data follows, then a trailer with the checksum of the header.
Both checksums are verified whenever a file is mapped.
"""

import ctypes
import hashlib
import json
import mmap
import os
import secrets
import struct
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gllm.models.weight_cache.folder_plan import TEMPORARY_SUFFIX
from gllm.models.weight_cache.part_codec import EncodedPart
from gllm.options.ownership import ownership_fault

SCHEMA = 1
"""Increased whenever the layout of the file changes."""
MAGIC = b"gllmpart"
DIGEST_BYTES = 16
TRAILER = struct.Struct("<8sQQ16s")
"""MAGIC, SCHEMA, bytes of the header, digest of the header."""
PAGE_BYTES = 4096
WORDS_PER_PAGE = PAGE_BYTES // 8
MODE = 0o600


class UnusableFileError(Exception):
    """A file cannot be used: it is damaged, or another user could have written it."""


@dataclass(frozen=True, slots=True)
class PartHeader:
    """Header of a file."""

    key: str
    """Everything that decides the bytes of the part, as text."""
    kernels: dict[str, str]
    """Kernels that read the packed weights, by the dtype of the tensors."""
    weight_bytes: int
    """Size that counts as that of the part's weights."""
    data_bytes: int
    """Size of the data in whole pages."""
    data_digest: str
    """Digest of the data in hexadecimal; see `digest_pages`."""
    tree: Any
    """Structure of the part; see `gllm.models.weight_cache.part_codec`."""


def digest_pages(data: Tensor) -> str:
    """Return a digest of whole pages [bytes] uint8 in hexadecimal, at the speed of memory.

    Each page counts by the sum of its 64-bit words, so a flipped bit, and a page that is missing,
    old or in the place of another, is noticed. It is no protection against somebody who changes
    the file on purpose: the owner and the mode of the file are.
    """
    sums = data.view(torch.int64).view(-1, WORDS_PER_PAGE).sum(dim=1)
    return hashlib.blake2b(sums.numpy().tobytes(), digest_size=DIGEST_BYTES).hexdigest()


def round_to_pages(num_bytes: int) -> int:
    """Return the size of the fewest whole pages with this many bytes."""
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def write_part_file(
    path: Path,
    part: EncodedPart,
    header: PartHeader,
    reserve: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write a file under another name and give it its own when it is complete.

    A file of that name that another process has written meanwhile stays.

    Args:
        path: path of the file.
        part: whose memory is written.
        header: without the digest of the data.
        reserve: called with the size of the file before its space is allocated.

    Raises:
        OSError: the file cannot be written, for example because the disk is full.
    """
    data_bytes = round_to_pages(part.num_bytes)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}{TEMPORARY_SUFFIX}")
    encoded = _encode_header(header, data_bytes, "0" * 2 * DIGEST_BYTES)
    num_bytes = data_bytes + len(encoded)
    reserve(num_bytes)
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, MODE)
    try:
        try:
            # All of it at once: a disk that is too full is noticed before anything is written.
            os.posix_fallocate(descriptor, 0, num_bytes)
            for span in part.spans:
                _write(
                    descriptor,
                    (ctypes.c_char * span.num_bytes).from_address(span.address),
                    span.offset,
                )
            digest = digest_pages(_map(descriptor, data_bytes))
            _write(descriptor, _encode_header(header, data_bytes, digest), data_bytes)
        finally:
            os.close(descriptor)
        with suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        os.unlink(temporary)


def _encode_header(header: PartHeader, data_bytes: int, digest: str) -> bytes:
    """Return the bytes of header and trailer; their number does not depend on the digest."""
    complete = replace(header, data_bytes=data_bytes, data_digest=digest)
    values = {field.name: getattr(complete, field.name) for field in fields(complete)}
    encoded = json.dumps(values).encode()
    return encoded + TRAILER.pack(MAGIC, SCHEMA, len(encoded), _digest(encoded, data_bytes))


def _digest(header: bytes, data_bytes: int) -> bytes:
    return hashlib.blake2b(
        header + struct.pack("<Q", data_bytes), digest_size=DIGEST_BYTES
    ).digest()


def _write(descriptor: int, data: Any, offset: int) -> None:
    """Write all bytes of a buffer at an offset."""
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, offset)
        view, offset = view[count:], offset + count


def map_part_file(path: Path) -> tuple[PartHeader, Tensor] | None:
    """Map a file.

    Returns:
        The header and the data [bytes] uint8, which must not be written to; None without a file.

    Raises:
        UnusableFileError: it is damaged, or another user could have written it.
        OSError: it cannot be read.
    """
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_symlink():
            raise UnusableFileError("it is a symbolic link") from error
        raise
    try:
        status = os.fstat(descriptor)
        if fault := ownership_fault(status):
            raise UnusableFileError(f"it {fault}")
        header = _read_header(descriptor, status.st_size)
        data = _map(descriptor, header.data_bytes)
        if digest_pages(data) != header.data_digest:
            raise UnusableFileError("its data are damaged")
        # It was used now.
        os.utime(descriptor)
        return header, data
    finally:
        os.close(descriptor)


def _read_header(descriptor: int, size: int) -> PartHeader:
    """Return the header of a file of a size in bytes. Raises UnusableFileError."""
    trailer = os.pread(descriptor, TRAILER.size, max(0, size - TRAILER.size))
    if len(trailer) != TRAILER.size:
        raise UnusableFileError("it is truncated")
    magic, schema, num_bytes, digest = TRAILER.unpack(trailer)
    data_bytes = size - TRAILER.size - num_bytes
    if magic != MAGIC or schema != SCHEMA or data_bytes < 0:
        raise UnusableFileError("it is truncated or of another version")
    encoded = os.pread(descriptor, num_bytes, data_bytes)
    if _digest(encoded, data_bytes) != digest:
        raise UnusableFileError("its header is damaged")
    try:
        header = PartHeader(**json.loads(encoded))
    except (TypeError, ValueError) as error:
        raise UnusableFileError("its header is of another version") from error
    if header.data_bytes != data_bytes:
        raise UnusableFileError("its header is damaged")
    return header


def _map(descriptor: int, num_bytes: int) -> Tensor:
    """Return the first bytes of a file as a tensor [bytes] uint8 that must not be written to."""
    if not num_bytes:
        return torch.empty(0, dtype=torch.uint8)
    mapping = mmap.mmap(descriptor, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ)
    # Where the file system has huge pages for files.
    with suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    with warnings.catch_warnings():
        # That writing to it is undefined: it ends the process, as the memory is read-only.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapping, dtype=torch.uint8)
