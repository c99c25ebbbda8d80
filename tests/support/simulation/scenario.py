"""One life of an engine on the virtual clock: requests, faults, and what must hold."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from gllm.messages.requests import PoisonRequestError
from gllm.messages.sampling import SequenceSamplingParams
from gllm.observability.logs import DEFAULT_LOG_CONFIG
from gllm.runtime.head.supervisor import EngineError, Supervisor
from tests.support.simulation.clock import VirtualLoop
from tests.support.simulation.head import HEAD, create_supervisor, patched_runtime
from tests.support.simulation.network import Context, Network
from tests.support.simulation.node import SimulatedNode
from tests.support.simulation.process import Process
from tests.support.simulation.requests import Reader, draw_request
from tests.support.simulation.workers import Worker
from tests.support.simulation.world import LAYERS_PER_STAGE, POISON_TOKEN, World

MOMENTS = (
    "spawn",
    "connected",
    "loading",
    "initialize",
    "ready",
    "prefill",
    "decode",
    "closing",
    "closed",
)
LAST_WAIT_SECONDS = 1200.0
"""Time after the last fault in which everything has to end."""


@dataclass
class Limits:
    """Size of a scenario."""

    num_requests: int = 12
    seconds: float = 60.0
    """Time in which requests arrive and faults strike."""
    num_faults: int = 5
    """Those at random times; at moments of processes up to four times as many strike."""
    max_restarts: int | None = None
    """None: drawn."""
    degrees: tuple[int, ...] | None = None
    """Ranks of each stage; None: drawn."""
    poison_share: float = 0.2
    """Share of lives with requests that kill the stage that computes them."""
    slowdown: tuple[float, ...] | None = None
    """Factor on the times of each stage; None: drawn, with the other options of layers."""
    layers: str = "auto"
    num_standbys: int | None = None
    """None: drawn."""
    strikes: tuple[tuple[str, int, str], ...] = ()
    """Faults at given moments: name, number of its occurrence from 1, kill or stop. In place of
    those that are drawn."""


class Scenario:
    """Draws a life from a seed and plays it."""

    def __init__(self, seed: int, limits: Limits) -> None:
        self.rng = Random(seed)
        self.limits = limits
        self.loop = VirtualLoop()
        self.network = Network(self.loop, self.rng)
        self.world = World(self.loop, self.rng, self.network, self.on_moment)
        self.world.state_bytes = int(seed % 3 == 1)
        self.node = SimulatedNode(self.world)
        self.degrees = limits.degrees or self._draw_degrees()
        self.max_restarts = self.rng.choice([0, 3, 3, 50, 50, 50])
        if limits.max_restarts is not None:
            self.max_restarts = limits.max_restarts
        self.recovery_timeout = self.rng.choice([3.0, 60.0, 60.0])
        if limits.strikes or limits.slowdown:
            self.recovery_timeout = 600.0
        self.readers: list[Reader] = []
        self.faults: Counter[str] = Counter()
        self.rates = {moment: self.rng.choice([0.0, 0.0, 0.002, 0.05]) for moment in MOMENTS}
        """Probability of a fault at each moment of a process."""
        # Apart from the others, which stay as they are for each seed.
        self.rates["prepared"] = Random(seed + 1).choice([0.0, 0.0, 0.05, 0.2])
        self.rates["measuring"] = Random(seed).choice([0.0, 0.0, 0.05, 0.2])
        self.num_moments: Counter[str] = Counter()
        self.num_start_deaths = 0
        """Ends of processes before the engine was ready: workers may end after measuring."""
        self.num_served_deaths = 0
        """Ends of processes before the engine was stopped."""
        self.has_poison = self.rng.random() < limits.poison_share
        self.poison_token = POISON_TOKEN
        """First token of the prompts of poison requests."""
        self.end_time = 0.0
        self.has_been_overdue = False
        """True if requests ended because a recovery took too long."""
        self.supervisor: Supervisor
        """Of the life that is played."""

    def play(self) -> None:
        """Play the life and check it.

        Raises:
            AssertionError: an invariant does not hold.
        """
        with self._patched():
            self.supervisor = self._create_supervisor()
            try:
                self.loop.run_until_complete(self._run())
            finally:
                for task in asyncio.all_tasks(self.loop):
                    task.cancel()
                self.loop.close()
        if self.loop.errors:
            raise self.loop.errors[0]
        self._check()

    async def _run(self) -> None:
        start = self.loop.time()
        self.end_time = start + self.limits.seconds
        self._draw_faults(start)
        try:
            await asyncio.wait_for(self._start(), LAST_WAIT_SECONDS + self.limits.seconds)
        except EngineError:
            assert self.supervisor.state == "dead"
            await self._wait_for_machines()
            return
        self.num_start_deaths = self.num_deaths
        while self.loop.time() < self.end_time and len(self.readers) < self.limits.num_requests:
            await asyncio.sleep(
                self.rng.expovariate(self.limits.num_requests / self.limits.seconds)
            )
            self._submit()
        await asyncio.sleep(max(0.0, self.end_time - self.loop.time()))
        self.end_faults()
        deadline = self.loop.time() + LAST_WAIT_SECONDS
        while not all(reader.is_done for reader in self.readers) or self.supervisor.state in (
            "loading",
            "recovering",
        ):
            assert self.loop.time() < deadline, self._describe()
            await asyncio.sleep(0.5)
        if self.supervisor.state == "ready":
            await self._submit_last(deadline)
        self.num_served_deaths = self.num_deaths
        await self.supervisor.stop()
        await self._wait_for_machines()
        assert not self._workers(), "processes are left"
        bounds = [0, *(part.stop for part in self.supervisor.planner.layers)]
        assert bounds[-1] == LAYERS_PER_STAGE * len(self.degrees)
        assert bounds == sorted(set(bounds)), "a stage has no layer"

    async def _start(self) -> None:
        await self.supervisor.start(Path("demo"), self.node, DEFAULT_LOG_CONFIG)

    async def _wait_for_machines(self) -> None:
        """Wait until other machines have heard of the end."""

    def end_faults(self) -> None:
        """Let what is stopped for a short time go on; no fault strikes any more."""
        self.network.late_share = 0.0
        if not self.limits.strikes:
            for worker in self._workers().values():
                worker.process.resume()

    def _workers(self) -> dict[int, Worker]:
        """Return the workers of all machines that have not been reaped."""
        return self.node.workers

    def _kill_worker(self, sender: int) -> None:
        self.node.kill(sender)

    async def _submit_last(self, deadline: float) -> None:
        """Check that the engine serves after all faults."""
        self._submit(is_last=True)
        while not self.readers[-1].is_done:
            assert self.loop.time() < deadline, self._describe()
            await asyncio.sleep(0.1)

    def _submit(self, is_last: bool = False) -> None:
        rng, supervisor = self.rng, self.supervisor
        # As in PipelineBackend.accepts_requests.
        if supervisor.state not in ("ready", "recovering") or supervisor.is_recovery_overdue:
            return
        is_poison = self.has_poison and rng.random() < 0.15 and not is_last
        request = draw_request(rng, self.poison_token if is_poison else None)
        try:
            stream = supervisor.client.submit(
                request.prompt,
                SequenceSamplingParams(),
                request.max_tokens,
                request.stop_ids,
                request.n,
                request.priority,
            )
        except PoisonRequestError:
            assert is_poison or self.num_deaths > 2
            return
        reader = Reader(stream, request)
        stream.set_listener(lambda: self._read(reader))
        self.readers.append(reader)
        if rng.random() < 0.1 and not is_last:
            self.loop.call_later(rng.uniform(0.0, 5.0), self._abort, reader)

    def _read(self, reader: Reader) -> None:
        reader.read()
        if "unavailable" in reader.errors:
            self.has_been_overdue |= self.supervisor.is_recovery_overdue

    def _abort(self, reader: Reader) -> None:
        reader.is_aborted = True
        self.supervisor.client.abort_streams([reader.stream])

    # Faults.

    def _draw_faults(self, start: float) -> None:
        """Draw faults at random times; others strike at moments of processes."""
        rng = self.rng
        for _ in range(self.limits.num_faults):
            when = start + rng.uniform(0.0, self.limits.seconds)
            fault = rng.choice([self._kill, self._kill, self._stop, self._cut, self._delay_frames])
            self.loop.call_at(when, fault)

    @property
    def num_deaths(self) -> int:
        return self.node.num_deaths

    def on_moment(self, moment: str, process: Process) -> None:
        if moment == "poison":
            self._end(process, "poison")
            return
        self.num_moments[moment] += 1
        for name, number, kind in self.limits.strikes:
            if (name, number) == (moment, self.num_moments[moment]):
                self._strike(process, moment, kind)
        if self.limits.strikes or self.loop.time() > self.end_time:
            return
        if self.faults.total() >= 4 * self.limits.num_faults:
            return
        if self.rng.random() < self.rates[moment]:
            self._strike(process, moment, "kill" if self.rng.random() < 0.7 else "stop")

    def _strike(self, process: Process, moment: str, kind: str) -> None:
        if kind == "kill":
            self._end(process, moment)
        else:
            self._freeze(process, moment)

    def _victims(self) -> list[Process]:
        return [each.process for each in self._workers().values() if each.process.is_alive]

    def _kill(self) -> None:
        if victims := self._victims():
            self._end(self.rng.choice(victims), "time")

    def _stop(self) -> None:
        if victims := self._victims():
            self._freeze(self.rng.choice(victims), "time")

    def _cut(self) -> None:
        """Cut a connection between living processes."""
        connections = [each for process in self._victims() for each in process.connections]
        if connections:
            self.faults["cut"] += 1
            self.rng.choice(connections).cut()

    def _delay_frames(self) -> None:
        self.faults["late"] += 1
        self.network.late_share = self.rng.choice([0.01, 0.2])
        self.loop.call_later(self.rng.uniform(0.1, 10.0), self._end_delays)

    def _end_delays(self) -> None:
        self.network.late_share = 0.0

    def _end(self, process: Process, moment: str) -> None:
        """Kill a process."""
        self.faults[f"killed at {moment}"] += 1
        sender = next(
            (s for s, worker in self._workers().items() if worker.process is process), None
        )
        if sender is None:
            process.end(is_killed=True)
        else:
            self._kill_worker(sender)

    def _freeze(self, process: Process, moment: str) -> None:
        self.faults[f"stopped at {moment}"] += 1
        process.stop()
        # After this time no detector may have found it.
        seconds = 1000.0 if self.limits.strikes else self.rng.choice([0.1, 5.0, 30.0])
        self.loop.call_later(seconds, process.resume)

    # Checks.

    def _check(self) -> None:
        for reader in self.readers:
            reader.check(self._stage_counts(), can_end=self._can_poison_end())
            for kind in reader.errors:
                self._check_error(kind)

    def _can_poison_end(self) -> bool:
        """Return True if there may have been an engine that no poison request kills."""
        return False

    def _stage_counts(self) -> tuple[int, ...]:
        """Return the numbers of stages that the engine has had."""
        return (len(self.degrees),)

    def _check_error(self, kind: str) -> None:
        """Check that there was a reason for an error."""
        if kind == "poison":
            assert self.num_deaths > 2
        elif kind == "unavailable":
            assert self.has_been_overdue
        else:
            assert self.supervisor.cause, self._describe()
            assert self.num_deaths > self.max_restarts

    def _describe(self) -> str:
        waiting = [
            (reader.request.prompt, reader.ends, reader.stream.entry.seqs)
            for reader in self.readers
            if not reader.is_done
        ]
        return (
            f"{self.supervisor.state}, {self.supervisor.state_cause}, "
            f"{self.supervisor.recovery.placement}, waiting: {waiting}, faults: {self.faults}"
        )

    # Setup.

    def _draw_degrees(self) -> tuple[int, ...]:
        num_stages = self.rng.randint(1, 4)
        return tuple(self.rng.choice([1, 1, 1, 2, 3]) for _ in range(num_stages))

    def _create_supervisor(self) -> Supervisor:
        return create_supervisor(
            self.degrees,
            max_num_seqs=self.rng.choice([2, 8]),
            max_restarts=self.max_restarts,
            recovery_timeout=self.recovery_timeout,
            standby_workers=self._draw_standbys(),
            **self.draw_layers(),
            **self._more_options(),
        )

    def _draw_standbys(self) -> int:
        if self.limits.num_standbys is not None:
            return self.limits.num_standbys
        return 0 if self.limits.strikes else self.rng.choice([0, 0, 1, 2])

    def _more_options(self) -> dict[str, Any]:
        """Return further options of `create_supervisor`."""
        return {}

    def draw_layers(self) -> dict[str, Any]:
        """Draw the options by which layers are divided."""
        limits = self.limits
        if limits.slowdown is not None:
            return {"debug_slowdown": limits.slowdown, "layers": limits.layers, "rebalance": True}
        if limits.strikes or self.rng.random() < 0.5:
            return {}
        slowdown = [self.rng.choice([1.0, 1.0, 2.0, 6.0]) for _ in self.degrees]
        layers = self.rng.choice(["auto", "auto", "even"])
        return {"debug_slowdown": slowdown, "layers": layers, "rebalance": True}

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """Replace sockets, the clock and files."""
        with patched_runtime(self.loop, self.rng):
            HEAD.set(Context(self.network, Process(self.loop, "head")))
            yield
