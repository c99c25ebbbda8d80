"""Cluster in simulated time: engines, their failures, drains and starts, queue and router."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import tee
from typing import TYPE_CHECKING, NamedTuple

from gllm.observability.step_log import StepLogEvent
from gllm.routing.rounds import PlacementRounds
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.cluster.engine import (
    ClusterEngine,
    ClusterEngineState,
    EngineRun,
)
from gllm.sim.cluster.handoffs import KvTransfer, KvTransfers
from gllm.sim.cluster.requests import ClusterRequest, Submission, join_submissions
from gllm.sim.cluster.router import ClusterRouter
from gllm.sim.deployment import Deployment
from gllm.sim.event_loop import ABORT, ARRIVAL, EventLoop
from gllm.sim.metrics.run_record import ServedRequest
from gllm.sim.pipeline import PipelineLinks
from gllm.sim.workloads.requests import WorkloadRequest, iterate_scheduler_requests

if TYPE_CHECKING:
    from gllm.sim.cluster.paired import PairedCluster


@dataclass(frozen=True)
class EngineChange:
    """Base of scheduled failures, drains and starts: an engine's name and the time of the change.

    Raises:
        ValueError: A time is negative or infinite.
    """

    engine: str
    """Name of the engine."""
    time: float
    """Time of the change, in seconds from the start of the simulation."""

    def __post_init__(self) -> None:
        """Check the times."""
        for name, value in vars(self).items():
            if isinstance(value, float | int) and not 0 <= value < float("inf"):
                raise ValueError(
                    f"{type(self).__name__}: {name} is {value}, but must be at least 0 seconds"
                )


@dataclass(frozen=True)
class EngineFailure(EngineChange):
    """Scheduled crash of an engine, which loses its running requests and its KV cache.

    A crash of an engine that has already stopped has no effect.

    Raises:
        ValueError: A time is negative or infinite.
    """

    detection_seconds: float = 0.0
    """Time until the router detects the crash. Until then it may send requests to the engine; these
    and the unfinished ones are then routed again with their output so far."""
    restart_seconds: float | None = None
    """Time from the detection until the restarted engine is ready, with an empty cache; None if it
    does not restart."""


@dataclass(frozen=True)
class EngineDrain(EngineChange):
    """Scheduled drain of an engine: it gets no new requests and stops when all have finished.

    Raises:
        ValueError: The time is negative or infinite.
    """

    migrates: bool = False
    """True to move the engine's unfinished requests to other engines at once, with their output so
    far."""


@dataclass(frozen=True)
class EngineStart(EngineChange):
    """Scheduled start of a new engine, or restart of a stopped one.

    Raises:
        ValueError: A time is negative or infinite.
    """

    startup_seconds: float = 0.0
    """Time from the start until the engine accepts requests."""
    deployment: Deployment | None = None
    """Model, costs and configuration; None to restart an engine with its former deployment."""


ClusterChange = EngineFailure | EngineDrain | EngineStart


def sort_changes(engines: Iterable[str], changes: Iterable[ClusterChange]) -> list[ClusterChange]:
    """Sort engine changes by time and check that each names an engine that exists by then.

    Changes at the same time keep their order.

    Args:
        engines: Names of the engines that exist at the start of the simulation.
        changes: Failures, drains and starts, in any order.

    Raises:
        ValueError: A change names an engine that does not exist at its time.
    """
    ordered: Sequence[ClusterChange] = sorted(changes, key=lambda change: change.time)
    known = set(engines)
    for change in ordered:
        if isinstance(change, EngineStart) and change.deployment is not None:
            known.add(change.engine)
        if change.engine not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ValueError(
                f"{type(change).__name__} at {change.time} s: engine {change.engine!r} is none of "
                f"{names}: start it earlier with a deployment"
            )
    return list(ordered)


LogOpener = Callable[[str], Callable[[StepLogEvent], None]]
"""Returns the receiver of an engine's step log, by the name of the engine."""


