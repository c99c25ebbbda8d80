"""Measurement of one operation as a row: its error, its time and those of its rivals."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, SkipRowError, judged

TOLERANCES = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-14}
"""Maximum error of an operation relative to its largest output, by the type of its outputs.

It allows four roundings to nearest of the largest output; the last type's products may run as three
TF32 products.
"""


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors relative to the largest expected number.

    Infinite if a difference is NaN.
    """
    difference = (got.to(torch.float64) - expected.to(torch.float64)).abs().max()
    share = float(difference / expected.abs().max().clamp_min(1e-30))
    return share if share == share else float("inf")


@dataclass
class Rival:
    """Another implementation with its own inputs."""

    make: Callable[[], Any]
    run: Callable[[Any], object]


@dataclass
class Operation:
    """One operation and its measurements."""

    make: Callable[[], Any]
    """Function that creates new inputs."""
    run: Callable[[Any], object]
    error: Callable[[Any], float]
    """Function that runs the operation on inputs and returns the error relative to the reference.
    """
    tolerance: float
    num_bytes: float
    """Minimum number of bytes to move."""
    flops: float = 0.0
    input_bytes: int | None = None
    """Bytes of one set of inputs, if they differ from num_bytes."""
    rivals: dict[str, Rival] = field(default_factory=dict)
    """Other implementations by the name of their figure."""
    aims: dict[str, float] = field(default_factory=dict)


def measure(place: Place, operation: Operation) -> Measured:
    """Measure the error, then the times; a rival that fails to run becomes a note."""
    input_bytes = operation.input_bytes or int(operation.num_bytes)
    if input_bytes > 0.7 * place.free_bytes():
        raise SkipRowError(f"needs {input_bytes / 2**30:.1f} GiB of inputs")
    figures = {"error": operation.error(operation.make()), "tolerance": operation.tolerance}
    count, notes = place.sets(input_bytes), []
    figures["ms"] = _milliseconds(place, operation.make, operation.run, count)
    figures |= {"bytes": operation.num_bytes, "flops": operation.flops}
    for name, rival in operation.rivals.items():
        try:
            if input_bytes * count > 0.7 * place.free_bytes():
                raise SkipRowError("not enough free memory")
            figures[name] = _milliseconds(place, rival.make, rival.run, count)
        except Exception as error:
            notes.append(f"{name}: {type(error).__name__}: {str(error).strip()[:120]}")
    return judged(figures, operation.aims, "; ".join(notes))


def _milliseconds(
    place: Place, make: Callable[[], Any], run: Callable[[Any], object], count: int
) -> float:
    sets = [make() for _ in range(count)]
    return place.seconds(lambda index: run(sets[index]), count) * 1000
