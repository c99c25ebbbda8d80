"""Scripted servers and OpenAI's client of them, shared by the probes of a module."""

from collections.abc import AsyncIterator

import openai
import pytest_asyncio

from tests.frontend.conftest import Server
from tests.support.http.scripted_server import scripted_server

shared = pytest_asyncio.fixture(scope="module", loop_scope="module")


def client_of(server: Server) -> openai.AsyncOpenAI:
    url = str(server.client.make_url("/v1"))
    return openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0)


@shared
async def scripted() -> AsyncIterator[Server]:
    """A server that answers as it is told."""
    async with scripted_server() as made:
        yield made


@shared
async def ai(scripted: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(scripted) as made:
        yield made


@shared
async def reasoning_ai() -> AsyncIterator[openai.AsyncOpenAI]:
    """A client of a model that may reason."""
    async with scripted_server("think") as server, client_of(server) as made:
        yield made
