"""Policies that compute a prompt in one micro-batch: `vllm` and `distserve`."""

from collections.abc import Container

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.policy import PrefillLeads, SarathiPolicy, SchedulerLoad
from gllm.scheduler.prefill_size import PrefillBatchSize
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.stage_work import StageWork

WATERMARK = 0.01
"""Share of the KV blocks that an admission leaves free, as in vLLM and Vidur."""


class PromptAdmission(AdmissionController):
    """Admits a waiting sequence if its prompt fits into the free KV blocks, less a small reserve.

    Blocks for the output are not reserved: a decode that lacks one later preempts the newest
    sequence.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        output_lengths: OutputLengths | None = None,
    ) -> None:
        super().__init__(config, kv_cache, output_lengths)
        self._watermark = int(WATERMARK * config.num_blocks)

    def is_admissible(self, sequence: Sequence, victims: Container[int] = ()) -> bool:
        """Return True if the blocks of the whole prefill are free.

        Args:
            sequence: a sequence without blocks.
            victims: sequence ids that would be preempted for it.
        """
        kv_cache = self._kv_cache
        if all(s.seq in victims for s in kv_cache.remaining_sequences()):
            return True
        missing = kv_cache.num_admission_blocks(sequence)
        return missing + self._watermark <= self._num_free(victims)


class WholePromptPolicy(SarathiPolicy):
    """Base of the policies without chunked prefill: a prompt is computed in one micro-batch.

    Only a prompt longer than the token limit is split. A micro-batch has at most max_num_seqs /
    depth decodes, where depth is the number of micro-batches in flight (as in Vidur).
    """

    admission: type[AdmissionController] = PromptAdmission

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._max_num_seqs = config.max_num_seqs

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return the number of ready decodes, at most an equal share of max_num_seqs."""
        return min(load.num_ready_decodes, max(1, self._max_num_seqs // load.depth))

    def accepts_prompt(self, num_tokens: int, max_tokens: float) -> bool:
        """Return True for a prompt that fits."""
        return num_tokens <= max_tokens

    def size_chunk(self, start: int, max_tokens: int, budget: float) -> tuple[int, float]:
        """Return all tokens that fit into the micro-batch."""
        return max_tokens, max_tokens


class VllmPolicy(PrefillLeads, WholePromptPolicy):
    """Policy `vllm`: whole prompts as soon as their blocks are free, else decodes; never both.

    A decode that gets no block preempts the newest sequence. Source: the default scheduler of vLLM
    before chunked prefill ("Efficient Memory Management for Large Language Model Serving with
    PagedAttention", SOSP'23), as in Vidur (arXiv 2405.05465).
    """


class CappedPromptPolicy(WholePromptPolicy):
    """Base of whole-prompt policies that limit the total prompt tokens of a micro-batch.

    A prompt longer than `prefill_batch_tokens` gets a micro-batch without other prompts.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._size = PrefillBatchSize(config)
        self.learns_step_times = self._size.is_measured
        self._prompt_budget: float = self._size.num_tokens
        """Prefill budget of the present micro-batch."""

    @property
    def prefill_batch_tokens(self) -> int:
        """Most tokens of several prompts in one micro-batch."""
        return self._size.num_tokens

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Learn how many tokens saturate the stages, unless the number is configured."""
        self._size.observe_step(work, seconds)

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return the limit of several prompts."""
        self._prompt_budget = self._size.num_tokens
        return self._prompt_budget

    def size_chunk(self, start: int, max_tokens: int, budget: float) -> tuple[int, float]:
        """Return all tokens of the first prompt, and of others those within the budget."""
        if budget < self._prompt_budget:
            # Fewer tokens than expected may be in the prefix cache.
            max_tokens = min(max_tokens, int(budget))
        return max_tokens, max_tokens


class DistServePolicy(PrefillLeads, CappedPromptPolicy):
    """Policy `distserve`: whole prompts in batches of up to L_m tokens first, decodes separately.

    L_m (`prefill_batch_tokens`) is the prompt length that saturates a prefill instance. A batch has
    at most max_num_seqs / depth decodes, where depth is the number of micro-batches in flight.
    Source: "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language
    Model Serving" (OSDI'24, arXiv 2401.09670), online scheduling.
    """
