"""Kernels that Triton compiles while a stage serves.

A compilation takes a second in which the stage does nothing else, so there should be none once it
is ready. Counts launches that found no kernel compiled within this process, also where Triton's
folder of compiled kernels has one.
"""

import logging
from typing import Any

from triton import knobs

log = logging.getLogger(__name__)


class CompilationCounter:
    """Counts the kernels that this process compiles from its creation on; one per process."""

    def __init__(self) -> None:
        self.count = 0
        knobs.runtime.jit_post_compile_hook = self._on_compiled

    def _on_compiled(self, *, repr: str, **_: Any) -> None:
        """Count a compilation; repr: the kernel with its options and argument types."""
        self.count += 1
        log.warning("compiled while serving: %s", repr)
