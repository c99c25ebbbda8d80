"""Descriptions of the kernel variants that are compiled ahead of time, without a GPU.

Each kernel module lists its variants in KERNEL_SPECS. `python -m gllm.kernels.aot` compiles and
checks them (gllm/kernels/aot.py); `python -m gllm.kernels.tune` tries tile sizes on them
(gllm/kernels/tune.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.kernels.triton import tiles


@dataclass(frozen=True)
class TunedConstants:
    """Compile-time constants, warps and stages of a kernel that depend on tuned tile sizes."""

    table: str
    """Name of the table of tile sizes (tiles.py)."""
    sizes: Mapping[str, int]
    """Problem sizes that select the row of the table."""
    constants: Callable[[Mapping[str, int]], Mapping[str, Any]]
    """Function from the tile sizes of a row to tl.constexpr arguments."""


@dataclass(frozen=True)
class KernelSpec:
    """Variant of a Triton kernel: its argument types, constants and launch options."""

    label: str
    """Description for tables, for example `decode, heads of 128, bf16`."""
    kernel: Any
    """The function decorated with triton.jit."""
    signature: Mapping[str, str]
    """Types of the arguments that are not constants, for example `*bf16`, `i32`, `fp32`."""
    constants: Mapping[str, Any]
    """tl.constexpr arguments by name, except those of `tuned`."""
    warps: int = 4
    stages: int = 2
    tensor_cores: bool = False
    """True if the products must run on tensor cores."""
    min_arch: int = 80
    """Oldest supported architecture, for example 89 for sm_89."""
    aligned: tuple[str, ...] = field(default=())
    """Arguments that are multiples of 16 at run time: pointers and row lengths."""
    tuned: TunedConstants | None = None
    """Constants from a table of tile sizes; then the table also sets warps and stages."""

    def launch(self) -> tuple[dict[str, Any], int, int]:
        """Return all tl.constexpr arguments, warps and stages, with the active tile sizes."""
        if self.tuned is None:
            return dict(self.constants), self.warps, self.stages
        use = tiles.choose_tiles(self.tuned.table, **self.tuned.sizes)
        constants = {**self.constants, **self.tuned.constants(use)}
        return constants, use["warps"], use.get("stages", self.stages)
