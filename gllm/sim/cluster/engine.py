"""One engine of a simulated cluster: its states, its epochs and its unfinished requests."""

from collections.abc import Callable, Container
from enum import Enum
from heapq import heappop, heappush, heapreplace
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from gllm.observability.step_log import RestartEvent, StepLogEvent
from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_transfers import KvFetch
from gllm.scheduler.plan import SchedulerStats
from gllm.sim.cluster.epoch import EngineEpoch
from gllm.sim.cluster.requests import ClusterRequest, Submission, join_submissions
from gllm.sim.cluster.router import RouterNeeds
from gllm.sim.costs.base import CostModel
from gllm.sim.deployment import Deployment
from gllm.sim.event_loop import ABORT, EventLoop
from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.pipeline import ROUNDING_SECONDS, PipelineLinks, SimulatedPipeline

if TYPE_CHECKING:
    from gllm.sim.cluster.cluster import SimulatedCluster
    from gllm.sim.cluster.paired import PairedCluster


class FinishTimeBounds:
    """Lower bounds of the times at which an engine's unfinished requests can finish.

    A request that has n tokens to generate takes at least n passes through all stages. Batches are
    processed first come, first served, so later arrivals can only delay it. An engine need not be
    simulated up to an arrival as long as none of its requests can finish before it.

    Args:
        cost: Predicts the step times of the engine.
        num_stages: Number of pipeline stages.
    """

    def __init__(self, cost: CostModel, num_stages: int) -> None:
        least = [cost.min_stage_seconds(stage) for stage in range(num_stages)]
        self._token_seconds = sum(max(0.0, seconds - ROUNDING_SECONDS) for seconds in least)
        """Least time between two tokens of a request."""
        self._heap: list[tuple[float, int]] = []
        """Lower bounds and sequences. A bound holds for good, but later ones are higher."""

    @property
    def time(self) -> float:
        """Lower bound of the time at which the next request finishes; infinite without requests."""
        return self._heap[0][0] if self._heap else inf

    def add(self, seq: int, num_tokens: int, now: float) -> None:
        """Add a request that arrives now, with `num_tokens` tokens to generate."""
        heappush(self._heap, (now + num_tokens * self._token_seconds, seq))

    def update(self, pipeline: SimulatedPipeline, unfinished: Container[int], now: float) -> None:
        """Raise the lower bound `time` according to the current state of the pipeline.

        Args:
            pipeline: The pipeline, with all events before `now` processed.
            unfinished: Ids of the unfinished sequences.
            now: Time in seconds.
        """
        heap, commits = self._heap, None
        while heap:
            known, seq = heap[0]
            if seq not in unfinished:
                heappop(heap)
                continue
            if commits is None:
                commits = pipeline.earliest_commits(now)
            begin = next((time for time, batch in commits if seq in batch.seqs), now)
            num_tokens = pipeline.scheduler.table.sequences[seq].num_unscheduled_tokens
            bound = begin + num_tokens * self._token_seconds
            # The first one that cannot be raised is the least of all bounds of this time.
            if bound <= max(known, now):
                return
            heapreplace(heap, (bound, seq))


class ClusterEngineState(Enum):
    """State of a simulated engine: starting, ready, crashed but undetected, or stopped."""

    STARTING = "starting"
    READY = "ready"
    LOST = "lost"
    """Crashed; the router has not detected it yet."""
    STOPPED = "stopped"


class EngineLife(NamedTuple):
    """Timestamps of one run of an engine: start, ready and end, in seconds; None if not reached."""

    start_time: float
    """Time of the start, from which its devices are in use."""
    ready_time: float | None = None
    end_time: float | None = None


class EngineRun(NamedTuple):
    """Simulation results of one engine: requests, micro-batches, statistics and uptimes."""

    record: RunRecord
    """Requests and micro-batches over all starts of the engine. A request that was lost and came
    back to the engine is one request."""
    stats: SchedulerStats
    """Scheduler statistics at the end of the run, counted since the engine's latest start."""
    lives: list[EngineLife]
    """Times of each start, readiness and end of the engine."""


