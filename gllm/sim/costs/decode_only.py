"""Costs of an engine that gets the KV cache of its prompts from another one."""

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import DelegatingCostModel


class DecodeOnlyCostModel(DelegatingCostModel):
    """Another cost model, whose prompts take no time."""

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the decodes of a micro-batch."""
        if not work.num_decodes:
            return 0.0
        if work.prefill_chunks:
            work = work._replace(num_tokens=work.num_decodes, prefill_chunks=())
        return self._cost.stage_seconds(stage, work, now)
