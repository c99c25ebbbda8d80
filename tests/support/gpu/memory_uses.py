"""Uses of memory on a device that tests make up: who reads and writes which bytes, and when.

Owns the bytes of tensors, and memory that nobody has written. Knows nothing of streams.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

POISON = 0xA5
"""Byte of memory that nobody has written: large, negative, and no token id."""
Clock = dict[int, int]


class Race(AssertionError):
    """Two uses of memory in no order, one of them a write."""


class HiddenSync(AssertionError):
    """The host would have to wait for the device, or the device for the host's pages."""


@dataclass(frozen=True)
class Use:
    """Bytes that an operation reads or writes."""

    home: int
    """Address of the memory that they are a part of."""
    begin: int
    end: int
    writes: bool


@dataclass
class Seen:
    """A use, by whom and when."""

    use: Use
    who: int
    time: int
    name: str


@dataclass
class Operation:
    """Something in a stream; `ready` says whether what it waits for has come."""

    name: str
    run: Callable[[], None]
    uses: list[Use] = field(default_factory=list)
    clock: Clock = field(default_factory=dict)
    who: int = 0
    ready: Callable[[], bool] = lambda: True


def uses_of(tensors: Sequence[Tensor], writes: bool) -> list[Use]:
    """Bytes of tensors, from the first to the last."""
    found = []
    for tensor in tensors:
        if tensor.numel():
            last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
            begin = tensor.data_ptr()
            home = tensor.untyped_storage().data_ptr()
            found.append(Use(home, begin, begin + (last + 1) * tensor.itemsize, writes))
    return found


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None
) -> Tensor:
    """Memory that nobody has written."""
    with _disable_current_modes():
        if stride is None:
            made = torch.empty(tuple(shape), dtype=dtype)
        else:
            made = torch.empty_strided(tuple(shape), tuple(stride), dtype=dtype)
        bytes_of: Any = made.untyped_storage()
        bytes_of.fill_(POISON)
        return made


def merge(into: Clock, other: Clock) -> None:
    for who, time in other.items():
        into[who] = max(into.get(who, 0), time)
