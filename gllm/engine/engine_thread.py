"""Thread on which an engine of a blocking program lives, from its start to its end.

Python raises KeyboardInterrupt in the main thread alone. Everything that acquires or frees
resources runs on this thread, so an interrupt ends a wait and never leaves anything half done.
"""

import asyncio
import atexit
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from typing import Any, TypeVar

from gllm.engine.engine import Engine, EngineError

T = TypeVar("T")

CLOSED = "the LLM was closed: create another one"
"""Error of calls after the end."""


class _Job:
    """Coroutine that a caller on another thread waits for."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        self._work = work
        self._task: asyncio.Task[Any] | None = None
        self._error: BaseException | None = None
        self._result: Any = None
        self._is_cancelled = False
        self.done = threading.Event()

    def begin(self) -> None:
        """Begin, on the event loop, unless the caller has left."""
        if self._is_cancelled:
            self.done.set()
            return
        self._task = asyncio.get_running_loop().create_task(self._work())
        self._task.add_done_callback(self._on_done)

    def cancel(self) -> None:
        """Cancel, on the event loop."""
        self._is_cancelled = True
        if self._task is None:
            self.done.set()
        else:
            self._task.cancel()

    def fail(self, error: BaseException) -> None:
        """End with an error, unless it has ended."""
        if not self.done.is_set():
            self._error = error
            self.done.set()

    def result(self) -> Any:
        """Return the result, or raise the error, after the end."""
        if self._error is not None:
            raise self._error
        return self._result

    def _on_done(self, task: "asyncio.Task[Any]") -> None:
        if task.cancelled():
            self._error = EngineError(CLOSED)
        elif (error := task.exception()) is not None:
            self._error = error
        else:
            self._result = task.result()
        self.done.set()


class EngineThread:
    """Event loop on a thread of its own, with the engine that lives there.

    `end` may be called at any time, from any thread and by a finalizer; all callers of `join` wait
    for the same end.
    """

    def __init__(self) -> None:
        self.engine: Engine | None = None
        """The engine, once it was created."""
        self.machines = ExitStack()
        """Machines that a launcher has started; they end after the engine."""
        self._thread = threading.Thread(target=self._run, name="gllm", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None
        """None before the thread has begun, and after its end."""
        self._has_begun = threading.Event()
        self._end_event = asyncio.Event()
        self._is_ending = False
        self._jobs: set[_Job] = set()
        """Jobs whose callers wait."""
        self._error: BaseException | None = None
        """Error of the end, which the first `join` raises."""

    def start(self) -> None:
        """Start the thread and wait for its event loop."""
        _RUNNING.add(self)
        self._thread.start()
        self._has_begun.wait()

    async def start_engine(self, create: Callable[..., Engine], *args: Any, **options: Any) -> None:
        """Create the engine and start it; runs on the thread."""
        self.engine = create(*args, **options)
        await self.engine.start()

    def run(self, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a coroutine on the event loop and return its result.

        If the wait is interrupted, the coroutine is cancelled, and the interrupt is raised once the
        coroutine has ended; a second interrupt is raised at once.

        Raises:
            EngineError: the thread has ended, or ends meanwhile.
        """
        if threading.current_thread() is self._thread:
            raise EngineError("an LLM cannot be used by its own event loop: use Engine there")
        job = _Job(work)
        self._jobs.add(job)
        try:
            self._call(job.begin)
            job.done.wait()
        except BaseException:
            if self._cancel(job):
                job.done.wait()
            raise
        finally:
            self._jobs.discard(job)
        result: T = job.result()
        return result

    def end(self) -> None:
        """Make the engine stop and the thread end; returns at once."""
        self._is_ending = True
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._end_event.set)
            except RuntimeError:
                # The loop was closed meanwhile.
                return

    def join(self) -> None:
        """Wait until the thread has ended. Raises the error of the engine's end, once."""
        if threading.current_thread() is self._thread:
            return
        if self._thread.is_alive():
            self._thread.join()
        self.machines.close()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _call(self, function: Callable[[], None]) -> None:
        loop = self._loop
        try:
            # In a fork of the process the thread does not exist.
            if loop is None or self._is_ending or not self._thread.is_alive():
                raise EngineError(CLOSED)
            loop.call_soon_threadsafe(function)
        except RuntimeError:
            raise EngineError(CLOSED) from None

    def _cancel(self, job: _Job) -> bool:
        """Cancel a job; return False if there is nothing to wait for."""
        loop = self._loop
        if loop is None or job.done.is_set():
            return False
        try:
            loop.call_soon_threadsafe(job.cancel)
        except RuntimeError:
            return False
        return True

    def _run(self) -> None:
        try:
            asyncio.run(self._live())
        except BaseException as error:
            self._error = error
        finally:
            self._loop = None
            self._is_ending = True
            for job in list(self._jobs):
                job.fail(EngineError(CLOSED))
            self._has_begun.set()

    async def _live(self) -> None:
        """Run until the end is requested, then stop the engine."""
        self._loop = asyncio.get_running_loop()
        self._has_begun.set()
        if not self._is_ending:
            await self._end_event.wait()
        # Requests that run end with the engine's error; `asyncio.run` cancels what is left.
        if self.engine is not None:
            await self.engine.stop()


_RUNNING: weakref.WeakSet[EngineThread] = weakref.WeakSet()
"""Threads that were started. A running one is alive, because its function refers to it."""


@atexit.register
def _end_all() -> None:
    """End the threads of engines that were not closed, before the interpreter ends."""
    running = list(_RUNNING)
    for thread in running:
        thread.end()
    for thread in running:
        with suppress(Exception):
            thread.join()
