"""One epoch of an engine of a cluster: a pipeline, its record and what a router may read."""

from typing import TYPE_CHECKING

from gllm.routing.ongoing import OngoingRequests
from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot
from gllm.scheduler.plan import SchedulerStats, StepOutput, StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import OnlineStepCostFit, StepCostCoefficients
from gllm.sim.costs.base import CostModel, DelegatingCostModel
from gllm.sim.depth_control import start_depth
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.metrics.run_recorder import RunRecorder
from gllm.sim.observer import PipelineObserver, SchedulerCall
from gllm.sim.pipeline import KvRequestListener, SimulatedPipeline

if TYPE_CHECKING:
    from gllm.sim.cluster.engine import ClusterEngine


class MeteredCostModel(DelegatingCostModel):
    """Cost model wrapper that also fits a linear step cost model to the predictions, for routers.

    Routing policies read the fitted costs. In production an engine fits them to measured steps and
    reports them to the router.

    Args:
        cost: The wrapped cost model, whose predictions are returned unchanged.
        num_stages: Number of pipeline stages.
    """

    def __init__(self, cost: CostModel, num_stages: int) -> None:
        super().__init__(cost)
        self.fit = OnlineStepCostFit()
        self._num_stages = num_stages
        self._slowest: dict[int, float] = {}
        """Time of the slowest stage so far, of each step that has not passed all stages."""

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the wrapped model."""
        seconds = super().stage_seconds(stage, work, now)
        slowest = max(seconds, self._slowest.pop(work.step, 0.0))
        if stage < self._num_stages - 1:
            self._slowest[work.step] = slowest
        else:
            self.fit.observe_step(work, slowest)
        return seconds


class EngineEpoch(PipelineObserver):
    """Scheduler and pipeline of a simulated engine between one start and the next stop or crash.

    Args:
        engine: The engine, which is notified of finished requests.
        kv_listener: Transfers KV cache between engines; None: no request has KV cache on another
            engine.
    """

    def __init__(
        self, engine: "ClusterEngine", kv_listener: KvRequestListener | None = None
    ) -> None:
        deployment, loop, needs = engine.deployment, engine.loop, engine.needs
        config = deployment.scheduler
        self._listener = engine
        self._needs = needs
        self._cost: CostModel = deployment.cost
        if needs.step_costs:
            self._cost = MeteredCostModel(deployment.cost, config.stages)
        self._recorder = RunRecorder(deployment.start_event(loop.now, engine.name))
        self.pipeline = SimulatedPipeline(
            config,
            self._cost,
            [self._recorder, self],
            engine.log,
            loop=loop,
            links=engine.links,
            output_lengths=deployment.output_lengths,
            kv_listener=kv_listener,
        )
        start_depth(self.pipeline, deployment.depth)
        if needs.prefixes:
            self.pipeline.scheduler.kv_cache.watch(with_token_ids=False)
        self._num_cache_events = 0
        self._ongoing = OngoingRequests() if needs.ongoing else None
        self.last_event_time = loop.now
        """Time in seconds of the last event of the pipeline."""
        assert config.max_num_batched_tokens is not None
        self._empty_snapshot = EngineSnapshot(
            engine.name,
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            num_stages=config.stages,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
        )

    @property
    def record(self) -> RunRecord:
        """Return the record of the requests and micro-batches so far."""
        return self._recorder.record

    @property
    def stats(self) -> SchedulerStats:
        """Return the statistics of the scheduler."""
        return self.pipeline.scheduler.stats()

    def snapshot(self, now: float) -> EngineSnapshot:
        """Return the state of the engine at a time, as far as the router needs it."""
        if not self._needs.all_work:
            return self._empty_snapshot
        coefficients: StepCostCoefficients | None = None
        if isinstance(self._cost, MeteredCostModel):
            coefficients = self._cost.fit.coefficients
        return self._empty_snapshot._replace(
            stats=self.stats if self._needs.statistics else SchedulerStats(),
            coefficients=coefficients,
            ongoing=() if self._ongoing is None else self._ongoing.list(),
            time=now,
        )

    def update_index(self, prefixes: PrefixIndex) -> None:
        """Apply the changes of the prefix cache since the last call to an index."""
        events = self.pipeline.scheduler.kv_cache.pop_events()
        if events is None:
            return
        stored = [digest for chain in events.stored for digest in chain.digests]
        number = self._num_cache_events
        name = self._empty_snapshot.name
        is_current = prefixes.on_events(name, number, stored, events.removed, events.is_cleared)
        assert is_current, "no event is lost"
        self._num_cache_events += 1

    # Observer of the pipeline.

    def on_added(self, request: SchedulerRequest, now: float) -> None:
        """Record a request that the scheduler has accepted."""
        self.last_event_time = now
        if self._ongoing is not None:
            num_resumed = sum(map(len, request.outputs or ()))
            routed = self._listener.requests[request.seq]
            estimate = routed.length_estimate.after(num_resumed)
            num_tokens = len(request.prompt_token_ids) + num_resumed
            self._ongoing.on_sent(request.seq, num_tokens, estimate, routed.slo)

    def on_aborted(self, seqs: list[int], now: float) -> None:
        """Remove aborted sequences from the unfinished ones."""
        self.last_event_time = now
        if self._ongoing is not None:
            self._ongoing.on_ended(seqs)

    def on_scheduled(self, call: SchedulerCall, now: float) -> None:
        """Notify the engine of a new micro-batch."""
        self.last_event_time = now
        if call.plan is not None:
            self._listener.on_admitted(now)

    def on_stage_finished(self, stage: int, step: int, start: float, end: float) -> None:
        """Record the time of the last event."""
        self.last_event_time = end

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Notify the engine of first chunks and of finished sequences."""
        self.last_event_time = now
        if watched := self._listener.watched_seqs:
            begun = dict.fromkeys(row.seq for row in plan.rows if row.seq in watched)
            self._listener.on_first_chunk(list(begun), now)
        if self._ongoing is not None:
            self._ongoing.on_tokens(output.seqs, now)
            self._ongoing.on_ended(request.seq for request in output.finished)
        if output.finished:
            self._listener.on_finished([request.seq for request in output.finished], now)
