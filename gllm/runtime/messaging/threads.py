"""Blocking work beside the event loop."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial


async def run_in_thread(function: Callable[[], None]) -> None:
    """Run a function on a thread that ends with it.

    OpenMP gives every thread that forks its own helpers and keeps them as long as the thread lives;
    with more of them than cores it does not spin at barriers, and the compute thread's steps take a
    tenth longer.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def run() -> None:
        try:
            function()
        except BaseException as error:
            complete = partial(done.set_exception, error)
        else:
            complete = partial(done.set_result, None)
        # The caller may have stopped waiting, and the loop may have been closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(lambda: done.cancelled() or complete())

    name = getattr(function, "__name__", "run_in_thread")
    threading.Thread(target=run, name=name, daemon=True).start()
    await done
