"""Tiny tensors: threads would only wait for each other. Every way that an operation is computed."""

from collections.abc import Iterator

import pytest

from gllm.kernels.native import library
from gllm.runtime.device import set_threads


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    set_threads(1)


@pytest.fixture(scope="module", params=["torch", *library.FLAVORS])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Operations by torch, or by a build of the compiled kernels."""
    name = request.param
    builds = library.builds()
    if name != "torch" and name not in builds:
        pytest.skip("not compiled, or not for this processor")
    chosen = None if name == "torch" else library.Library(builds[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "library", lambda: chosen)
        yield name
