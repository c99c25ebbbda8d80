"""Lifecycle of the engines of a plan and their router: start, ready, drain, end.

`EngineManager` decides, whatever runs the processes: this machine (gllm/deploy/logged_process.py)
or a Ray cluster (gllm/deploy/ray/plan_processes.py).
"""

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gllm.deploy.lifecycle import RunningProcess, next_to_end, run_to_end
from gllm.observability.stop_signals import StopAction, StopSignals
from gllm.plan.processes import ProcessSpec, specs_by_name

PROBE_SECONDS = 0.2
"""Interval of the probes of a process until it is ready."""
log = logging.getLogger("gllm")


@dataclass
class _ManagedProcess:
    spec: ProcessSpec
    process: RunningProcess
    task: asyncio.Task[None]
    may_fail: bool
    """Its failure ends no other process."""
    cause: str = ""
    """Cause of its end in words; empty while it runs."""

    @property
    def is_entry(self) -> bool:
        return self.spec.is_router

    @property
    def is_ending(self) -> bool:
        return self.process.is_ending


class EngineManager:
    """Starts, watches and ends the router and the engines of a serving plan, here or in Ray.

    If one process fails, all are shut down and `run` returns 1, unless engines are scaled by load.
    """

    def __init__(
        self,
        specs: Iterable[ProcessSpec],
        launch: Callable[[ProcessSpec], RunningProcess],
        on_ready: Callable[[list[ProcessSpec]], None],
        is_scaled: bool = False,
        probe_seconds: float = PROBE_SECONDS,
    ) -> None:
        """Create a manager without processes.

        Args:
            specs: processes that may run.
            launch: returns a process that has not started.
            on_ready: receives all processes once each one of them is ready.
            is_scaled: begin with the router alone. Engines are started and ended by the caller, and
                the failure of one ends no other process.
            probe_seconds: interval of the probes of a process until it is ready.
        """
        self.cause = ""
        """First failure; empty without one."""
        self._specs = specs_by_name(specs)
        self._launch = launch
        self._on_ready = on_ready
        self._is_scaled = is_scaled
        self._probe_seconds = probe_seconds
        self._processes: dict[str, _ManagedProcess] = {}
        self._should_stop = asyncio.Event()
        self._signals = StopSignals()

    @property
    def running(self) -> list[str]:
        """Names of the processes that run and are not ending."""
        return [name for name, managed in self._processes.items() if not managed.is_ending]

    @property
    def is_stopping(self) -> bool:
        """True once all processes are being shut down."""
        return self._should_stop.is_set()

    async def run(self) -> int:
        """Run all processes until a signal, a failure or their exit.

        Returns:
            The exit status: 1 after a failure, whose text is in `cause`.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, number)
        readiness = None
        try:
            for spec in self._specs.values():
                if spec.is_router or not self._is_scaled:
                    self._start(spec)
            readiness = asyncio.create_task(self._announce(list(self._processes.values())))
            await self._should_stop.wait()
        finally:
            if readiness is not None:
                readiness.cancel()
                await asyncio.gather(readiness, return_exceptions=True)
            while running := list(self._processes.values()):
                for managed in next_to_end(running):
                    managed.process.end()
                tasks = [managed.task for managed in running]
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return 1 if self.cause else 0

    def stop(self) -> None:
        """Shut down all processes: first the router, which finishes its requests."""
        self._should_stop.set()

    def set_specs(self, specs: Iterable[ProcessSpec]) -> None:
        """Replace the processes that can be started; running ones continue."""
        self._specs = specs_by_name(specs)

    async def start_engine(
        self, name: str, timeout_seconds: float | None = None, may_fail: bool = False
    ) -> None:
        """Start an engine and wait until it is ready.

        Args:
            name: name of the engine.
            timeout_seconds: time after which an engine that is not ready is ended; None for none.
            may_fail: True if its failure before it is ready does not end the other processes.

        Raises:
            ValueError: there is no such engine, it runs already, it has ended, it was not ready in
                time, or all processes are being ended.
        """
        spec = self._specs.get(name)
        if spec is None or spec.is_router:
            raise ValueError(f"there is no engine {name!r} on this node")
        if name in self._processes:
            raise ValueError(f"the engine {name!r} runs already")
        if self.is_stopping:
            raise ValueError(f"the engine {name!r} is not started, because all processes end")
        managed = self._start(spec, may_fail)
        ready = asyncio.create_task(self._wait_until_ready(managed))
        try:
            await asyncio.wait(
                {ready, managed.task},
                timeout=timeout_seconds,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if ready.done():
                return
            if managed.task.done():
                raise ValueError(
                    f"the engine {name!r} has ended before it was ready: {managed.cause}"
                )
            managed.process.end()
            await asyncio.shield(managed.task)
            raise ValueError(f"the engine {name!r} was not ready after {timeout_seconds} s")
        finally:
            ready.cancel()
            managed.may_fail = self._is_scaled

    async def drain_engine(self, name: str, may_fail: bool = False) -> None:
        """Drain an engine and wait until it has ended.

        Args:
            name: name of the engine.
            may_fail: True if an exit with an error, such as SIGKILL, does not end other processes.

        Raises:
            ValueError: no such engine runs.
        """
        managed = self._processes.get(name)
        if managed is None or managed.spec.is_router:
            raise ValueError(f"no engine {name!r} runs on this node")
        managed.may_fail = may_fail or self._is_scaled
        managed.process.end()
        await asyncio.shield(managed.task)

    def fail(self, cause: str) -> None:
        """Shut down all processes because of a failure; the first cause is recorded."""
        if not self.cause:
            self.cause = cause
            log.error("%s", cause)
        self.stop()

    def _on_signal(self, number: int) -> None:
        action = self._signals.on_signal(number, asyncio.get_running_loop().time())
        if action is StopAction.IGNORE:
            return
        if action is StopAction.KILL:
            log.warning("second signal: all processes are killed")
            for managed in self._processes.values():
                managed.process.kill()
            return
        log.info("%s: the router is drained, then the engines", signal.Signals(number).name)
        self.stop()

    def _start(self, spec: ProcessSpec, may_fail: bool = False) -> _ManagedProcess:
        process = self._launch(spec)
        task = asyncio.create_task(self._watch(spec.name, process))
        may_fail = may_fail or (self._is_scaled and not spec.is_router)
        managed = self._processes[spec.name] = _ManagedProcess(spec, process, task, may_fail)
        return managed

    async def _watch(self, name: str, process: RunningProcess) -> None:
        """Run a process until it ends; a failure that was not expected ends the others."""
        try:
            cause, has_failed = await run_to_end(process)
        except asyncio.CancelledError:
            # The event loop ends: `run` must not wait for the exit of a process without a watch.
            process.kill()
            raise
        finally:
            managed = self._processes.pop(name)
        spec = managed.spec
        managed.cause = f"{spec.title}: {cause}"
        if has_failed and not managed.may_fail:
            self.fail(managed.cause)
        elif has_failed:
            log.warning("%s", managed.cause)
        elif not process.is_ending:
            log.info("%s has ended", spec.title)
        if spec.is_router or not (self._processes or self._is_scaled):
            self.stop()

    async def _announce(self, processes: Sequence[_ManagedProcess]) -> None:
        for managed in processes:
            await self._wait_until_ready(managed)
        self._on_ready([managed.spec for managed in processes])

    async def _wait_until_ready(self, managed: _ManagedProcess) -> None:
        while not await managed.process.is_ready():
            await asyncio.sleep(self._probe_seconds)