class ClusterEngine:
    """One engine of a simulated cluster: takes requests, can crash, drain, stop and start again.

    Args:
        name: Name of the engine, unique in the cluster.
        deployment: Model, cost model and scheduler configuration.
        loop: Event loop of the cluster, or a child loop for this engine alone.
        needs: Parts of the engine's state that the router reads; others are not computed.
        listener: Cluster that is notified of finished and admitted requests.
        links: Network links between the stages that other engines share; None: links of its own.
        log: Receives the step log events of all starts of the engine; None: no log.
        role: prefill, decode or mixed (both).
        kv_listener: Cluster that transfers KV cache between engines; None: no transfers.
    """

    def __init__(
        self,
        name: str,
        deployment: Deployment,
        loop: EventLoop,
        needs: RouterNeeds,
        listener: "SimulatedCluster",
        links: PipelineLinks | None = None,
        log: Callable[[StepLogEvent], None] | None = None,
        role: str = "mixed",
        kv_listener: "PairedCluster | None" = None,
    ) -> None:
        self.name = name
        self.role = role
        """Label that pair policies read; it may change at any time."""
        self.deployment = deployment
        self.state = ClusterEngineState.STARTING
        self.is_draining = False
        """True if the engine gets no new requests and ends once it is empty."""
        self.requests: dict[int, ClusterRequest] = {}
        """Unfinished requests by sequence id; of a lost engine those that died with it."""
        self.unsent_requests: list[ClusterRequest] = []
        """Requests that the router sent to the engine after its death."""
        self.has_pull_event = False
        """True while an event is due that offers waiting requests to the engine."""
        self.watched_seqs: set[int] = set()
        """Sequences whose first computed chunk is to be reported."""
        self.lives = [EngineLife(loop.now)]
        self._epochs: list[EngineEpoch] = []
        self._restarts: list[RestartEvent] = []
        self.loop = loop
        self.needs = needs
        self._needs_only_counts = needs.only_counts
        self._listener = listener
        self._kv_listener = kv_listener
        self.links = links
        self.log = log
        self._ends = FinishTimeBounds(deployment.cost, deployment.scheduler.stages)
        self._last_count_snapshot: EngineSnapshot | None = None

    @property
    def config(self) -> SchedulerConfig:
        """Return the resolved configuration of the scheduler."""
        return self.deployment.scheduler

    @property
    def num_requests(self) -> int:
        """Return the number of unfinished requests that were sent to the engine."""
        return len(self.requests) + len(self.unsent_requests)

    @property
    def is_routable(self) -> bool:
        """True if the router may send requests: ready, not draining, or crashed but undetected."""
        has_been_ready = self.lives[-1].ready_time is not None
        is_present = self.state in (ClusterEngineState.READY, ClusterEngineState.LOST)
        return is_present and has_been_ready and not self.is_draining

    def snapshot(self, now: float) -> EngineSnapshot:
        """Return the state of the engine that the router sees; the last one if it has crashed."""
        if self._needs_only_counts:
            return self._count_snapshot()
        snapshot = self._epochs[-1].snapshot(now)
        num_sent = len(self.unsent_requests)
        if self.role != snapshot.role:
            snapshot = snapshot._replace(role=self.role)
        if not num_sent:
            return snapshot
        num_tokens = sum(len(request.request.prompt_token_ids) for request in self.unsent_requests)
        return snapshot._replace(num_sent=num_sent, num_sent_tokens=num_tokens)

    def _count_snapshot(self) -> EngineSnapshot:
        """Return a snapshot with nothing but the number of requests; the last one if it is equal.

        Of an engine behind the router's time only `requests` has those on their way.
        """
        last = self._last_count_snapshot
        num_requests = len(self.requests) + len(self.unsent_requests)
        if last is not None and last.num_sent == num_requests and last.role == self.role:
            return last
        snapshot = self._epochs[-1].snapshot(self.loop.now)
        snapshot = snapshot._replace(role=self.role, num_sent=num_requests)
        self._last_count_snapshot = snapshot
        return snapshot

    def update_index(self, prefixes: PrefixIndex) -> None:
        """Apply the changes of the engine's prefix cache since the last call to an index."""
        self._epochs[-1].update_index(prefixes)

    def submit(
        self, request: ClusterRequest, submissions: list[Submission], now: float
    ) -> int | None:
        """Send a request to the engine; return its sequence id, or None if the engine has crashed.

        Args:
            request: The request.
            submissions: Submissions of the cluster, to which this one is appended.
            now: Time in seconds.

        Raises:
            ValueError: The request can never run.
        """
        if self.state is not ClusterEngineState.READY:
            self.unsent_requests.append(request)
            return None
        seq = len(submissions)
        submissions.append(request.describe_submission())
        self.requests[seq] = request
        submission = request.submission(seq, now)
        if self.loop.is_child and not self.needs.all_work:
            # The engine may not have come to this time.
            self.pipeline.submit_each([(now, submission)])
            if self._needs_only_counts:
                num_missing = submission.max_tokens - request.num_output_tokens
                self._ends.add(seq, num_missing, now)
        else:
            self.pipeline.submit(submission, now)
        return seq

    def run_before_arrival(self, now: float) -> None:
        """Run the events of the engine before an arrival at `now` if a request may end before it.

        Only for a router that needs nothing but counts; for others the loops have run them.
        """
        if self._ends.time <= now:
            self.loop.run_before((now, ABORT))
            self._ends.update(self.pipeline, self.requests, now)

    @property
    def pipeline(self) -> SimulatedPipeline:
        """Return the pipeline since the engine's latest start."""
        return self._epochs[-1].pipeline

    # Lifecycle.

    def start(self, deployment: Deployment | None, now: float) -> None:
        """Start a stopped engine, with another deployment if one is passed.

        Raises:
            ValueError: The engine has not stopped.
        """
        if self.state is not ClusterEngineState.STOPPED:
            raise ValueError(
                f"engine {self.name!r} is to start at {now} s, but is {self.state.value} then: "
                "drain it earlier, or choose another name"
            )
        self.deployment = deployment or self.deployment
        self.state, self.is_draining = ClusterEngineState.STARTING, False
        self.lives.append(EngineLife(now))

    def become_ready(self, now: float) -> None:
        """Begin to serve after the start-up, with a new scheduler, pipeline and empty cache."""
        deployment = self.deployment
        self._ends = FinishTimeBounds(deployment.cost, deployment.scheduler.stages)
        self._last_count_snapshot = None
        if self.log is not None and not self._epochs:
            self.log(deployment.start_event(now, self.name))
        elif self._epochs:
            restart = RestartEvent(
                now,
                len(self._epochs) + 1,
                "the engine has started again",
                0,
                deployment.layers,
                deployment.scheduler,
                degrees=deployment.degrees,
            )
            self._restarts.append(restart)
            if self.log is not None:
                self.log(restart)
        self.state = ClusterEngineState.READY
        self.lives[-1] = self.lives[-1]._replace(ready_time=now)
        self._epochs.append(EngineEpoch(self, None if self._kv_listener is None else self))

    def fail(self, now: float) -> bool:
        """Simulate a crash, which loses all work in flight; return False if it is not running."""
        if self.state not in (ClusterEngineState.STARTING, ClusterEngineState.READY):
            return False
        self._end_epoch(now)
        self.state = ClusterEngineState.LOST
        return True

    def stop(self, now: float) -> list[ClusterRequest]:
        """Stop the engine; return its unfinished requests in order of priority and arrival."""
        if self.state is not ClusterEngineState.LOST:
            self._end_epoch(now)
        self.state = ClusterEngineState.STOPPED
        requests = [*self.requests.values(), *self.unsent_requests]
        self.requests, self.unsent_requests = {}, []
        return sorted(requests, key=lambda request: request.rank)

    def _end_epoch(self, now: float) -> None:
        """Stop the pipeline and give the unfinished requests their output so far."""
        if self.state is ClusterEngineState.READY:
            for resumed in self._epochs[-1].pipeline.stop(now):
                request = self.requests[resumed.seq]
                request.request = request.request._replace(outputs=resumed.outputs)
        self.watched_seqs.clear()
        self.lives[-1] = self.lives[-1]._replace(end_time=now)

    # Listener of an epoch and of its scheduler's KV requests.

    @property
    def _kv(self) -> "PairedCluster":
        assert self._kv_listener is not None
        return self._kv_listener

    def on_first_chunk(self, seqs: list[int], now: float) -> None:
        """Report that watched sequences have computed their first chunk, once per sequence."""
        for seq in seqs:
            self.watched_seqs.discard(seq)
            self._kv.on_first_chunk(self, self.requests[seq], now)

    def on_fetch(self, fetch: KvFetch, now: float) -> None:
        """Forward a fetch of KV cache to the cluster."""
        self._kv.on_fetch(self, fetch, now)

    def on_fetch_cancelled(self, seq: int, now: float) -> None:
        """Forward the cancellation of a fetch to the cluster."""
        self._kv.on_fetch_cancelled(self, seq, now)

    def on_revoked(self, ticket: int, now: float) -> None:
        """Notify the cluster that the scheduler frees KV blocks it kept for another engine."""
        self._kv.on_revoked(self, ticket, now)

    def on_admitted(self, now: float) -> None:
        """Notify the cluster that a step was scheduled, so that queued requests may fit."""
        self._listener.on_changed(self, now)

    def on_finished(self, seqs: list[int], now: float) -> None:
        """Notify the cluster of finished requests."""
        for seq in seqs:
            self._listener.on_finished(self, self.requests.pop(seq), now)
        self._listener.on_changed(self, now)

    # Results.

    @property
    def records(self) -> list[RunRecord]:
        """Return a record for each start of the engine."""
        return [epoch.record for epoch in self._epochs]

    def run(self, submissions: list[Submission]) -> EngineRun:
        """Return the results over all starts of the engine.

        Args:
            submissions: Submissions of the cluster, indexed by sequence id.
        """
        if not self._epochs:
            record = RunRecord(self.deployment.start_event(self.lives[0].start_time, self.name))
            return EngineRun(record, SchedulerStats(), self.lives)
        stats = self._epochs[-1].stats
        records = self.records
        if len(records) == 1:
            return EngineRun(records[0], stats, self.lives)
        joined = join_submissions((record.requests for record in records), submissions)
        run = RunRecord(records[0].start, dict(joined.values()), restarts=self._restarts)
        micro_batches: list[MicroBatch] = []
        for epoch, record in zip(self._epochs, records, strict=True):
            micro_batches += record.micro_batches
            run.parallelism += record.parallelism
            # From the last event of an epoch on, no work counts as available.
            run.parallelism.append((epoch.last_event_time, 0))
        run.parallelism.pop()
        run.micro_batches = micro_batches
        return EngineRun(run, stats, self.lives)
