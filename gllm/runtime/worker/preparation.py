"""Preparation of a planned change in a worker: layers that it loads beside its present stage."""

import asyncio
import logging
import os
import threading
from collections.abc import Callable
from contextlib import suppress

from gllm.messages.lifecycle import LayersPrepared
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.messaging.spoke import Spoke
from gllm.runtime.worker.executor import WeightMemoryError
from gllm.runtime.worker.stage import format_error
from gllm.runtime.worker.stage_loader import StageLoader

log = logging.getLogger(__name__)

NICENESS = 10
"""Priority of the thread that loads, so that steps go on undisturbed."""


def prepare_layers(
    assignment: StageAssignment,
    earlier: StageLoader | None,
    running: StageLoader | None,
    head: Spoke,
) -> StageLoader:
    """Load the layers of a stage on a thread; LayersPrepared follows.

    The worker goes on if they cannot be loaded. Layers for which the memory does not suffice now
    are loaded when the stage begins; another error is reported, so that it does not begin.

    Args:
        assignment: with the number of the change.
        earlier: layers that were prepared for another change; None for none.
        running: loader of the present instance, whose layers are shared; None without one.
        head: session with the parent.
    """
    loop = asyncio.get_running_loop()
    num_bytes = 0

    def on_progress(done_bytes: int, total_bytes: int) -> None:
        nonlocal num_bytes
        if running is not None and not done_bytes:
            # Of this thread alone, which computes nothing.
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        num_bytes = done_bytes

    def report(cause: str, is_failed: bool = False) -> None:
        read_bytes = 0 if cause else num_bytes
        message = LayersPrepared(assignment.change, read_bytes, cause, is_failed)
        with suppress(RuntimeError):  # The loop has been closed.
            loop.call_soon_threadsafe(head.send, message)

    def on_error(error: BaseException) -> None:
        if isinstance(error, WeightMemoryError):
            log.warning("the layers of the next generation are loaded later: %s", error)
            report(str(error))
        else:
            log.error("the layers of the next generation cannot be loaded", exc_info=error)
            report(format_error(error), is_failed=True)

    loader = StageLoader(assignment, on_progress, [] if earlier is None else [earlier], running)
    on_loaded: Callable[[], None] = lambda: report("")  # noqa: E731
    loader.start(on_loaded, on_error)
    return loader
