"""Tiny tensors: threads would only wait for each other."""

import pytest

from gllm.kernels.threads import set_num_threads


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    set_num_threads(1)
