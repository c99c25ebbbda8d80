"""A load on its way: order, times, the limit, and Ctrl-C."""

import asyncio
import os
import signal
import time

import pytest

from gllm.commands.bench.client import RequestResult, run_load
from gllm.observability.latency import RequestTimeline


def outcome() -> RequestResult:
    return RequestResult(RequestTimeline(time.monotonic()), 1)


async def test_no_request_is_sent_before_its_time() -> None:
    sent: list[int] = []

    async def send(place: int) -> RequestResult:
        sent.append(place)
        return outcome()

    arrivals = [0.0, 0.0, 0.02, 0.05]
    measured = await run_load(arrivals, send, None, progress=False)
    assert sent == [0, 1, 2, 3]
    assert not measured.interrupted
    for place, arrival in enumerate(arrivals):
        assert measured.outcomes[place].timeline.arrival - measured.begin >= arrival
    assert measured.seconds >= arrivals[-1]


@pytest.mark.parametrize("limit", [1, 3, None])
async def test_the_limit_on_requests_under_way(limit: int | None) -> None:
    sent: list[int] = []
    under_way = most = 0

    async def send(place: int) -> RequestResult:
        nonlocal under_way, most
        sent.append(place)
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return outcome()

    await run_load([0.0] * 10, send, limit, progress=False)
    assert most == (limit or 10)
    assert sent == list(range(10))


async def test_ctrl_c_leaves_what_was_measured() -> None:
    cancelled: list[int] = []

    async def send(place: int) -> RequestResult:
        if place == 2:
            os.kill(os.getpid(), signal.SIGINT)
        if place >= 2:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(place)
                raise
        return outcome()

    measured = await run_load([0.0, 0.0, 0.01, 0.01, 60.0], send, None, progress=False)
    assert measured.interrupted
    assert set(measured.outcomes) == {0, 1}
    assert sorted(cancelled) == [2, 3]


async def test_an_error_of_ours_is_not_hidden() -> None:
    async def send(place: int) -> RequestResult:
        raise RuntimeError("a mistake")

    with pytest.raises(ExceptionGroup):
        await run_load([0.0], send, None, progress=False)
