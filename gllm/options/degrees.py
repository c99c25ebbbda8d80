"""Tensor-parallel degrees: the number of ranks of each pipeline stage."""

from collections.abc import Sequence
from numbers import Integral
from typing import Any


def as_degrees(value: Any) -> Any:
    """Wrap a single tensor-parallel degree in a tuple; other values are returned unchanged."""
    is_number = isinstance(value, Integral) and not isinstance(value, bool)
    return (value,) if is_number else value


def expand_degrees(degrees: Sequence[int], stages: int) -> list[int]:
    """Return the tensor-parallel degree of each pipeline stage as a list.

    Args:
        degrees: One degree for all stages, or one for each stage.
        stages: Number of pipeline stages.

    Raises:
        ValueError: There is another number of degrees.
    """
    if len(degrees) not in (1, stages):
        raise ValueError(
            f"tensor_parallel_size {tuple(degrees)} has to be one number for all stages, or one "
            f"for each of the {stages} stages (pipeline_parallel_size)"
        )
    return list(degrees) * (stages if len(degrees) == 1 else 1)
