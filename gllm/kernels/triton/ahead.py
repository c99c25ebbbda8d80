"""What kernels are compiled for ahead of time, to prove without a GPU that they fit onto one.

Owns the description of one compilation. Every file of this room lists its own in COMPILED; `python
-m gllm.kernels.aot` compiles them (gllm/kernels/aot.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Compiled:
    """One kernel with its types and constants."""

    label: str
    """What it is for, as `decode, heads of 128, bf16`."""
    kernel: Any
    """The function under triton.jit."""
    signature: Mapping[str, str]
    """Types of all arguments that are no constants, as `*bf16`, `i32`, `fp32`."""
    constants: Mapping[str, Any]
    """tl.constexpr arguments by name."""
    warps: int = 4
    stages: int = 2
    tensor_cores: bool = False
    """Whether its products have to run on tensor cores."""
    least: int = 80
    """The oldest architecture that it is for, as 89 for sm_89."""
    aligned: tuple[str, ...] = field(default=())
    """Arguments that are multiples of 16 at run time: pointers and row lengths."""
