"""Pacer of a pipeline: collects its measurements and lets the depth controller decide.

The driver of a pipeline and the simulator hold the same object and pass its decisions to
`Scheduler.set_depth`.
"""

import math
from collections.abc import Iterable

from gllm.pacing.depth import (
    MAX_MIXED_LINK_SHARE,
    MIXED_LINK_SHARE,
    DepthController,
    Pace,
    PipelineSeconds,
    StageSeconds,
    has_fast_links,
    solve_depth,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import OnlineStepCostFit

MAX_PENDING_STEPS = 4096
"""Steps kept while a stage does not report; the oldest is dropped first."""
EARLY_FITS = (8, 16)
"""Numbers of steps after which there is a fit: the first 32 steps may take long on weak links."""


class StageTimeFits:
    """Linear models of the step time of each pipeline stage, fitted to measured steps.

    Args:
        num_stages: number of pipeline stages.
    """

    def __init__(self, num_stages: int) -> None:
        self._fits = [OnlineStepCostFit(EARLY_FITS) for _ in range(num_stages)]
        self._works: dict[int, StageWork] = {}
        """Work of the steps that a stage has not reported."""
        self._num_missing: dict[int, int] = {}
        """Number of stages that have not reported a step."""

    def on_scheduled(self, work: StageWork) -> None:
        """Store the token counts of a step until all stages have reported its times."""
        self._works[work.step] = work
        self._num_missing[work.step] = len(self._fits)
        if len(self._works) > MAX_PENDING_STEPS:
            self._forget(next(iter(self._works)))

    def on_stage_times(self, stage: int, times: Iterable[StepTime]) -> None:
        """Fit the model of a stage to the start and end times of steps that it reports."""
        for step, start, end in times:
            work = self._works.get(step)
            if work is None:
                continue
            self._fits[stage].observe_step(work, end - start)
            self._num_missing[step] -= 1
            if not self._num_missing[step]:
                self._forget(step)

    def read(self, context_tokens_per_decode: float) -> list[StageSeconds] | None:
        """Return the fitted time of each stage; None until every stage has a fit.

        Args:
            context_tokens_per_decode: mean number of tokens that a decode attends to.
        """
        stages = []
        for fit in self._fits:
            cost = fit.coefficients
            if cost is None:
                return None
            per_decode = cost.token + cost.decode + context_tokens_per_decode * cost.context_token
            stages.append(StageSeconds(cost.step, per_decode, cost.token))
        return stages

    def _forget(self, step: int) -> None:
        del self._works[step], self._num_missing[step]


LOAD_SECONDS = 5.0
"""Time constant of the means of #RD and of the prefill tokens per micro-batch."""


class PipelinePacer:
    """Measures the stages of a pipeline and chooses the number of micro-batches in flight.

    It also limits their prefill tokens. Until the times of all stages and links are known, as many
    micro-batches as stages are in flight.

    Args:
        config: scheduler configuration without unset values; `max_in_flight` is the upper limit.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.max_in_flight is not None
        assert config.max_num_batched_tokens is not None
        pace = Pace(min(config.stages, config.max_in_flight), config.max_num_batched_tokens)
        # With two lanes prefill never delays decodes on a link, and small chunks would only wait
        # for them more often.
        has_cap = config.num_lanes == 1
        least = config.min_prefill_tokens if has_cap else config.max_num_batched_tokens
        self._controller = DepthController(pace, config.max_in_flight, least)
        self._fits = StageTimeFits(config.stages)
        self._paths: PipelineSeconds | None = None
        """Times of the links, without those of the stages."""
        self._has_lanes = not has_cap
        self._max_depth = config.max_in_flight
        self._can_mix = self._has_lanes and not config.phase_pure
        self._num_decoding = self._prefill_tokens = 0.0
        """Means over the last seconds; prefill tokens are those of a micro-batch, or of one with
        prefill if decodes are separate."""
        self._num_new_steps = self._num_new_prefill_tokens = 0
        """Micro-batches and their prefill tokens since the means were updated."""
        self._load_time = -math.inf

    @property
    def pace(self) -> Pace:
        """Present number of micro-batches in flight and prefill limit."""
        return self._controller.pace

    def on_scheduled(self, work: StageWork) -> None:
        """Store the token counts of a scheduled micro-batch."""
        self._fits.on_scheduled(work)
        num_prefill_tokens = work.num_tokens - work.num_decode_tokens
        if num_prefill_tokens or not self._is_separated:
            self._num_new_steps += 1
            self._num_new_prefill_tokens += num_prefill_tokens

    def on_stage_times(self, stage: int, times: Iterable[StepTime]) -> None:
        """Add the measured start and end times of a stage's steps."""
        self._fits.on_stage_times(stage, times)

    def on_paths(self, paths: PipelineSeconds) -> None:
        """Replace the measured times of the links; the fields of the stages are ignored."""
        self._paths = paths

    def is_due(self, now: float) -> bool:
        """Return True if `update` may change depth or prefill limit."""
        return self._paths is not None and self._controller.is_due(now)

    def update(self, num_decoding: int, num_context_tokens: int, now: float) -> Pace | None:
        """Return a new depth and prefill limit if the predicted gain is large enough; else None.

        Args:
            num_decoding: number of decoding sequences (#RD), in flight or not.
            num_context_tokens: tokens of these sequences in the KV cache.
            now: time in seconds.
        """
        if self._paths is None or not self.is_due(now):
            return None
        has_prefill = self._num_new_prefill_tokens > 0
        self._update_load(num_decoding, now)
        stages = self._fits.read(num_context_tokens / max(1, num_decoding))
        if stages is None:
            return None
        times = self._paths._replace(stages=stages, prefill_tokens=self._prefill_tokens)
        is_mixed, min_depth = self._should_mix(times), 1
        if self._has_lanes and not is_mixed:
            # The decodes decide: they are in micro-batches of their own. But those of prefill have
            # the same depth, and no stage may be idle while they wait.
            min_depth = solve_depth(times, 0, self._max_depth) if has_prefill else 1
            times = times._replace(prefill_tokens=0.0)
        return self._controller.update(times, self._num_decoding, now, is_mixed, min_depth)

    @property
    def _is_separated(self) -> bool:
        """True while micro-batches have decodes only or prefill only."""
        return self._has_lanes and not self.pace.is_mixed

    def _should_mix(self, times: PipelineSeconds) -> bool:
        """Return True if links are fast enough for micro-batches with decodes and prefill."""
        is_mixed = self.pace.is_mixed
        if not self._can_mix or times.prefill_tokens < 1:
            return is_mixed
        share = MAX_MIXED_LINK_SHARE if is_mixed else MIXED_LINK_SHARE
        return has_fast_links(times, self._num_decoding / self.pace.depth, share)

    def _update_load(self, num_decoding: int, now: float) -> None:
        """Update the means over the last seconds."""
        weight = -math.expm1((self._load_time - now) / LOAD_SECONDS)
        self._num_decoding += weight * (num_decoding - self._num_decoding)
        if self._num_new_steps:
            new_tokens = self._num_new_prefill_tokens / self._num_new_steps
            self._prefill_tokens += weight * (new_tokens - self._prefill_tokens)
            self._num_new_steps = self._num_new_prefill_tokens = 0
        self._load_time = now