class ClusterRun(NamedTuple):
    """Result of a cluster simulation: a record per engine and per request."""

    engines: dict[str, EngineRun]
    """Results of each engine by engine name."""
    requests: dict[int, ServedRequest]
    """Record of each request that reached an engine, by position in the workload. A request that
    several engines served has one timeline, as its client saw it."""
    unserved: list[int]
    """Positions in the workload of the requests that still wait in the central queue at the end."""

    def busy_seconds(self) -> float:
        """Return the seconds of computation, summed over all stages of all engines."""
        return sum(
            usage.busy for engine in self.engines.values() for usage in engine.record.stage_usages()
        )


class _LifeEvent(NamedTuple):
    """Event of one life of an engine; stale once another one has begun."""

    engine: ClusterEngine
    life: int
    """Number of lives when the event was made."""

    @property
    def is_stale(self) -> bool:
        """True if the engine has started again since the event was made."""
        return len(self.engine.lives) != self.life


class SimulatedCluster:
    """Simulates several engines behind a router, including crashes, drains and starts of engines.

    Unless the router can hold requests in a central queue, each engine processes its events in a
    child event loop of its own, which is faster.

    Args:
        router: Chooses the engine of each request.
        loop: Event loop with the simulated clock; default: a new one. Network links that engines
            share must use it.
        open_log: Returns the writer of an engine's step log by the engine's name; None: no logs.
    """

    def __init__(
        self,
        router: ClusterRouter,
        loop: EventLoop | None = None,
        open_log: LogOpener | None = None,
    ) -> None:
        self.loop = loop or EventLoop()
        self.engines: dict[str, ClusterEngine] = {}
        self.transfers = KvTransfers(self._on_transfer_end)
        self._router = router
        self._rounds = PlacementRounds(router.heartbeat_seconds, router.keeps_order)
        self._has_round_event = False
        """True while the event of the next heartbeat is due."""
        self._open_log = open_log
        self._kv_listener: PairedCluster | None = None
        self._routable: list[ClusterEngine] = []
        """Engines that the router takes for ready."""
        self._min_model_len = 0
        """Tokens that each routable engine can hold."""
        self._queue: list[tuple[tuple[float, ...], ClusterRequest]] = []
        """Heap of the requests that no engine has, by rank."""
        self._submissions: list[Submission] = []
        """By sequence. Ids count up over all engines, so that each request of a scheduler has a
        greater id than the ones before."""
        self._num_requests = 0

    # Engines.

    def add_engine(
        self,
        name: str,
        deployment: Deployment,
        startup_seconds: float = 0.0,
        links: PipelineLinks | None = None,
        role: str = "mixed",
    ) -> None:
        """Add an engine to the cluster and start it at the current simulated time.

        Args:
            name: Name of the engine.
            deployment: Model, cost model and scheduler configuration.
            startup_seconds: Time until the engine accepts requests.
            links: Network links shared with other engines, in the cluster's event loop; default:
                links of its own.
            role: prefill, decode or mixed (both); read only by policies that choose pairs of
                engines.

        Raises:
            ValueError: There is an engine of that name.
        """
        if name in self.engines:
            raise ValueError(f"there is an engine {name!r}: choose another name")
        log = None if self._open_log is None else self._open_log(name)
        shares_loop = links is not None or self._router.lets_wait
        loop = self.loop if shares_loop else self.loop.make_child()
        engine = self.engines[name] = ClusterEngine(
            name, deployment, loop, self._router.needs, self, links, log, role, self._kv_listener
        )
        self._start_up(engine, startup_seconds)

    def apply_each(self, changes: Iterable[ClusterChange]) -> None:
        """Schedule crashes, drains and starts of engines at their times.

        Args:
            changes: The changes, in any order.

        Raises:
            ValueError: A change names an engine that does not exist at its time.
        """
        for change in sort_changes(self.engines, changes):
            self.loop.push(change.time, ABORT, self._apply, change)

    def start_transfer(self, transfer: KvTransfer) -> bool:
        """Start a transfer of KV blocks; return False if one of its engines is not running.

        Raises:
            ValueError: The transfer has no byte, or an engine does not exist.
        """
        for name in (transfer.source, transfer.target):
            if name not in self.engines:
                raise ValueError(f"engine {name!r} is none of {', '.join(self.engines)}")
            if self.engines[name].state is not ClusterEngineState.READY:
                return False
        self.transfers.start(transfer)
        return True

    def _apply(self, now: float, change: ClusterChange) -> None:
        match change:
            case EngineStart(engine=name, deployment=deployment):
                if name not in self.engines:
                    assert deployment is not None
                    self.add_engine(name, deployment, change.startup_seconds)
                else:
                    self.engines[name].start(deployment, now)
                    self._start_up(self.engines[name], change.startup_seconds)
            case EngineDrain(engine=name):
                self._drain(self.engines[name], change.migrates, now)
            case EngineFailure(engine=name):
                if self.engines[name].fail(now):
                    self.transfers.on_engine_dead(name)
                    detected_time = now + change.detection_seconds
                    self.loop.push(detected_time, ABORT, self._on_detected, change)

    def _start_up(self, engine: ClusterEngine, startup_seconds: float) -> None:
        event = _LifeEvent(engine, len(engine.lives))
        if not startup_seconds:
            self._on_started(self.loop.now, event)
            return
        self.loop.push(self.loop.now + startup_seconds, ABORT, self._on_started, event)

    def _on_started(self, now: float, event: _LifeEvent) -> None:
        engine = event.engine
        if event.is_stale or engine.state is not ClusterEngineState.STARTING:
            return
        engine.become_ready(now)
        self._update_routable()
        self._offer_queue(engine, now)

    def _on_detected(self, now: float, failure: EngineFailure) -> None:
        """End a lost engine for the router, route its requests again and start it again."""
        engine = self.engines[failure.engine]
        is_draining = engine.is_draining
        self._end(engine, now)
        if failure.restart_seconds is not None and not is_draining:
            engine.start(None, now)
            self._start_up(engine, failure.restart_seconds)

    def _drain(self, engine: ClusterEngine, migrates: bool, now: float) -> None:
        if engine.state is ClusterEngineState.STOPPED:
            return
        engine.is_draining = True
        self._update_routable()
        if engine.state is ClusterEngineState.LOST:
            return
        if migrates:
            self._end(engine, now)
        else:
            self._end_if_drained(engine, now)

    def _end_if_drained(self, engine: ClusterEngine, now: float) -> None:
        """End a draining engine that has no requests and no transfers, behind this event."""
        if (
            engine.is_draining
            and not engine.requests
            and not self.transfers.has_transfer_of(engine.name)
        ):
            # The pipeline may be in the middle of a commit.
            event = _LifeEvent(engine, len(engine.lives))
            engine.loop.push(now, ABORT, self._on_drained, event)

    def _on_drained(self, now: float, event: _LifeEvent) -> None:
        states = ClusterEngineState.STARTING, ClusterEngineState.READY
        if not event.is_stale and event.engine.state in states:
            self._end(event.engine, now)

    def _end(self, engine: ClusterEngine, now: float) -> None:
        """End an engine and route its unfinished requests again."""
        requests = engine.stop(now)
        self._update_routable()
        self._router.on_engine_lost(engine.name)
        self.transfers.on_engine_dead(engine.name)
        self.transfers.on_engine_death_detected(engine.name, now)
        for request in requests:
            request.is_moved = True
            self._dispatch(request, now)

    def _update_routable(self) -> None:
        self._routable = [engine for engine in self.engines.values() if engine.is_routable]
        lengths = (engine.config.max_model_len for engine in self._routable)
        self._min_model_len = min(lengths, default=0)

    # Requests.

    def submit_each(self, jobs: Iterable[WorkloadRequest]) -> None:
        """Route the requests of a workload as they arrive.

        Args:
            jobs: Sorted by time. May be a generator: only the next requests are in memory, one or
                `num_routed_in_a_row` of the router.

        Raises:
            ValueError: A request arrives before the previous one (raised by `run` for later ones).
        """
        router = self._router
        num_in_a_row = 1 if router.reads_engines else router.num_routed_in_a_row
        self.loop.push_each(_with_requests(jobs), ARRIVAL, self._on_arrival, num_in_a_row)

    def _on_arrival(self, now: float, arrival: tuple[WorkloadRequest, SchedulerRequest]) -> None:
        job, request = arrival
        new = ClusterRequest(self._num_requests, job, request, now)
        self._num_requests += 1
        self._dispatch(new, now)

    def _dispatch(self, request: ClusterRequest, now: float) -> None:
        """Send a request to the engine that the router chooses, or let it wait."""
        engines = self._routable
        if request.num_tokens > self._min_model_len:
            engines = self._able_engines(request)
        for engine in engines:
            engine.run_before_arrival(now)
        rounds = self._rounds
        is_held = bool(engines) and not request.is_moved and rounds.holds(bool(self._queue), now)
        name = None if is_held else self._router.route(request, engines, now)
        if name is not None:
            rounds.begin(now)
            self._submit(self._find_engine(name, engines), request, now)
            return
        heappush(self._queue, (self._rank(request), request))
        if not is_held:
            is_held = rounds.on_unplaced() and bool(engines)
        rounds.num_held += is_held
        if now < rounds.next_time and not self._has_round_event:
            self._has_round_event = True
            self.loop.push(rounds.next_time, ARRIVAL, self._run_round, None)

    def _rank(self, request: ClusterRequest) -> tuple[float, ...]:
        """Return the place of a waiting request among those that are placed together."""
        num_tokens = len(request.request.prompt_token_ids) + request.num_output_tokens
        priority, arrival = request.request.priority, request.arrival_time
        return *self._rounds.rank(priority, num_tokens, arrival), request.index

    def _submit(self, engine: ClusterEngine, request: ClusterRequest, now: float) -> None:
        engine.submit(request, self._submissions, now)

    def _able_engines(self, request: ClusterRequest) -> list[ClusterEngine]:
        """Return the routable engines that can run a request.

        Raises:
            ValueError: There are engines, but none of them, routable or not, can run it.
        """
        able = [engine for engine in self.engines.values() if _can_run(engine, request)]
        if self.engines and not able:
            longest = max(engine.config.max_model_len for engine in self.engines.values())
            raise ValueError(
                f"the workload has a request of {request.num_tokens} tokens, but the largest "
                f"max_model_len is {longest}: raise it or choose another workload"
            )
        return [engine for engine in able if engine.is_routable]

    def _find_engine(self, name: str, engines: Iterable[ClusterEngine]) -> ClusterEngine:
        engine = self.engines.get(name)
        if engine is None or engine not in engines:
            names = ", ".join(routable.name for routable in engines) or "none"
            raise ValueError(f"the router chose {name!r}, which is none of {names}")
        return engine

    def _on_transfer_end(self, transfer: KvTransfer, now: float) -> None:
        for name in dict.fromkeys((transfer.source, transfer.target)):
            self._end_if_drained(self.engines[name], now)

    # Listener of the engines.

    def on_finished(self, engine: ClusterEngine, request: ClusterRequest, now: float) -> None:
        """Notify the router, and stop the engine if this was the last request of a drain."""
        self._router.on_finished(request.request, now)
        self._end_if_drained(engine, now)

    def on_changed(self, engine: ClusterEngine, now: float) -> None:
        """Try to send requests of the central queue to an engine whose load has changed."""
        if engine.loop is self.loop and self._router.lets_wait:
            self._offer_queue(engine, now)

    def _offer_queue(self, engine: ClusterEngine, now: float) -> None:
        """Offer the waiting requests to an engine, behind the events of this moment."""
        if self._queue and engine.is_routable and not engine.has_pull_event:
            engine.has_pull_event = True
            self.loop.push(now, ARRIVAL, self._pull, engine)

    def _pull(self, now: float, engine: ClusterEngine) -> None:
        """Send waiting requests to an engine, as many as the router permits."""
        engine.has_pull_event = False
        if self._rounds.heartbeat_seconds:
            self._place_waiting(now)
            return
        self._rounds.begin(now)
        others = []
        while self._queue and engine.is_routable:
            item = heappop(self._queue)
            request = item[1]
            if not _can_run(engine, request):
                others.append(item)
                continue
            name = self._router.route(request, [engine], now)
            if name is None:
                others.append(item)
                break
            self._submit(self._find_engine(name, [engine]), request, now)
        if others:
            self._queue += others
            heapify(self._queue)
        if self._queue:
            self._rounds.on_unplaced()

    def _run_round(self, now: float, _: None) -> None:
        """Route the requests of a heartbeat."""
        self._has_round_event = False
        self._place_waiting(now)

    def _place_waiting(self, now: float) -> None:
        """Route all waiting requests over all engines, in the order of their ranks."""
        waiting, self._queue = sorted(self._queue), []
        self._rounds.begin(now)
        for item in waiting:
            engines = self._able_engines(item[1])
            name = self._router.route(item[1], engines, now)
            if name is None:
                heappush(self._queue, item)
            else:
                self._submit(self._find_engine(name, engines), item[1], now)

    # Results.

    def run(self) -> ClusterRun:
        """Run the simulation to its end and return the records of engines and requests."""
        self.loop.run()
        engines = {name: engine.run(self._submissions) for name, engine in self.engines.items()}
        records = (record.requests for engine in self.engines.values() for record in engine.records)
        joined = join_submissions(records, self._submissions)
        return ClusterRun(
            engines,
            {index: served for index, (_, served) in joined.items()},
            sorted(request.index for _, request in self._queue),
        )


