"""Weights in 8-bit floating point (e4m3) with one scale per block: a matrix and a stack.

The arithmetic is in `linear_fp8`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class _Fp8Blocks:
    """Codes with one scale per block; an element is its code times the scale of its block."""

    format: ClassVar[str] = "fp8"
    codes: Tensor
    """[..., outputs, inputs] float8_e4m3fn."""
    scales: Tensor
    """[..., blocks of outputs, blocks of inputs] float32; the last blocks may be smaller."""
    rows: int
    """Outputs per block."""
    columns: int
    """Inputs per block."""
    dtype: torch.dtype
    """Dtype of the floats that the weights represent."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Fp8Matrix(_Fp8Blocks):
    """Weight [outputs, inputs] as FP8 codes with one scale per block."""

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self.codes)


@dataclass(frozen=True, slots=True)
class Fp8Stack(_Fp8Blocks):
    """Weights [experts, outputs, inputs] of all experts as FP8 codes with one scale per block."""

    @property
    def shape(self) -> torch.Size:
        """Number of experts, outputs and inputs."""
        return self.codes.shape

    def __getitem__(self, expert: int) -> Fp8Matrix:
        """Return the weight of one expert; it shares the stack's memory."""
        return Fp8Matrix(
            self.codes[expert], self.scales[expert], self.rows, self.columns, self.dtype
        )
