"""Fixtures of the simulations."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Keep thousands of recoveries out of the log."""
    log = logging.getLogger("gllm")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)
