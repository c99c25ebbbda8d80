"""One operation as a row: its error, its time over several inputs, and others' times.

Owns the order of that. Knows no operation.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, Skip, judged

TOLERANCES = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-14}
"""Of an operation's largest error as a share of its largest output, by the type of its outputs:
four roundings to nearest of the largest output; the last type's products may run as TF32 thrice."""


def relative_error(got: Tensor, wanted: Tensor) -> float:
    """The largest difference of two tensors of one shape as a share of the largest wanted number;
    infinite where one is none."""
    difference = (got.to(torch.float64) - wanted.to(torch.float64)).abs().max()
    share = float(difference / wanted.abs().max().clamp_min(1e-30))
    return share if share == share else float("inf")


@dataclass
class Rival:
    """Another implementation, on inputs of its own."""

    make: Callable[[], Any]
    run: Callable[[Any], object]


@dataclass
class Operation:
    """What is measured of one operation."""

    make: Callable[[], Any]
    """Inputs, other ones at each call."""
    run: Callable[[Any], object]
    error: Callable[[Any], float]
    """Runs it on inputs and compares with the reference."""
    tolerance: float
    num_bytes: float
    """That have to be moved."""
    flops: float = 0.0
    input_bytes: int | None = None
    """Of one set of inputs, where these are not what is moved."""
    rivals: dict[str, Rival] = field(default_factory=dict)
    """By the name of their figure."""
    aims: dict[str, float] = field(default_factory=dict)


def measure(place: Place, operation: Operation) -> Measured:
    """Error first, then times. A rival that cannot run is a note."""
    given = operation.input_bytes or int(operation.num_bytes)
    if given > 0.7 * place.free_bytes():
        raise Skip(f"needs {given / 2**30:.1f} GiB of inputs")
    figures = {"error": operation.error(operation.make()), "tolerance": operation.tolerance}
    count, notes = place.sets(given), []
    figures["ms"] = _milliseconds(place, operation.make, operation.run, count)
    figures |= {"bytes": operation.num_bytes, "flops": operation.flops}
    for name, rival in operation.rivals.items():
        try:
            if given * count > 0.7 * place.free_bytes():
                raise Skip("no room")
            figures[name] = _milliseconds(place, rival.make, rival.run, count)
        except Exception as error:
            notes.append(f"{name}: {type(error).__name__}: {str(error).strip()[:120]}")
    return judged(figures, operation.aims, "; ".join(notes))


def _milliseconds(
    place: Place, make: Callable[[], Any], run: Callable[[Any], object], count: int
) -> float:
    sets = [make() for _ in range(count)]
    return place.seconds(lambda index: run(sets[index]), count) * 1000
