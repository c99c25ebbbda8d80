"""`gllm up` with a router that scales: engines come with the requests and leave without them."""

import asyncio

import pytest

from benchmarks.autoscaling import ENGINES, complete, look, make_plan, make_scale_flags
from benchmarks.fleet_processes import open_session, serving


@pytest.mark.long
async def test_engines_come_with_the_requests_and_leave_without_them() -> None:
    # An engine sustains so little that the requests of this test want both.
    flags = make_scale_flags(highest_rate=0.01, startup_seconds=5.0, idle_seconds=4.0)
    plan = make_plan(ENGINES, flags)
    async with serving(plan) as url, open_session() as session, asyncio.timeout(240):
        assert (await look(session, url, 0.0))[1:] == (0, 0)
        statuses = await asyncio.gather(*(complete(session, url) for _ in range(6)))
        assert statuses == [200] * 6
        while (await look(session, url, 0.0))[1:] != (0, 0):
            await asyncio.sleep(0.2)
        # The first request after that wakes the service again.
        assert await complete(session, url) == 200
