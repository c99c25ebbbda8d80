"""Ceilings of the device: measured memory bandwidth and matrix product rate.

All other rows of the same run are compared with them.
"""

from collections.abc import Iterator

import torch

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import COPY, MATRIX
from benchmarks.gpu.rows import Measured, PendingRow

COPY_BYTES = 2 * 2**30
MATRIX_SIZE = 8192


def rows(place: Place) -> Iterator[PendingRow]:
    """Yield the two ceilings."""
    yield PendingRow(COPY, lambda: copy(place))
    yield PendingRow(MATRIX, lambda: matrix(place))


def copy(place: Place) -> Measured:
    """Measure a copy within device memory; bytes read and bytes written both count."""
    count = 2**20 if place.is_dry else COPY_BYTES
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    seconds = place.seconds(lambda _: target.copy_(source), 1)
    return Measured({"ms": seconds * 1000, "bytes": 2 * count})


def matrix(place: Place) -> Measured:
    """Measure torch's product of square matrices of normal numbers; zeros would be faster."""
    size = 64 if place.is_dry else MATRIX_SIZE
    shape = size, size
    pairs = [
        tuple(torch.randn(shape, device=place.device).to(place.dtype) for _ in range(2))
        for _ in range(2)
    ]
    out = torch.empty(shape, dtype=place.dtype, device=place.device)
    seconds = place.seconds(lambda index: torch.matmul(*pairs[index], out=out), len(pairs))
    return Measured({"ms": seconds * 1000, "flops": 2 * size**3})
