"""Policy `throttle`: micro-batches of the size that device and load require."""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.latency_model import ChunkLatencyModel
from gllm.scheduler.plan import ScheduledRow
from gllm.scheduler.policy import PaperThrottlePolicy, SchedulerLoad
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_averages import StepAverager
from gllm.scheduler.step_cost import DEFAULT_RIDGE_TOKENS, OnlineStepCurveFit, StepTimeCurve

if TYPE_CHECKING:
    from gllm.scheduler.micro_batch import MicroBatchFiller

EFFICIENCY_LIMIT = 0.96
"""Share of arithmetic in the time of the largest micro-batch while sequences decode: a larger one
would gain at most four per cent in throughput, and delay the decodes by more."""
GROWTH_LIMIT = 2
"""Largest micro-batch in relation to the largest one of which the time is known."""
NUM_CANDIDATES = 24
"""Chunk sizes that are compared."""
CHOICE_INTERVAL_STEPS = 16
"""Steps between two choices of the chunk size."""
LEAST_STEP_SECONDS = 1e-6
"""Times up to this one are none of a computation: nothing is learned from them."""
REST_SHARE = 0.2
"""Part of a chunk that may be added to another one instead of being a chunk of its own."""


class ThrottlePolicy(PaperThrottlePolicy):
    """Policy `throttle`: token throttling with the chunk size of the shortest mean latency.

    Large chunks use a device well and give early first tokens. Small ones leave short gaps between
    the tokens of decodes, and few bubbles: a micro-batch longer than its neighbours delays all of
    them. The size at which both are in balance depends on the step time curve, which is fitted to
    the times that stages report, and on the load, of which averages over a thousand steps count;
    `gllm/scheduler/latency_model.py` has the formulas. Micro-batches with prefill have equal
    numbers of tokens, because unequal ones take longer on average.

    The extremes: beside few decodes a chunk has the size that is best for a lone prompt; if prompts
    arrive faster than they are computed it grows up to EFFICIENCY_LIMIT; with many decodes and few
    prompts it has little more than the prefill tokens that arrive per micro-batch.
    """

    learns_step_times = True
    curve_fit: OnlineStepCurveFit

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        ridge = config.ridge_tokens
        self.curve_fit = OnlineStepCurveFit(
            ridge or DEFAULT_RIDGE_TOKENS, is_fixed=ridge is not None
        )
        self._averager = StepAverager(config.stages)
        self._chunk_tokens = 0.0
        """The chosen size of a chunk beside `_mean_decodes` decodes."""
        self._mean_decodes = 0.0
        self._next_choice = 0
        """Number of observed steps at which the size is chosen again."""

    def fill(self, batch: "MicroBatchFiller", now: float) -> list[ScheduledRow]:
        """Return rows of decodes, then of prefill within the remaining budget."""
        rows = super().fill(batch, now)
        if rows:
            self._averager.on_schedule(now)
        return rows

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return equation (4), as under `throttle-paper`."""
        self._averager.on_load(load)
        return super().decode_budget(load)

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Learn the interval and the load from a completed step."""
        if seconds > LEAST_STEP_SECONDS:
            self.curve_fit.observe_step(work, seconds)
            self._averager.observe_step(work, seconds)

    def _tokens_by_waiting(self, load: SchedulerLoad) -> float:
        """Return the chunk size: equal parts of the waiting prefill, near the chosen size.

        A half-scheduled prompt counts whole: otherwise its chunks would shrink as it is consumed.
        """
        work = load.num_waiting_tokens + load.num_started_tokens
        if not work:
            return 0
        is_alone = not load.num_decoding and load.num_waiting_prompts <= 1
        if is_alone or not self._chunk_tokens or not self.curve_fit.is_fitted:
            tokens = self._choose_for(load, work)
            self._chunk_tokens = self._chunk_tokens or tokens
        else:
            if self._averager.num_steps >= self._next_choice:
                self._next_choice = self._averager.num_steps + CHOICE_INTERVAL_STEPS
                self._choose_for_averages(load.num_waiting_prompts)
            # Micro-batches of equal size, however many decodes each one has.
            spare = self._mean_decodes - load.num_scheduled_decodes
            tokens = max(self._chunk_tokens + spare, self._chunk_tokens / 2)
        return work / max(1, math.ceil(work / tokens - REST_SHARE))

    def _choose_for(self, load: SchedulerLoad, work: float) -> float:
        """Return the chunk size that delays the present prompts and decodes least.

        `work` tokens in chunks of n take (work / n + stages - 1) micro-batches, each of which
        delays the prompts by its time and the decodes by the time of its prefill.
        """
        curve, decodes = self.curve_fit.curve, load.num_scheduled_decodes
        prompts, running = max(1, load.num_waiting_prompts), load.num_decoding
        num_edges = self._config.stages - 1
        base = curve.seconds(decodes)

        def delay(tokens: float) -> float:
            time = curve.seconds(decodes + tokens)
            return (work / tokens + num_edges) * (prompts * time + running * (time - base))

        return self._minimize(delay, curve, decodes, running)

    def _choose_for_averages(self, num_waiting: int) -> None:
        """Choose the chunk size of the shortest mean latency for the averages of the load."""
        averages = self._averager.read()
        self._mean_decodes = averages.decodes
        if not averages.prompts or not averages.prefill_steps:
            return
        # Chunks grow as soon as prompts queue, and shrink with the average.
        averages = averages._replace(waiting=max(averages.waiting, num_waiting))
        curve = self.curve_fit.curve.with_context(averages.context_tokens)
        latency = ChunkLatencyModel(averages, curve, self._config.stages)
        self._chunk_tokens = self._minimize(latency, curve, averages.decodes, averages.running)

    def _minimize(
        self,
        cost: Callable[[float], float],
        curve: StepTimeCurve,
        decodes: float,
        running: float,
    ) -> float:
        """Return the chunk size of least cost, within the limits of a chunk."""
        smallest = self._config.min_prefill_tokens
        largest = GROWTH_LIMIT * self.curve_fit.most_tokens
        if running:
            largest = min(largest, curve.tokens_at_efficiency(EFFICIENCY_LIMIT))
        largest = max(smallest, min(largest - decodes, self._config.max_prefill_tokens))
        ratio = (largest / smallest) ** (1 / NUM_CANDIDATES)
        return min([smallest * ratio**i for i in range(NUM_CANDIDATES + 1)], key=cost)
