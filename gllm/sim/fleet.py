"""Fleet in simulated time: several pipelines behind one router with a production routing policy.

The router sees what a real one sees: statistics, fitted step costs and events of the prefix caches,
here without delay.
"""

from collections.abc import Mapping
from typing import NamedTuple

from gllm.observability.step_log import StepLogEvent
from gllm.routing.policy import RoutingPolicy
from gllm.routing.prefix_index import PrefixIndex, PromptBlockHashes
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.scheduler.output_lengths import OutputLengthPredictor
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import OnlineStepCostFit
from gllm.sim.costs.base import CostModel, DelegatingCostModel
from gllm.sim.deployment import Deployment
from gllm.sim.event_loop import ARRIVAL, EventLoop
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest, to_scheduler_requests


class EngineRun(NamedTuple):
    """Requests and steps of one engine of a fleet, and its statistics at the end."""

    record: RunRecord
    stats: SchedulerStats


class MeteredCostModel(DelegatingCostModel):
    """A cost model whose predicted steps are fitted, as an engine fits its measured ones."""

    def __init__(self, cost: CostModel, num_stages: int) -> None:
        super().__init__(cost)
        self.fit = OnlineStepCostFit()
        self._num_stages = num_stages
        self._slowest: dict[int, float] = {}
        """Time of the slowest stage so far, of each step that has not passed all stages."""

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the cost model."""
        seconds = super().stage_seconds(stage, work, now)
        slowest = max(seconds, self._slowest.pop(work.step, 0.0))
        if stage < self._num_stages - 1:
            self._slowest[work.step] = slowest
        else:
            self.fit.observe_step(work, slowest)
        return seconds


class SimulatedEngine:
    """One engine of a simulated fleet."""

    def __init__(self, name: str, deployment: Deployment, loop: EventLoop) -> None:
        self.name = name
        self.config = deployment.scheduler
        self._cost = MeteredCostModel(deployment.cost, self.config.stages)
        self._events: list[StepLogEvent] = [deployment.start_event(0.0)]
        self.pipeline = SimulatedPipeline(
            self.config, self._cost, log=self._events.append, loop=loop
        )
        self.pipeline.scheduler.kv_cache.watch(with_token_ids=False)
        self._num_cache_events = 0

    def snapshot(self) -> EngineSnapshot:
        """Return the state that a router knows."""
        assert self.config.max_num_batched_tokens is not None
        return EngineSnapshot(
            self.name,
            stats=self.pipeline.scheduler.stats(),
            coefficients=self._cost.fit.coefficients,
            num_blocks=self.config.num_blocks,
            block_size=self.config.block_size,
            num_stages=self.config.stages,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.config.max_num_batched_tokens,
        )

    def update_index(self, prefixes: PrefixIndex) -> None:
        """Report the changes of the prefix cache."""
        events = self.pipeline.scheduler.kv_cache.pop_events()
        if events is None:
            return
        stored = [digest for chain in events.stored for digest in chain.digests]
        number = self._num_cache_events
        is_current = prefixes.on_events(
            self.name, number, stored, events.removed, events.is_cleared
        )
        assert is_current, "no event is lost"
        self._num_cache_events += 1

    def run(self) -> EngineRun:
        """Return what has happened so far."""
        return EngineRun(build_run_record(self._events), self.pipeline.scheduler.stats())


class SimulatedRouter:
    """Router of a simulated fleet."""

    def __init__(self, engines: list[SimulatedEngine], policy: RoutingPolicy) -> None:
        self._engines = {engine.name: engine for engine in engines}
        self._policy = policy
        self._output_lengths = OutputLengthPredictor(engines[0].config.expected_output_tokens)

    def arrive(self, now: float, job: tuple[SchedulerRequest, str]) -> None:
        """Send a request of a session to the engine that the policy chooses."""
        request, session = job
        engines = list(self._engines.values())
        if self._policy.uses_prefixes:
            for engine in engines:
                engine.update_index(self._policy.prefixes)
        chosen = self._policy.choose(
            self._describe(request, session, engines[0].config.block_size),
            [engine.snapshot() for engine in engines],
        )
        assert chosen is not None
        # Simulated outputs have their maximum length.
        self._output_lengths.record(request.max_tokens, request.max_tokens)
        self._engines[chosen].pipeline.submit(request, now)

    def _describe(self, request: SchedulerRequest, session: str, block_size: int) -> RoutingRequest:
        tokens = request.prompt_token_ids
        return RoutingRequest(
            len(tokens),
            PromptBlockHashes(tokens, block_size, request.cache_salt),
            self._output_lengths.predict(request.max_tokens, 0),
            request.max_tokens,
            request.priority,
            session,
        )


def simulate_fleet(
    deployments: Mapping[str, Deployment], jobs: list[WorkloadRequest], policy: RoutingPolicy
) -> dict[str, EngineRun]:
    """Simulate a workload on a fleet; return the run of each engine by its name.

    Args:
        deployments: engines by name, with the same block size.
        jobs: the requests; each fits every engine.
        policy: a new routing policy.
    """
    loop = EventLoop()
    engines = [SimulatedEngine(name, each, loop) for name, each in deployments.items()]
    router = SimulatedRouter(engines, policy)
    arrivals = (
        (time, (request, job.session))
        for job, (time, request) in zip(jobs, to_scheduler_requests(jobs), strict=True)
    )
    loop.push_each(arrivals, ARRIVAL, router.arrive)
    loop.run()
    return {engine.name: engine.run() for engine in engines}
