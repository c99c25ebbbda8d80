"""Waiting for a server, and what it says of its model."""

import pytest

from gllm.commands.bench.client import (
    ServedModel,
    TargetServerError,
    open_session,
    wait_until_ready,
)
from gllm.commands.bench.options import ServeConfig
from tests.support.http.fake_server import FakeServer, running


async def described(
    server: FakeServer, model: str | None = None, seconds: float = 20.0
) -> ServedModel:
    async with running(server) as url, open_session(ServeConfig(), None) as session:
        return await wait_until_ready(session, url, model, seconds, poll_seconds=0.001)


async def test_the_first_model_and_its_vocabulary() -> None:
    assert await described(FakeServer()) == ServedModel("fake", 50)
    assert await described(FakeServer(), "other") == ServedModel("other", 256)
    plain = FakeServer(models={"data": [{"id": "plain"}]})
    assert await described(plain) == ServedModel("plain", 256)


async def test_a_server_that_loads_is_waited_for() -> None:
    server = FakeServer(refusals=[503, 500, 404])
    assert await described(server) == ServedModel("fake", 50)
    assert server.refusals == []


async def test_one_that_never_gets_ready() -> None:
    with pytest.raises(TargetServerError, match=r"no server is ready at .* within 0\.05 s .*503"):
        await described(FakeServer(refusals=[503] * 1000), seconds=0.05)


@pytest.mark.parametrize("models", [{"data": []}, {}, 3])
async def test_a_server_without_a_list_of_models(models: object) -> None:
    with pytest.raises(TargetServerError, match="--model"):
        await described(FakeServer(models=models))
    assert await described(FakeServer(models=models), "mine") == ServedModel("mine", 256)


async def test_a_key_is_asked_for() -> None:
    with pytest.raises(TargetServerError, match="--api-key"):
        await described(FakeServer(models_status=401))
