"""Tiny tensors: threads would only wait for each other. Every way that an operation is computed."""

from collections.abc import Iterator

import pytest

from gllm.kernels.native import library
from gllm.kernels.native.builds import BUILD_VARIABLE, BUILDS, OFF, select_build
from gllm.runtime.device import set_num_threads


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    set_num_threads(1)


@pytest.fixture(scope="module", params=["torch", *BUILDS])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Operations by torch, or by a build of the compiled kernels."""
    name = request.param
    try:
        build = select_build({BUILD_VARIABLE: OFF if name == "torch" else name})
    except ValueError as error:
        pytest.skip(str(error))
    chosen = None if build.path is None else library.KernelLibrary(build.path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "load_library", lambda: chosen)
        yield name
