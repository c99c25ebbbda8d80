"""Builds of the compiled kernels as an operator chooses them: by the environment variable."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from gllm.kernels.native.builds import (
    BUILD_VARIABLE,
    BUILDS,
    OFF,
    find_compiled_builds,
    processor_features,
    select_build,
)
from gllm.kernels.native.library import KernelLibrary, Operation, current_library, load_library
from gllm.kernels.native.program import NotRecordableError
from tests.support.products import covers_pairs


def build_of(way: str) -> str:
    """Return the value of the variable for "torch" or the name of a build."""
    return OFF if way == "torch" else way


def usable_ways() -> list[str]:
    """Return "torch" and the builds that are compiled and that this processor supports."""
    features = processor_features()
    return ["torch", *(name for name in find_compiled_builds() if features >= BUILDS[name])]


@contextmanager
def using_build(way: str) -> Iterator[None]:
    """Compute with a build, or with torch alone, in all threads of this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BUILD_VARIABLE, build_of(way))
        load_library.cache_clear()
        yield
    load_library.cache_clear()


def covers_builds(
    corners: Sequence[tuple[Any, ...]] = (), **axes: Sequence[Any]
) -> pytest.MarkDecorator:
    """Parametrize by a pairwise design with every usable build, for the fixture `way`.

    Args:
        corners: Cases that run in any case: the way, then the values of `axes` in their order.
        axes: The values of the other parameters.
    """
    design = covers_pairs(corners, None, way=usable_ways(), **axes)
    return pytest.mark.parametrize(*design.args, indirect=["way"])


class UnrecordableLibrary(KernelLibrary):
    """The selected build, whose calls cannot be recorded as programs."""

    def __init__(self) -> None:
        path = select_build().path
        assert path is not None, "no build is selected"
        super().__init__(path)

    def is_preferred(self, operation: Operation, dtype: torch.dtype) -> bool:
        """Compute everything, but outside of recordings alone."""
        library = current_library()
        if library is not None and library.is_recording:
            raise NotRecordableError("not in this test")
        return True
