"""What the device can do at most: bytes moved and numbers multiplied a second, as measured.

Owns both measurements. Every other row of the same run is held against them.
"""

from collections.abc import Iterator

import torch

from benchmarks.gpu.place import Place
from benchmarks.gpu.report import COPY, MATRIX
from benchmarks.gpu.rows import Measured, Named

COPY_BYTES = 2 * 2**30
MATRIX_SIZE = 8192


def rows(place: Place) -> Iterator[Named]:
    """The two ceilings."""
    yield Named(COPY, lambda: copy(place))
    yield Named(MATRIX, lambda: matrix(place))


def copy(place: Place) -> Measured:
    """A copy from memory to memory of the device: bytes read and written both count."""
    count = 2**20 if place.is_dry else COPY_BYTES
    source = torch.randint(0, 255, (count,), dtype=torch.uint8, device=place.device)
    target = torch.empty_like(source)
    seconds = place.seconds(lambda _: target.copy_(source), 1)
    return Measured({"ms": seconds * 1000, "bytes": 2 * count})


def matrix(place: Place) -> Measured:
    """torch's product of square matrices of normal numbers: zeros would be quicker."""
    size = 64 if place.is_dry else MATRIX_SIZE
    shape = size, size
    pairs = [
        tuple(torch.randn(shape, device=place.device).to(place.dtype) for _ in range(2))
        for _ in range(2)
    ]
    out = torch.empty(shape, dtype=place.dtype, device=place.device)
    seconds = place.seconds(lambda index: torch.matmul(*pairs[index], out=out), len(pairs))
    return Measured({"ms": seconds * 1000, "flops": 2 * size**3})
