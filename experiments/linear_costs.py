"""Step times of the linear latency model of "Aladdin" (arXiv 2405.06856).

A prefill of n tokens takes k1 n + c1, a decode step of b requests k2 context + c2 b + c3. A
micro-batch of both phases takes the sum of both without the smaller constant, because the weights
are read once.
"""

from gllm.routing.placement import LatencyModel
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel


class LinearCostModel(CostModel):
    """Engine of one stage with a linear latency model.

    Args:
        model: Coefficients in seconds.
    """

    def __init__(self, model: LatencyModel) -> None:
        self._model = model

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of a micro-batch."""
        model, num_decodes = self._model, work.num_decodes
        num_prefill_tokens = work.num_tokens - num_decodes
        seconds = 0.0
        if num_prefill_tokens:
            seconds += model.prefill_seconds(num_prefill_tokens)
        if num_decodes:
            seconds += model.decode_seconds(num_decodes, work.num_decode_context_tokens)
        if num_prefill_tokens and num_decodes:
            seconds -= min(model.c1, model.c3)
        return seconds
