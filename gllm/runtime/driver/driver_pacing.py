"""Pace of the driver's pipeline: its measurements in, the depth of its scheduler out."""

import logging

from gllm.messages.measurement import LinkTimes
from gllm.messages.reports import StageTimes
from gllm.pacing.depth import LinkSeconds, PipelineSeconds
from gllm.pacing.pacer import PipelinePacer
from gllm.scheduler.plan import StepPlan
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.stage_work import compute_stage_work

log = logging.getLogger(__name__)


class DriverPacing:
    """Lets the depth controller set the depth of a scheduler, from reports of stages and links."""

    def __init__(self, scheduler: Scheduler, bytes_per_token: int) -> None:
        """Create the pacing of a pipeline, and set its first depth.

        Args:
            scheduler: of the pipeline.
            bytes_per_token: of the activations between two stages.
        """
        self._scheduler = scheduler
        self._bytes_per_token = bytes_per_token
        self._pacer = PipelinePacer(scheduler.config)
        scheduler.set_depth(*self._pacer.pace)

    def on_scheduled(self, plan: StepPlan) -> None:
        """Note a micro-batch that all stages will compute."""
        self._pacer.on_scheduled(compute_stage_work(plan.step, plan.rows))

    def on_stage_times(self, message: StageTimes) -> None:
        """Note steps that a stage has computed."""
        self._pacer.on_stage_times(message.stage, message.steps)

    def on_link_times(self, message: LinkTimes) -> None:
        """Note the measured times of the links."""
        self._pacer.on_paths(convert_link_times(message, self._bytes_per_token))

    def update(self, now: float) -> None:
        """Change the depth of the scheduler if another one is better by enough."""
        if not self._pacer.is_due(now):
            return
        before, stats = self._pacer.pace, self._scheduler.stats()
        pace = self._pacer.update(stats.decoding, stats.decode_context_tokens, now)
        if pace is None:
            return
        self._scheduler.set_depth(*pace)
        log.info(
            "micro-batches in flight: %d -> %d, prefill tokens in each: at most %d -> %d",
            before.depth,
            pace.depth,
            before.max_prefill_tokens,
            pace.max_prefill_tokens,
        )


def convert_link_times(message: LinkTimes, bytes_per_token: int) -> PipelineSeconds:
    """Return the times of a pipeline's links; one way takes half of the round trip."""
    links = [
        LinkSeconds(
            link.round_trip_seconds / 2,
            0.0 if link.bytes_per_second is None else bytes_per_token / link.bytes_per_second,
        )
        for link in message.links
    ]
    latencies = [seconds / 2 for seconds in message.driver_round_trips]
    return PipelineSeconds([], links, latencies, latencies[-1])
