"""A server that sleeps refuses requests until it is woken, and loses none that runs."""

import asyncio

import pytest

from tests.frontend.test_plain_routes import get


async def test_requests_are_refused_until_the_server_wakes_up(server):
    assert await get(server, "/is_sleeping") == (200, {"is_sleeping": False})
    assert (await server.post("/sleep", b"")).status == 200
    assert await get(server, "/is_sleeping") == (200, {"is_sleeping": True})
    answer = await server.complete()
    assert (answer.status, answer.error["code"]) == (503, "engine_sleeping")
    assert int(answer.headers["Retry-After"]) > 0
    assert (await get(server, "/ready"))[0] == 503
    assert await get(server, "/health") == (200, {"status": "ok", "state": "sleeping"})
    assert (await server.post("/sleep", b"")).status == 200
    assert (await server.post("/wake_up?tags=weights", b"")).status == 200
    assert (await server.complete()).status == 200


@pytest.mark.parametrize(("mode", "reason"), [("wait", "stop"), ("abort", "abort")])
async def test_running_requests(server, mode, reason):
    server.engine.delay = 0.01
    running = asyncio.create_task(server.complete())
    async with asyncio.timeout(5):
        while not server.engine.calls:
            await asyncio.sleep(0.005)
    assert (await server.post(f"/sleep?mode={mode}", b"")).status == 200
    assert server.engine.num_requests == 0
    assert (await running).json["choices"][0]["finish_reason"] == reason


@pytest.mark.parametrize(
    ("query", "asked"), [("", "sleep 1"), ("?level=1", "sleep 1"), ("?level=0", "sleep 0")]
)
async def test_levels(server, query, asked):
    assert (await server.post(f"/sleep{query}", b"")).status == 200
    assert server.engine.asked == [asked]


@pytest.mark.parametrize(
    ("query", "param"), [("level=2", "level"), ("level=x", "level"), ("mode=keep", "mode")]
)
async def test_what_cannot_be(server, query, param):
    answer = await server.post(f"/sleep?{query}", b"")
    assert (answer.status, answer.error["param"]) == (400, param)
    assert server.engine.state == "ready"


async def test_a_server_that_loads_cannot_sleep(server):
    server.engine.state = "loading"
    assert (await server.post("/sleep", b"")).status == 503


async def test_a_server_that_recovers_stays_asleep(server):
    server.engine.state, server.engine.is_asleep = "recovering", True
    assert await get(server, "/is_sleeping") == (200, {"is_sleeping": True})
    answer = await server.complete()
    assert (answer.status, answer.error["code"]) == (503, "engine_sleeping")
    assert await get(server, "/health") == (200, {"status": "ok", "state": "recovering"})
