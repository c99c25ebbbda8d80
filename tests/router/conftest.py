"""Fixtures of the links between routers and engines."""

from collections.abc import AsyncIterator

import pytest

from tests.support.routing.links import Links


@pytest.fixture
async def links() -> AsyncIterator[Links]:
    created = Links()
    yield created
    await created.stop()
