"""Policy `tetri`: prefill chunks of a fixed size, without decodes.

Source: "Inference without Interference: Disaggregate LLM Inference for Mixed Downstream Workloads"
(TetriInfer, arXiv 2401.11181), chunked prefill: prompts are concatenated in the order of the queue
and cut into chunks of ChunkSize tokens, at which a prefill instance saturates.
"""

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policy import PrefillLeads, SarathiPolicy


class TetriPolicy(PrefillLeads, SarathiPolicy):
    """Policy `tetri`: prefill batches of a fixed number of tokens; decodes run if none waits.

    Prompts are split and joined to fill a prefill batch. It is smaller only if too few tokens wait
    or the KV cache is full; it is not padded. Source: "TetriInfer" (arXiv 2401.11181).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        assert config.prefill_batch_tokens is not None
        self._budget = config.prefill_batch_tokens
