"""Run a load: send every request at its time, within the concurrency limit, until SIGINT."""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from gllm.commands.bench.client import RequestResult
from gllm.observability.progress import show_progress

Send = Callable[[int], Awaitable[RequestResult]]
"""Coroutine function that sends the request with an index in the load."""


@dataclass
class LoadResult:
    """Results of a load, complete or interrupted."""

    begin: float
    """Start time, of time.monotonic."""
    outcomes: dict[int, RequestResult] = field(default_factory=dict)
    """Results by index in the load."""
    seconds: float = 0.0
    interrupted: bool = False


async def run_load(
    arrivals: Sequence[float], send: Send, max_concurrency: int | None, progress: bool
) -> LoadResult:
    """Send every request at its arrival time and wait for all results.

    Requests beyond `max_concurrency` wait in order of arrival before they are sent. SIGINT ends the
    load early; the results up to then are returned.

    Args:
        arrivals: Seconds from now, in ascending order.
        send: Sends one request.
        max_concurrency: Maximum number of requests in progress; None: no limit.
        progress: Show a progress bar.
    """
    result = LoadResult(time.monotonic())
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    with show_progress("request", len(arrivals), is_shown=progress) as bar:

        async def send_one(index: int) -> None:
            async with limit:
                result.outcomes[index] = await send(index)
            bar.update()

        async def send_all() -> None:
            async with asyncio.TaskGroup() as group:
                for index, arrival in enumerate(arrivals):
                    wait = result.begin + arrival - time.monotonic()
                    if wait > 0:
                        await asyncio.sleep(wait)
                    group.create_task(send_one(index))

        result.interrupted = await _run_until_interrupted(asyncio.ensure_future(send_all()))
    result.seconds = time.monotonic() - result.begin
    return result


async def _run_until_interrupted(work: "asyncio.Future[None]") -> bool:
    """Run a task until it ends or SIGINT cancels it; return True if SIGINT did."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, work.cancel)
    try:
        await asyncio.wait({work})
    finally:
        loop.remove_signal_handler(signal.SIGINT)
    if work.cancelled():
        return True
    work.result()
    return False
