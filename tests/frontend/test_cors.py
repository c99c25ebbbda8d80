"""Pages of other origins: which may ask, and what they may read."""

import pytest

from tests.frontend.conftest import CHAT, CHAT_PATH, serving

HERE, THERE = "https://here.example", "https://there.example:8443"
PREFLIGHT = {
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type, x-stainless-os",
}
ALLOW = "Access-Control-Allow-Origin"


@pytest.fixture
async def shared(engine):
    """For two origins, with a key, which preflights never have."""
    async with serving(engine, allowed_origins=(HERE, THERE), api_key=("key",)) as made:
        yield made


@pytest.mark.parametrize("origin", [HERE, THERE])
async def test_preflight(shared, origin):
    headers = {"Origin": origin, **PREFLIGHT}
    async with shared.client.options(CHAT_PATH, headers=headers) as response:
        assert response.status == 204
        told = response.headers
    assert told[ALLOW] == origin
    assert "POST" in told["Access-Control-Allow-Methods"]
    assert "x-stainless-os" in told["Access-Control-Allow-Headers"]
    assert told["Vary"] == "Origin"
    assert "Access-Control-Allow-Credentials" not in told


@pytest.mark.parametrize("stream", [True, False])
async def test_answers_say_who_may_read_them(shared, stream):
    body = {**CHAT, "stream": stream}
    headers = {"Origin": HERE, "X-Api-Key": "key"}
    async with shared.client.post(CHAT_PATH, json=body, headers=headers) as response:
        assert response.status == 200
        assert response.headers[ALLOW] == HERE
        assert "X-Request-Id" in response.headers["Access-Control-Expose-Headers"]
        assert response.headers["Vary"] == "Origin"


async def test_a_page_may_read_why_it_was_refused(shared):
    answer = await shared.post(CHAT_PATH, CHAT, headers={"Origin": HERE})
    assert (answer.status, answer.headers[ALLOW]) == (401, HERE)


@pytest.mark.parametrize("origin", ["https://evil.example", HERE + ":1", "null", HERE.upper(), ""])
async def test_other_origins_are_told_nothing(shared, origin):
    headers = {"Origin": origin, **PREFLIGHT}
    async with shared.client.options(CHAT_PATH, headers=headers) as response:
        assert response.status == 403
        assert ALLOW not in response.headers
        assert response.headers["Vary"] == "Origin"


async def test_odd_names_of_headers_are_not_repeated(shared):
    headers = {"Origin": HERE, **PREFLIGHT, "Access-Control-Request-Headers": "x: y"}
    async with shared.client.options(CHAT_PATH, headers=headers) as response:
        assert response.status == 204
        assert "Access-Control-Allow-Headers" not in response.headers


async def test_all_origins(engine):
    async with serving(engine, allowed_origins=("*",)) as server:
        answer = await server.post(CHAT_PATH, CHAT, headers={"Origin": "null"})
        assert answer.headers[ALLOW] == "*"
        assert "Access-Control-Allow-Credentials" not in answer.headers
        assert "Vary" not in answer.headers


async def test_off_by_default(server):
    headers = {"Origin": HERE, **PREFLIGHT}
    async with server.client.options(CHAT_PATH, headers=headers) as response:
        assert response.status == 403
    answer = await server.post(CHAT_PATH, CHAT, headers={"Origin": HERE})
    assert answer.status == 403
    assert not [name for name in answer.headers if name.startswith("Access-Control")]
