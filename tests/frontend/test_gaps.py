"""A field at its largest permitted size keeps the event loop from others for a bounded time."""

import asyncio
import gc
import http.client
import statistics
from urllib.parse import urlsplit

import pytest

from benchmarks.gap_cases import CASES, LONG, MANY, Case, chat
from benchmarks.loop_watch import LoopWatch
from gllm.config.server import ServerConfig
from gllm.frontend.fields.parsing import parse_body
from gllm.options.limits import MAX_JSON_VALUES
from tests.frontend.conftest import CHAT_PATH, serving
from tests.support.http.raw import SECONDS

PLAIN = Case("plain", CHAT_PATH, chat())
TURNS = 150
"""The longest turn of the loop, in longest turns of a plain request: CPU time of the loop's thread,
so a busy machine lengthens both."""
ATTEMPTS = 3
"""Measurements of a slow request, of which the shortest counts: page faults and interrupts of a
machine's other work occur in one, work of the loop in all of them."""
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
        plain = statistics.median([(await longest_turn(server, PLAIN))[0] for _ in range(5)])
        slow = []
        for case in CASES:
            if case.field in NOT_HERE:
                continue
            seconds, status = await longest_turn(server, case)
            for _ in range(ATTEMPTS - 1):
                if seconds > TURNS * plain:
                    seconds = min(seconds, (await longest_turn(server, case))[0])
            if seconds > TURNS * plain or status >= 500:
                slow.append((case.field, seconds / plain, status))
    assert slow == []


@pytest.mark.usefixtures("frozen_heap")
def test_a_body_of_many_lists_causes_no_garbage_collections():
    body = b'{"odd":[' + b"[]," * (MAX_JSON_VALUES - 16) + b"1]}"
    phases = []

    def count(phase: str, _: object) -> None:
        phases.append(phase)

    gc.callbacks.append(count)
    try:
        values = parse_body(body)
    finally:
        gc.callbacks.remove(count)
    assert len(values["odd"]) == MAX_JSON_VALUES - 15
    assert phases.count("start") <= 1, "one may follow the decoding"
    assert gc.isenabled()
