"""Sums and factors of the residual stream, for which there are no compiled kernels.

They are host functions of a recorded program.
"""

import torch
from torch import Tensor

from gllm.kernels.native.program import launch_host_function


def add(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y, both [rows, n]."""
    return launch_host_function(torch.add, x, y)


def add_to(hidden: Tensor, delta: Tensor) -> Tensor:
    """Add a sublayer's output `delta` to the residual stream `hidden` in place; return `hidden`.

    Both are [rows, n].
    """
    return launch_host_function(Tensor.add_, hidden, delta, is_in_place=True)


def scale(x: Tensor, factor: float) -> Tensor:
    """Return x [rows, n] times a factor; x itself if it is 1."""
    return x if factor == 1 else launch_host_function(lambda rows: rows * factor, x)


def replace(hidden: Tensor, rows: Tensor, factor: float) -> None:
    """Replace the residual stream `hidden` in place by `rows` times a factor, both [rows, n]."""
    launch_host_function(
        lambda stream, other: torch.mul(other, factor, out=stream), hidden, rows, is_in_place=True
    )
