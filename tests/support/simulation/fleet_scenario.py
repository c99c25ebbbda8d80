"""One life of a fleet on the virtual clock: routers, engines, faults, and what must hold."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace

import zmq

from gllm.engine.interface import EngineUnavailableError
from gllm.messages.requests import PoisonRequestError
from gllm.messages.sampling import SequenceSamplingParams
from gllm.routing.policy_registry import POLICIES, make_policy
from gllm.runtime.messaging import connection_pool
from gllm.runtime.messaging.connection_pool import FleetLinkConfig
from tests.support.simulation.clock import VirtualLoop
from tests.support.simulation.fleet import LINKS, SimulatedEngine, SimulatedRouter
from tests.support.simulation.head import patched_runtime
from tests.support.simulation.network import Hub, Network, Spoke
from tests.support.simulation.process import Process
from tests.support.simulation.requests import Reader, draw_request
from tests.support.simulation.world import BOMB_TOKEN, POISON_TOKEN

SIMULATED_ZMQ = SimpleNamespace(ZMQError=OSError, MAX_SOCKETS=zmq.MAX_SOCKETS)
LAST_WAIT_SECONDS = 1200.0
"""Time after the last fault in which everything has to end."""


@dataclass
class FleetLimits:
    """Size of a scenario."""

    num_requests: int = 30
    """About as many arrive."""
    seconds: float = 60.0
    """Time in which they arrive and faults strike."""
    num_faults: int = 5
    num_engines: int | None = None
    """None: drawn."""
    num_routers: int | None = None
    """None: drawn."""
    has_bad_requests: bool | None = None
    """Requests that kill workers or machines; None: drawn."""
    is_rolling_restart: bool = False
    """Restart each engine in good order, one after the other, in place of faults."""
    has_flaps_only: bool = False
    """Only faults after which every request can go on: subsets of the engines that are silent or
    whose connections are cut for less than the time-out, at most two lost hosts, planned ends."""
    is_machine_lost: bool = False
    """In place of faults, all engines but one end at once, as on one machine."""


class FleetScenario:
    """Draws a life from a seed and plays it."""

    def __init__(self, seed: int, limits: FleetLimits) -> None:
        rng = self.rng = Random(seed)
        self.limits = limits
        self.loop = VirtualLoop()
        self.network = Network(self.loop, rng)
        self.faults: Counter[str] = Counter()
        self.end_time = 0.0
        num_engines = limits.num_engines or rng.choice([1, 2, 2, 3, 4])
        self.names = [f"engine-{number}" for number in range(num_engines)]
        kinds = rng.choice([(2,), (1,), (1, 2)])
        self.num_stages = {name: rng.choice(kinds) for name in self.names}
        """By name of the engine; an engine keeps it over its restarts."""
        num_routers = limits.num_routers or rng.choice([1, 1, 2])
        self.router_addresses = [f"127.0.0.1:{29700 + index}" for index in range(num_routers)]
        self.engine_addresses = {
            name: f"127.0.0.1:{30000 + index}" for index, name in enumerate(self.names)
        }
        self.do_routers_dial = rng.random() < 0.3
        self.policy = rng.choice(sorted(POLICIES))
        self.park_timeout = 120.0 if limits.has_flaps_only else rng.choice([5.0, 60.0])
        self.has_bad_requests = rng.random() < 0.2
        if limits.has_bad_requests is not None:
            self.has_bad_requests = limits.has_bad_requests
        self.engines: dict[str, SimulatedEngine] = {}
        """Latest start of each engine."""
        self.starts: list[SimulatedEngine] = []
        """All starts of engines."""
        self.routers: list[SimulatedRouter] = []
        """Latest start of each router."""
        self.all_routers: list[SimulatedRouter] = []
        self.lost_readers: list[Reader] = []
        """Those of routers that have died."""
        self.is_over = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_deaths(self) -> int:
        """Ends of workers and of engines, planned ones included."""
        return len(self.starts) + sum(each.node.num_deaths for each in self.starts)

    @property
    def readers(self) -> list[Reader]:
        """Those of living routers."""
        return [reader for router in self.routers for reader in router.readers]

    def play(self) -> None:
        """Play the life and check it.

        Raises:
            AssertionError: an invariant does not hold.
        """
        sockets = {"zmq": SIMULATED_ZMQ, "Hub": Hub, "Spoke": Spoke}
        sockets["create_context"] = lambda owner: LINKS.get()
        parts = [(connection_pool, name, part) for name, part in sockets.items()]
        with patched_runtime(self.loop, self.rng, parts):
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
        limits, rng = self.limits, self.rng
        start = self.loop.time()
        self.end_time = start + limits.seconds
        for index in range(len(self.router_addresses)):
            self.routers.append(self._start_router(index))
        for name in self.names:
            self._start_engine(name)
        restarts = None
        if limits.is_rolling_restart:
            restarts = self.loop.create_task(self._restart_all())
        else:
            self._draw_faults(start)
        while self.loop.time() < self.end_time or (restarts is not None and not restarts.done()):
            await asyncio.sleep(rng.expovariate(limits.num_requests / limits.seconds))
            self._submit(rng.choice(self.routers))
        await self._end_faults()
        await self._wait_until(lambda: all(router.is_idle for router in self.routers))
        await self._wait_until(self._is_whole)
        for router in self.routers:
            assert self._submit(router, is_last=True)
        await self._wait_until(lambda: all(router.is_idle for router in self.routers))
        await self._wait_until(self._is_unloaded)
        self.is_over = True
        for router in self.routers:
            await router.stop()
        for engine in self.engines.values():
            await engine.stop(0.0)
            assert not engine.node.workers, "processes are left"

    async def _wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = self.loop.time() + LAST_WAIT_SECONDS
        while not condition():
            if self.loop.errors:
                raise self.loop.errors[0]
            assert self.loop.time() < deadline, self._describe()
            await asyncio.sleep(0.5)

    def _is_whole(self) -> bool:
        """Return True if every engine is ready and attached to every router."""
        return all(
            self.engines[name].is_ready and router.attached == self.names
            for router in self.routers
            for name in self.names
        )

    def _is_unloaded(self) -> bool:
        """Return True if no engine computes a request any more."""
        return not any(each.supervisor.client.num_requests for each in self.engines.values())

    # Requests.

    def _submit(self, router: SimulatedRouter, is_last: bool = False) -> bool:
        """Submit a random request; return False if the router refuses it at present."""
        rng, fleet = self.rng, router.fleet
        first_token = None
        if self.has_bad_requests and not is_last and rng.random() < 0.1:
            first_token = rng.choice([POISON_TOKEN, BOMB_TOKEN])
        request = draw_request(rng, first_token)
        try:
            if not fleet.accepts_requests:
                fleet.check_ready()
            stream = fleet.client.submit(
                request.prompt,
                SequenceSamplingParams(),
                request.max_tokens,
                request.stop_ids,
                request.n,
                request.priority,
                session=rng.choice(["", "one", "two"]),
            )
        except EngineUnavailableError:
            assert not self.limits.is_rolling_restart
            return False
        except PoisonRequestError:
            assert first_token is not None or self.num_deaths > 2
            return True
        reader = Reader(stream, request)
        stream.set_listener(lambda: self._read(router, reader))
        router.readers.append(reader)
        if rng.random() < 0.1 and not is_last:
            self.loop.call_later(rng.uniform(0.0, 5.0), self._abort, router, reader)
        return True

    def _read(self, router: SimulatedRouter, reader: Reader) -> None:
        reader.read()
        if "unavailable" in reader.errors:
            # It was parked too long, and at this moment nobody can take it either.
            numerics = reader.stream.entry.numerics
            able = router.accepting_engines(numerics)
            assert not able, f"{able} could take {reader.request}"

    def _abort(self, router: SimulatedRouter, reader: Reader) -> None:
        reader.is_aborted = True
        if router.is_alive:
            router.fleet.client.abort_streams([reader.stream])

    # Processes.

    def _start_router(self, index: int) -> SimulatedRouter:
        address = self.router_addresses[index]
        router = SimulatedRouter(
            f"router {index}",
            self.network,
            make_policy(self.policy, Random(self.rng.random())),
            hub="off" if self.do_routers_dial else address,
            engines=tuple(self.engine_addresses.values()) if self.do_routers_dial else (),
            park_timeout=self.park_timeout,
            recovery_patience=self.rng.choice([0.0, 5.0]),
        )
        self.all_routers.append(router)
        return router

    def _start_engine(self, name: str) -> None:
        links = FleetLinkConfig(
            hub=self.engine_addresses[name] if self.do_routers_dial else None,
            dial=() if self.do_routers_dial else tuple(self.router_addresses),
        )
        engine = self.engines[name] = SimulatedEngine(
            name,
            self.num_stages[name],
            links,
            self.network,
            self.rng,
            lambda moment, process: self._on_moment(name, moment, process),
        )
        self.starts.append(engine)
        self._spawn(self._restart_after_end(engine))

    async def _restart_after_end(self, engine: SimulatedEngine) -> None:
        """Start an engine again when it has ended, as a service manager does."""
        await engine.has_ended.wait()
        delay = self.rng.choice([0.1, 2.0, 20.0]) if self.loop.time() < self.end_time else 0.1
        await asyncio.sleep(delay)
        if not self.is_over:
            self._start_engine(engine.name)

    async def _restart_all(self) -> None:
        """Restart each engine in good order."""
        for name in self.names:
            await self._wait_until(self._is_whole)
            await asyncio.sleep(self.rng.uniform(0.0, 3.0))
            self.faults["restarted"] += 1
            await self.engines[name].stop(drain_seconds=self.rng.choice([0.0, 0.5]))

    def _spawn(self, coroutine: object) -> None:
        self._tasks.append(self.loop.create_task(coroutine))  # type: ignore[arg-type]

    # Faults.

    def _draw_faults(self, start: float) -> None:
        faults = [
            self._kill_engine,
            self._kill_engine,
            self._kill_worker,
            self._stop_worker,
            self._separate,
            self._separate,
            self._cut,
            self._delay_frames,
            self._drain,
            self._restart,
            self._slow_down,
            self._kill_router,
        ]
        if self.limits.has_flaps_only:
            faults = [self._flap] * 4 + [self._cut, self._drain, self._restart, self._lose_host]
        if self.limits.is_machine_lost:
            self.loop.call_at(start + self.limits.seconds / 2, self._kill_machine)
            return
        for _ in range(self.limits.num_faults):
            when = start + self.rng.uniform(0.0, self.limits.seconds)
            self.loop.call_at(when, self.rng.choice(faults))

    async def _end_faults(self) -> None:
        """Let everything work again."""
        self.network.late_share = 0.0
        for engine in self.engines.values():
            for process in engine.workers:
                process.resume()
            for router in self.routers:
                self.network.unite(engine.process, router.process)
                # An operator lets all engines take requests again.
                if engine.name in router.attached:
                    router.fleet.undrain_engine(engine.name)

    def _on_moment(self, name: str, moment: str, process: Process) -> None:
        if moment == "poison":
            self.faults["poison"] += 1
            self._end_worker(self.engines[name], process)
        elif moment == "bomb":
            self.faults["bomb"] += 1
            self.engines[name].kill()

    def _any_engine(self) -> SimulatedEngine:
        return self.engines[self.rng.choice(self.names)]

    def _kill_engine(self) -> None:
        self.faults["engine killed"] += 1
        self._any_engine().kill()

    def _kill_machine(self) -> None:
        for name in self.rng.sample(self.names, len(self.names) - 1):
            self.faults["engine killed"] += 1
            self.engines[name].kill()

    def _kill_worker(self) -> None:
        engine = self._any_engine()
        if engine.workers:
            self.faults["worker killed"] += 1
            self._end_worker(engine, self.rng.choice(engine.workers))

    def _end_worker(self, engine: SimulatedEngine, process: Process) -> None:
        for sender, worker in list(engine.node.workers.items()):
            if worker.process is process:
                engine.node.kill(sender)

    def _stop_worker(self) -> None:
        engine = self._any_engine()
        if engine.workers:
            self.faults["worker stopped"] += 1
            process = self.rng.choice(engine.workers)
            process.stop()
            self.loop.call_later(self.rng.choice([0.1, 5.0, 30.0]), process.resume)

    def _separate(self) -> None:
        """Separate an engine from a router for some time; each may take the other for dead."""
        self.faults["partition"] += 1
        engine, router = self._any_engine().process, self.rng.choice(self.routers).process
        self.network.separate(engine, router)
        seconds = self.rng.choice([0.5, 4.0, 7.0, 30.0])
        self.loop.call_later(seconds, self.network.unite, engine, router)

    def _flap(self) -> None:
        """Separate a subset of the engines from all routers, one by one or at once."""
        self.faults["flap"] += 1
        seconds = self.rng.choice([0.5, 4.0, 7.0, 30.0])
        for name in self.rng.sample(self.names, self.rng.randint(1, len(self.names))):
            engine = self.engines[name].process
            late = self.rng.choice([0.0, 0.0, self.rng.uniform(0.0, 5.0)])
            for router in [router.process for router in self.routers]:
                if self.rng.random() < 0.2:
                    self._cut_sessions(engine, router)
                self.loop.call_later(late, self.network.separate, engine, router)
                self.loop.call_later(late + seconds, self.network.unite, engine, router)

    def _cut_sessions(self, engine: Process, router: Process) -> None:
        for connection in list(engine.connections):
            if router in {end.process for end in connection.ends}:
                connection.cut()

    def _lose_host(self) -> None:
        """Let a host vanish, so that nothing tells its end; at most twice."""
        if self.faults["host lost"] == 2:
            return
        self.faults["host lost"] += 1
        engine = self._any_engine()
        for router in self.routers:
            self.network.separate(engine.process, router.process)
        engine.kill()

    def _cut(self) -> None:
        """Cut a session between an engine and a router."""
        routers = {router.process for router in self.routers}
        connections = [
            connection
            for engine in self.engines.values()
            for connection in engine.process.connections
            if routers & {end.process for end in connection.ends}
        ]
        if connections:
            self.faults["cut"] += 1
            self.rng.choice(connections).cut()

    def _delay_frames(self) -> None:
        self.faults["late"] += 1
        self.network.late_share = self.rng.choice([0.01, 0.2])
        self.loop.call_later(self.rng.uniform(0.1, 10.0), self._end_delays)

    def _end_delays(self) -> None:
        self.network.late_share = 0.0

    def _drain(self) -> None:
        """Let a router drain an engine, with or without its running requests, and undrain it."""
        router = self.rng.choice(self.routers)
        if names := router.attached:
            self.faults["drained"] += 1
            name = self.rng.choice(names)
            router.fleet.drain_engine(name, migrates=self.rng.random() < 0.5)
            self.loop.call_later(self.rng.uniform(0.1, 10.0), self._undrain, router, name)

    def _undrain(self, router: SimulatedRouter, name: str) -> None:
        if router.is_alive and name in router.attached:
            router.fleet.undrain_engine(name)

    def _restart(self) -> None:
        engine = self._any_engine()
        if engine.is_alive:
            self.faults["restarted"] += 1
            self._spawn(engine.stop(drain_seconds=self.rng.choice([0.0, 5.0])))

    def _slow_down(self) -> None:
        """Let the workers of an engine take ten times as long for a while."""
        self.faults["slow"] += 1
        processes = self._any_engine().workers
        for process in processes:
            process.slowness *= 10.0
        self.loop.call_later(self.rng.uniform(1.0, 20.0), self._end_slowness, processes)

    def _end_slowness(self, processes: list[Process]) -> None:
        for process in processes:
            process.slowness /= 10.0

    def _kill_router(self) -> None:
        """Kill a router; its engines have to end its requests. Another one takes its place."""
        self.faults["router killed"] += 1
        index = self.rng.randrange(len(self.routers))
        router = self.routers[index]
        router.kill()
        self.lost_readers += router.readers
        self.routers[index] = self._start_router(index)

    # Checks.

    def _check(self) -> None:
        kinds = tuple(sorted(set(self.num_stages.values())))
        readers = self.readers + self.lost_readers
        exact = [reader for reader in readers if any(map(reader.is_output_of, kinds))]
        num_inexact = sum(
            each.fleet.client.numerics.num_inexact_migrations for each in self.all_routers
        )
        assert len(readers) - len(exact) <= num_inexact
        for reader in self.lost_readers:
            reader.check(kinds, is_cut_short=True)
        for reader in self.readers:
            reader.check(kinds)
            for kind in reader.errors:
                assert kind, f"an error without a kind: {reader.request}"
                assert kind != "poison" or reader.is_poison or self.num_deaths > 2

    def _describe(self) -> str:
        engines = {
            name: (engine.is_alive, engine.supervisor.state, engine.supervisor.client.num_requests)
            for name, engine in self.engines.items()
        }
        routers = [
            {row.name: row.state for row in router.fleet.engines()} for router in self.routers
        ]
        waiting = [
            (reader.request.prompt, reader.ends, reader.stream.entry)
            for reader in self.readers
            if not reader.is_done
        ]
        return f"{engines}, {routers}, waiting: {waiting}, faults: {self.faults}"
