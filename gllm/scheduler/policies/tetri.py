"""Policy `tetri`: prefill chunks of a fixed size, without decodes.

Source: "Inference without Interference: Disaggregate LLM Inference for Mixed Downstream Workloads"
(TetriInfer, arXiv 2401.11181), chunked prefill: prompts are concatenated in the order of the queue
and cut into chunks of ChunkSize tokens, at which a prefill instance saturates.
"""

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policy import PrefillLeads, SarathiPolicy, SchedulerLoad
from gllm.scheduler.prefill_size import PrefillBatchSize
from gllm.scheduler.stage_work import StageWork


class TetriPolicy(PrefillLeads, SarathiPolicy):
    """Policy `tetri`: prefill batches of a fixed number of tokens; decodes run if none waits.

    Prompts are split and joined to fill a prefill batch. It is smaller only if too few tokens wait
    or the KV cache is full; it is not padded. Source: "TetriInfer" (arXiv 2401.11181).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._size = PrefillBatchSize(config)
        self.learns_step_times = self._size.is_measured

    @property
    def prefill_batch_tokens(self) -> int:
        """Number of tokens of a prefill batch (ChunkSize in the paper)."""
        return self._size.num_tokens

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return the number of tokens of a prefill batch."""
        return self._size.num_tokens

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Learn how many tokens saturate the stages, unless the number is configured."""
        self._size.observe_step(work, seconds)
