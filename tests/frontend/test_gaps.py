"""A field at its largest permitted size keeps the event loop from others for a bounded time."""

import asyncio
import gc
import http.client
from urllib.parse import urlsplit

import pytest

from benchmarks.gap_cases import CASES, LONG, MANY, Case, chat
from benchmarks.loop_watch import LoopWatch
from gllm.config.server import ServerConfig
from tests.frontend.conftest import CHAT_PATH, serving
from tests.support.http.raw import SECONDS

PLAIN = Case("plain", CHAT_PATH, chat())
TURNS = 150
"""The longest turn of the loop, in longest turns of a plain request: CPU time of the loop's thread,
so a busy machine lengthens both."""
NOT_HERE = (LONG, MANY)
"""A vocabulary this small makes half a million tokens of the one; the fake engine tells of each
prompt of the other by itself."""


async def longest_turn(server, case: Case) -> tuple[float, int]:
    """CPU seconds of the loop's longest turn during a request, and the status of its answer."""
    url = urlsplit(str(server.client.make_url("/")))
    assert url.hostname is not None
    host = url.hostname
    headers = {"Content-Encoding": "gzip"} if case.is_compressed else {}
    body = await asyncio.to_thread(case.body)

    def ask() -> int:
        connection = http.client.HTTPConnection(host, url.port, timeout=SECONDS)
        connection.request("POST", case.path, body, headers)
        with connection.getresponse() as response:
            response.read()
            connection.close()
            return response.status

    with LoopWatch() as gaps:
        status = await asyncio.to_thread(ask)
    return gaps.cpu_seconds, status


@pytest.fixture
def frozen_heap():
    """As in a server, where the collector need not look at what start-up made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.full
@pytest.mark.usefixtures("frozen_heap")
async def test_no_field_stops_the_loop(engine):
    limits = ServerConfig()
    options = {
        "max_choices": limits.max_choices,
        "max_body_bytes": limits.max_body_bytes,
        "max_num_queued_requests": limits.max_num_queued_requests,
    }
    async with serving(engine, checks_schemas=False, **options) as server:
        await longest_turn(server, PLAIN)
        plain = max([(await longest_turn(server, PLAIN))[0] for _ in range(5)])
        slow = []
        for case in CASES:
            if case.field in NOT_HERE:
                continue
            seconds, status = await longest_turn(server, case)
            if seconds > TURNS * plain or status >= 500:
                slow.append((case.field, seconds / plain, status))
    assert slow == []
