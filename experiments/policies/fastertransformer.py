"""Policy `fastertransformer`: batches of requests that start together and end together.

Source: request-level batching as in NVIDIA FasterTransformer, as Vidur (arXiv 2405.05465) models
it. A pipeline has one batch per stage.
"""

from collections.abc import Container, Mapping

from experiments.policies import VIDUR_BATCHED_TOKENS
from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.policies.whole_prompt import WholePromptPolicy
from gllm.scheduler.policy import PrefillLeads
from gllm.scheduler.sequence import Sequence


class BatchAdmission(AdmissionController):
    """Admission to batches of fixed members, each with KV blocks for a text of full length.

    A batch is open for further prompts until its first decode. It then runs without changes until
    its last member has ended. All members decode in the same micro-batch.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        output_lengths: OutputLengths | None = None,
    ) -> None:
        super().__init__(config, kv_cache, output_lengths)
        max_num_seqs = min(
            config.max_num_seqs, config.num_blocks // -(-config.max_model_len // config.block_size)
        )
        self._max_num_batches = min(config.stages, max_num_seqs)
        self._max_batch_size = max_num_seqs // self._max_num_batches
        self._batch_ids: dict[int, int | None] = {}
        """Batch of each sequence that holds blocks."""
        self._open_batch: int | None = None
        """Batch that has not decoded yet."""
        self._num_batches = 0
        """Batches opened so far."""

    def is_admissible(self, sequence: Sequence, victims: Container[int] = ()) -> bool:
        """Return True if a waiting sequence may join the open batch, or open one.

        Args:
            sequence: a sequence without blocks.
            victims: sequence ids that would be preempted for it.
        """
        batches = self._members(victims)
        unassigned = batches.pop(None, [])
        members = batches.get(self._open_batch, []) if self._open_batch is not None else []
        if members or unassigned:
            return len(members) + len(unassigned) < self._max_batch_size
        return len(batches) < self._max_num_batches

    def on_scheduled(self, num_tokens: int) -> None:
        """Add the sequences that were admitted for a micro-batch to the open batch."""
        super().on_scheduled(num_tokens)
        running = self._kv_cache.running
        batch_ids = self._batch_ids
        self._batch_ids = {seq: batch for seq, batch in batch_ids.items() if seq in running}
        admitted = [seq for seq in running if seq not in self._batch_ids]
        if admitted and self._open_batch is None:
            self._open_batch = self._num_batches
            self._num_batches += 1
        self._batch_ids.update((seq, self._open_batch) for seq in admitted)

    def on_preempted(self, victim: Sequence) -> None:
        """Remove a preempted sequence from its batch."""
        super().on_preempted(victim)
        self._batch_ids.pop(victim.seq, None)

    def select_decodes(self, ready: Mapping[int, Sequence]) -> list[Sequence]:
        """Return the decodes of the first batch whose members are all ready."""
        batches = self._members()
        for sequence in ready.values():
            batch = self._batch_ids.get(sequence.seq)
            members = batches.get(batch, [])
            if members and all(member.seq in ready for member in members):
                if batch == self._open_batch:
                    self._open_batch = None
                return members
        return []

    def _members(self, victims: Container[int] = ()) -> dict[int | None, list[Sequence]]:
        """Return the unfinished sequences of each batch; None: admitted in this micro-batch."""
        batches: dict[int | None, list[Sequence]] = {}
        for sequence in self._kv_cache.remaining_sequences():
            if sequence.seq not in victims:
                batches.setdefault(self._batch_ids.get(sequence.seq), []).append(sequence)
        return batches


class FasterTransformerPolicy(PrefillLeads, WholePromptPolicy):
    """A new batch whenever one has ended and prompts wait, otherwise decodes of one batch."""

    default_batched_tokens = VIDUR_BATCHED_TOKENS
    admission: type[AdmissionController] = BatchAdmission

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        if config.kv_admission != "auto":
            raise ValueError(
                f"kv_admission is {config.kv_admission}, but FasterTransformerPolicy admits whole "
                "batches by its own rule: choose auto or another policy"
            )