def _can_run(engine: ClusterEngine, request: ClusterRequest) -> bool:
    return request.num_tokens <= engine.config.max_model_len


def _with_requests(
    jobs: Iterable[WorkloadRequest],
) -> Iterator[tuple[float, tuple[WorkloadRequest, SchedulerRequest]]]:
    """Yield the time, the row of the workload and the scheduler's request of each arrival."""
    rows, sources = tee(jobs)
    for job, (time, request) in zip(rows, iterate_scheduler_requests(sources), strict=True):
        yield time, (job, request)


def simulate_cluster(
    deployments: Mapping[str, Deployment],
    jobs: Iterable[WorkloadRequest],
    router: ClusterRouter,
    changes: Iterable[ClusterChange] = (),
    open_log: LogOpener | None = None,
    check: Callable[[], None] | None = None,
) -> ClusterRun:
    """Simulate a workload on several engines behind a router and return the records of the run.

    Args:
        deployments: Model, cost model and configuration of each engine by name; all are ready at
            time 0.
        jobs: Requests sorted by arrival time; may be a generator.
        router: Chooses the engine of each request; must be new.
        changes: Scheduled crashes, drains and starts of engines.
        open_log: Returns the writer of an engine's step log by the engine's name; None: no logs.
        check: Called now and then; an error that it raises ends the simulation.

    Raises:
        ValueError: The workload is not sorted, a request is too long for every engine, or a change
            names an engine that does not exist at its time.
    """
    cluster = SimulatedCluster(router, EventLoop(check=check), open_log)
    for name, deployment in deployments.items():
        cluster.add_engine(name, deployment)
    cluster.apply_each(changes)
    cluster.submit_each(jobs)
    return cluster.run()
