"""Rate limits: the bucket, whose it is, and what clients are told."""

import pytest

from gllm.frontend.middleware.rate_limit import TokenBuckets, rate_limit_key
from gllm.frontend.routes.registry import ENDPOINTS
from tests.frontend.conftest import CHAT, CHAT_PATH, serving


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def test_a_bucket_fills_within_a_minute():
    clock = Clock()
    buckets = TokenBuckets(6, clock)
    levels = [buckets.consume("a") for _ in range(7)]
    assert [level.is_granted for level in levels] == [True] * 6 + [False]
    assert [level.num_remaining for level in levels] == [5, 4, 3, 2, 1, 0, 0]
    assert levels[-1].wait_seconds == pytest.approx(10)
    assert levels[-1].reset_seconds == pytest.approx(60)
    clock.now += 9.9
    assert not buckets.consume("a").is_granted
    clock.now += 0.2
    assert buckets.consume("a").is_granted
    assert not buckets.consume("a").is_granted
    assert buckets.consume("b").num_remaining == 5
    clock.now += 3600
    assert buckets.consume("a").num_remaining == 5


def test_the_table_is_bounded():
    buckets = TokenBuckets(1, Clock(), max_clients=3)
    assert all(buckets.consume(name).is_granted for name in "abc")
    assert not buckets.consume("a").is_granted
    assert buckets.consume("d").is_granted
    assert len(buckets) == 3
    assert not buckets.consume("a").is_granted, "who asked lately is remembered"
    assert buckets.consume("b").is_granted, "who asked first is not"


async def test_too_many(engine):
    async with serving(engine, rate_limit=2) as server:
        first = await server.chat()
        assert first.headers["x-ratelimit-limit-requests"] == "2"
        assert first.headers["x-ratelimit-remaining-requests"] == "1"
        async with server.client.post(CHAT_PATH, json={**CHAT, "stream": True}) as response:
            assert response.headers["x-ratelimit-remaining-requests"] == "0"
        refused = await server.chat()
        assert (refused.status, refused.error["code"]) == (429, "rate_limit_exceeded")
        assert refused.error["type"] == "rate_limit_error"
        # 30 and 60 seconds, less what this test has taken.
        assert 1 <= int(refused.headers["Retry-After"]) <= 30
        assert refused.headers["x-ratelimit-remaining-requests"] == "0"
        reset = refused.headers["x-ratelimit-reset-requests"].removesuffix("s")
        assert 30 < float(reset) <= 60
        assert len(engine.calls) == 2


async def test_each_key_has_its_own(engine):
    async with serving(engine, rate_limit=1, api_key=("a", "b")) as server:
        statuses = []
        for headers in ({"X-Api-Key": "a"}, {"Authorization": "Bearer a"}, {"X-Api-Key": "b"}):
            statuses.append((await server.post(CHAT_PATH, CHAT, headers=headers)).status)
        assert statuses == [200, 429, 200]
        assert (await server.post(CHAT_PATH, CHAT, headers={"X-Api-Key": "c"})).status == 401


async def test_what_does_not_compute_is_free(engine):
    async with serving(engine, rate_limit=1) as server:
        for _ in range(3):
            assert (await server.post("/abort", {"abort_all": True})).status == 200
            async with server.client.get("/v1/models") as response:
                assert response.status == 200
                assert "x-ratelimit-limit-requests" not in response.headers
        assert (await server.post("/tokenize", {"prompt": "x"})).status == 200
        assert (await server.chat()).status == 429


def test_what_generates_is_limited():
    assert all(one.is_rate_limited for one in ENDPOINTS if one.can_stream)
    assert not any(one.is_rate_limited for one in ENDPOINTS if one.is_public or one.method == "GET")


async def test_no_limit_no_headers(server):
    assert "x-ratelimit-limit-requests" not in (await server.chat()).headers


def test_one_client_is_one_network():
    assert rate_limit_key("10.0.0.1") != rate_limit_key("10.0.0.2")
    assert rate_limit_key("2001:db8::1") == rate_limit_key("2001:db8::ffff:2") == "2001:db8::/64"
    assert rate_limit_key("2001:db8:0:1::1") != rate_limit_key("2001:db8::1")
    assert rate_limit_key("::ffff:10.0.0.1") != rate_limit_key("::ffff:10.0.0.2")
    assert rate_limit_key("fe80::1%eth0") == "fe80::/64"
    assert rate_limit_key(None) == ""
