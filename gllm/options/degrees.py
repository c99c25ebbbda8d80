"""Tensor-parallel degrees: the number of ranks of each pipeline stage."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any


def as_degrees(value: Any) -> Any:
    """Return a single number as the tuple that a configuration has; other values as they are."""
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return (value,) if is_number else value


def expand_degrees(degrees: Sequence[int], stages: int) -> list[int]:
    """Return the number of ranks of each stage; a single number applies to all stages.

    Raises ValueError for another number of degrees.
    """
    if len(degrees) not in (1, stages):
        raise ValueError(
            f"tensor_parallel_size {tuple(degrees)} has to be one number for all stages, or one "
            f"for each of the {stages} stages (pipeline_parallel_size)"
        )
    return list(degrees) * (stages if len(degrees) == 1 else 1)
