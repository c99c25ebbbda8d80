"""Tiny tensors: threads would only wait for each other. Every way that an operation is computed."""

from collections.abc import Iterator

import pytest

from gllm.kernels.threads import set_num_threads
from tests.support.models.kernel_builds import usable_ways, using_build


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    set_num_threads(1)


@pytest.fixture(scope="module", params=usable_ways())
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    """Operations by torch, or by a build of the compiled kernels that this processor supports."""
    with using_build(request.param):
        yield request.param
