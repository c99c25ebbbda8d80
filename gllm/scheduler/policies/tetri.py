"""Policy `tetri`: prefill chunks of a fixed size, without decodes.

Source: "Inference without Interference: Disaggregate LLM Inference for Mixed Downstream Workloads"
(TetriInfer, arXiv 2401.11181), chunked prefill: prompts are concatenated in the order of the queue
and cut into chunks of ChunkSize tokens, at which a prefill instance saturates.
"""

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policy import PrefillLeads, SchedulerLoad, TokenBudgetPolicy


class TetriPolicy(PrefillLeads, TokenBudgetPolicy):
    """Policy `tetri`: prefill chunks of equal size over prompt boundaries, or all ready decodes.

    A chunk has fewer tokens only if no more wait, or if the KV cache has no space for more. It is
    not padded.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.prefill_batch_tokens is not None
        self._chunk_size = config.prefill_batch_tokens

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return the number of all ready decodes."""
        return load.num_ready_decodes

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return the size of a chunk."""
        return self._chunk_size
