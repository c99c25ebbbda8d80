"""All bad requests of the soak test are refused, and leave no task and no connection behind."""

import asyncio

import aiohttp

from benchmarks.soak_bad_requests import BAD_REQUESTS, RAW_REQUESTS, send_bad, send_raw


async def test_bad_requests_are_refused(server):
    url = str(server.client.server.make_url("/")).rstrip("/")
    num_tasks = len(asyncio.all_tasks())
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        problems = {
            name: await send_bad(session, url, bad)
            for name, bad in BAD_REQUESTS.items()
            if name != "bad schema"  # The fake engine compiles no grammars.
        }
    problems |= {name: await send_raw(url, data) for name, data in RAW_REQUESTS.items()}
    assert {name: problem for name, problem in problems.items() if problem} == {}
    async with asyncio.timeout(60):
        while server.connections or len(asyncio.all_tasks()) > num_tasks:
            await asyncio.sleep(0.01)


async def test_the_tasks_of_the_event_loop_are_a_metric(server):
    async def num_tasks() -> int:
        async with server.client.get("/metrics") as response:
            lines = (await response.text()).splitlines()
        (line,) = (line for line in lines if line.startswith("gllm:event_loop_tasks{"))
        return int(float(line.split()[1]))

    before = await num_tasks()
    more = [asyncio.create_task(asyncio.sleep(60)) for _ in range(7)]
    assert await num_tasks() == before + 7
    for task in more:
        task.cancel()
