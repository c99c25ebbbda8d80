"""What kernels are compiled for ahead of time, to prove without a GPU that they fit onto one.

Owns the description of one compilation. Every file of this room lists its own in COMPILED; `python
-m gllm.kernels.aot` compiles them (gllm/kernels/aot.py), and `python -m gllm.kernels.tune` tries
tiles on them (gllm/kernels/tune.py).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gllm.kernels.triton import tiles


@dataclass(frozen=True)
class Tiled:
    """Constants that come from a table of tiles, with warps and stages."""

    table: str
    sizes: Mapping[str, int]
    """What the row is looked up by."""
    constants: Callable[[Mapping[str, int]], Mapping[str, Any]]
    """tl.constexpr arguments of a row's choices."""


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
    """tl.constexpr arguments by name, but for those of a table."""
    warps: int = 4
    stages: int = 2
    tensor_cores: bool = False
    """Whether its products have to run on tensor cores."""
    least: int = 80
    """The oldest architecture that it is for, as 89 for sm_89."""
    aligned: tuple[str, ...] = field(default=())
    """Arguments that are multiples of 16 at run time: pointers and row lengths."""
    tiled: Tiled | None = None
    """What a table of tiles says, in place of warps and stages too."""

    def launch(self) -> tuple[dict[str, Any], int, int]:
        """All tl.constexpr arguments, warps and stages, as tables have them now."""
        if self.tiled is None:
            return dict(self.constants), self.warps, self.stages
        use = tiles.choose(self.tiled.table, **self.tiled.sizes)
        constants = {**self.constants, **self.tiled.constants(use)}
        return constants, use["warps"], use.get("stages", self.stages)
