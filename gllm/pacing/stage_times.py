"""Time of each stage as a function of a micro-batch, fitted to the stages' reports."""

from collections.abc import Iterable

from gllm.pacing.depth import StageSeconds
from gllm.scheduler.plan import StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import OnlineStepCostFit

MAX_PENDING_STEPS = 4096
"""Steps kept while a stage does not report; the oldest is dropped first."""
EARLY_FITS = (8, 16)
"""Numbers of steps after which there is a fit: the first 32 steps may take long on weak links."""


class StageTimeFits:
    """A linear model of the step time per stage.

    num_stages: of the pipeline.
    """

    def __init__(self, num_stages: int) -> None:
        self._fits = [OnlineStepCostFit(EARLY_FITS) for _ in range(num_stages)]
        self._works: dict[int, StageWork] = {}
        """Work of the steps that a stage has not reported."""
        self._num_missing: dict[int, int] = {}
        """Number of stages that have not reported a step."""

    def on_scheduled(self, work: StageWork) -> None:
        """Remember the work of a step that all stages will report."""
        self._works[work.step] = work
        self._num_missing[work.step] = len(self._fits)
        if len(self._works) > MAX_PENDING_STEPS:
            self._forget(next(iter(self._works)))

    def on_stage_times(self, stage: int, times: Iterable[StepTime]) -> None:
        """Fit the model of a stage to the steps that it has computed."""
        for step, start, end in times:
            work = self._works.get(step)
            if work is None:
                continue
            self._fits[stage].observe_step(work, end - start)
            self._num_missing[step] -= 1
            if not self._num_missing[step]:
                self._forget(step)

    def read(self, context_tokens_per_decode: float) -> list[StageSeconds] | None:
        """Return the time of each stage; None until every stage has reported enough steps.

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
