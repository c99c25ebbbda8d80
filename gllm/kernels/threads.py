"""Threads of compiled kernels and of torch's operations.

They are two numbers, because torch's threads (OpenMP) wait for each other at every operation. A
machine that other programs keep busy runs one of them late, and each small operation then costs a
slice of the scheduler's time. A stage whose layers the compiled kernels compute leaves the rest to
one thread of torch. Kernels have threads of their own, which never wait for one that has not begun
(native/pool.cpp).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_kernel_threads: int | None = None


def num_threads() -> int:
    """Return the number of threads of compiled kernels: as many as torch has, until set."""
    return _kernel_threads or torch.get_num_threads()


def set_num_threads(count: int) -> None:
    """Set the number of threads of compiled kernels and of torch's operations."""
    global _kernel_threads
    _kernel_threads = count
    torch.set_num_threads(count)


@contextmanager
def using_num_threads(count: int) -> Iterator[None]:
    """Set both numbers of threads within a `with` block."""
    global _kernel_threads
    before = _kernel_threads, torch.get_num_threads()
    set_num_threads(count)
    try:
        yield
    finally:
        _kernel_threads = before[0]
        torch.set_num_threads(before[1])


@contextmanager
def using_torch_threads(count: int) -> Iterator[None]:
    """Set torch's number of threads alone within a `with` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
