"""A load on its way: every request at its time, and whoever asks may stop it.

Owns pacing and the limit on requests under way. Knows nothing of what a request says and of what
is made of its outcome.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from tqdm import tqdm

from gllm.commands.bench.client import Outcome

Send = Callable[[int], Awaitable[Outcome]]
"""Sends the request of that place in the load (a coroutine function)."""


@dataclass
class Measured:
    """What was measured, as far as it came."""

    begin: float
    """Of time.monotonic."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By place in the load."""
    seconds: float = 0.0
    interrupted: bool = False


async def run_load(
    arrivals: Sequence[float], send: Send, max_concurrency: int | None, progress: bool
) -> Measured:
    """Send every request at its time (seconds from now, rising), and wait for all.

    A request for which there is no room under `max_concurrency` waits before it is sent, behind
    those that wait already. SIGINT ends the load; what has an outcome by then is returned.
    """
    measured = Measured(time.monotonic())
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    with tqdm(total=len(arrivals), desc="requests", disable=not progress) as bar:

        async def one(place: int) -> None:
            async with limit:
                measured.outcomes[place] = await send(place)
            bar.update()

        async def everything() -> None:
            async with asyncio.TaskGroup() as group:
                for place, arrival in enumerate(arrivals):
                    wait = measured.begin + arrival - time.monotonic()
                    if wait > 0:
                        await asyncio.sleep(wait)
                    group.create_task(one(place))

        measured.interrupted = await _interrupted(asyncio.ensure_future(everything()))
    measured.seconds = time.monotonic() - measured.begin
    return measured


async def _interrupted(work: "asyncio.Future[None]") -> bool:
    """Wait for the work, or for SIGINT and then for the work's end; whether it was SIGINT."""
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
