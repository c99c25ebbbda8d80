"""Weights in 8-bit floating point (e4m3) with a scale per block: matrices, and stacks for experts.

Arithmetic on them is in linear_fp8.py and experts.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A weight [outputs, inputs]: code times the scale of its block."""

    codes: Tensor
    """[outputs, inputs] float8_e4m3fn."""
    scales: Tensor
    """[blocks of outputs, blocks of inputs] float32; the last blocks may be smaller."""
    rows: int
    """Outputs of a block."""
    columns: int
    """Inputs of a block."""
    dtype: torch.dtype
    """Of the floats that it stands for."""

    @property
    def outputs(self) -> int:
        return len(self.codes)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class Fp8Stack:
    """Weights [outputs, inputs] of the same shape and blocks, one for each expert."""

    codes: Tensor
    """[experts, outputs, inputs] float8_e4m3fn."""
    scales: Tensor
    """[experts, blocks of outputs, blocks of inputs] float32."""
    rows: int
    columns: int
    dtype: torch.dtype
    """All three as of Fp8Matrix."""

    @property
    def shape(self) -> torch.Size:
        """Experts, outputs, inputs."""
        return self.codes.shape

    def __getitem__(self, expert: int) -> Fp8Matrix:
        return Fp8Matrix(
            self.codes[expert], self.scales[expert], self.rows, self.columns, self.dtype
        )
