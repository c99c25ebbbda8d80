"""Depth of a simulated pipeline: fixed, or set by the controller that the driver holds."""

from collections.abc import Iterable

from gllm.pacing.depth import LinkSeconds, PipelineSeconds
from gllm.pacing.pacer import PipelinePacer
from gllm.scheduler.plan import StepOutput, StepPlan, StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel
from gllm.sim.event_loop import REPORT
from gllm.sim.metrics.run_record import DepthChange
from gllm.sim.observer import PipelineObserver, SchedulerCall
from gllm.sim.pipeline import SimulatedPipeline

AUTO_DEPTH = "auto"
"""Value of the depth that leaves it to the controller."""
PROBE_TOKENS = 8
"""Tokens of the larger of two micro-batches that measure the time per token."""


class SimulatedDepthControl(PipelineObserver):
    """Adapts the number of micro-batches in flight of a simulated pipeline, as real drivers do.

    It observes step times and applies the driver's controller (PipelinePacer) after each step.

    Args:
        pipeline: The pipeline, which must not have started.
    """

    def __init__(self, pipeline: SimulatedPipeline) -> None:
        self.pacer = PipelinePacer(pipeline.scheduler.config)
        self._pipeline = pipeline
        self.pacer.on_paths(probe_link_times(pipeline.cost, pipeline.scheduler.config.stages))
        pipeline.scheduler.set_depth(*self.pacer.pace)

    def on_scheduled(self, call: SchedulerCall, now: float) -> None:
        """Record the work of a micro-batch."""
        if call.work is not None:
            self.pacer.on_scheduled(call.work)

    def on_stage_finished(self, stage: int, step: int, start: float, end: float) -> None:
        """Record the time of a step on a stage."""
        self.pacer.on_stage_times(stage, [StepTime(step, start, end)])

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Set the depth, before the driver schedules again."""
        if not self.pacer.is_due(now):
            return
        scheduler = self._pipeline.scheduler
        stats = scheduler.stats()
        pace = self.pacer.update(stats.decoding, stats.decode_context_tokens, now)
        if pace is not None:
            scheduler.set_depth(*pace)


def start_depth(pipeline: SimulatedPipeline, depth: int | str | None) -> None:
    """Set the number of micro-batches in flight of a simulated pipeline, fixed or adaptive.

    Args:
        pipeline: The pipeline, which must not have started; it must not share its links.
        depth: Number of micro-batches in flight; AUTO_DEPTH to adapt it during the run; None for
            the scheduler's `max_in_flight`.

    Raises:
        ValueError: The number is above `max_in_flight` of the scheduler.
    """
    if depth is None:
        return
    if isinstance(depth, str):
        pipeline.observers = (*pipeline.observers, SimulatedDepthControl(pipeline))
        return
    limit = pipeline.scheduler.config.max_in_flight
    assert limit is not None
    if depth > limit:
        raise ValueError(f"depth {depth} is above max_in_flight {limit}: raise max_in_flight")
    pipeline.scheduler.set_depth(depth)


def replay_depth(pipeline: SimulatedPipeline, changes: Iterable[DepthChange]) -> None:
    """Schedule the changes of the number of micro-batches in flight that a real run has logged.

    Args:
        pipeline: The simulated pipeline.
        changes: The logged changes with their times.
    """
    for change in changes:
        arguments = change.depth, change.max_prefill_tokens, change.is_mixed
        pipeline.loop.push(change.received_time, REPORT, _set_depth, (pipeline, arguments))


def _set_depth(now: float, change: tuple[SimulatedPipeline, tuple[int, int | None, bool]]) -> None:
    pipeline, arguments = change
    if not pipeline.is_stopped:
        pipeline.scheduler.set_depth(*arguments)


def probe_link_times(cost: CostModel, num_stages: int) -> PipelineSeconds:
    """Return the link times of a cost model in the form in which a driver measures them.

    The time per token of a link is the added time of some more tokens; the remainder is its
    latency.

    Args:
        cost: Cost model of the pipeline.
        num_stages: Number of pipeline stages.
    """
    small, large = _probe_work(1), _probe_work(PROBE_TOKENS)
    links = []
    for stage in range(num_stages - 1):
        one, many = (cost.activation_transfer(stage, work) for work in (small, large))
        added = many.occupancy_seconds - one.occupancy_seconds
        per_token = added / (large.num_tokens - small.num_tokens)
        links.append(LinkSeconds(one.total_seconds - per_token, per_token, per_token))
    before = cost.plan_seconds(small)
    latencies = [
        before + cost.plan_transfer(stage, small).total_seconds for stage in range(num_stages)
    ]
    way_back = cost.return_seconds(small) + cost.return_transfer(small).total_seconds
    return PipelineSeconds([], links, latencies, way_back)


def _probe_work(num_tokens: int) -> StageWork:
    """Return the work of decodes with little context."""
    return StageWork(0, num_tokens, (), num_tokens, num_tokens, num_tokens)
