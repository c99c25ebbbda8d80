"""Available parallelism: the number of stages that the present work could keep busy.

Reports of bubbles use it: a stage that is idle though work was there for it has a bubble.
"""

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.in_flight import InFlightPlans
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.queues import SequenceQueues


class ParallelismGauge:
    """Counts the stages that the work of a scheduler could keep busy with any plans."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        admission: AdmissionController,
        queues: SequenceQueues,
    ) -> None:
        self._num_stages = config.stages
        self._min_prefill_tokens = config.min_prefill_tokens
        self._kv_cache = kv_cache
        self._admission = admission
        self._queues = queues

    def count(self, in_flight: InFlightPlans) -> int:
        """Return the number of stages.

        One stage per sequence in decode, per prefill chunk in flight, and per #MinP waiting tokens
        if these fit in the cache.
        """
        tally, num_stages = self._queues.tally, self._num_stages
        decoding = tally.decoding_seqs
        count = len(decoding)
        if count >= num_stages:
            return num_stages
        rows = (row for plan in in_flight.plans for row in plan.rows)
        count += sum(row.seq not in decoding for row in rows)
        if count < num_stages and self._can_prefill():
            count += -(-tally.num_waiting_tokens // self._min_prefill_tokens)
        return min(count, num_stages)

    def _can_prefill(self) -> bool:
        """Return True if the first sequence of the prefill queue could get a chunk now."""
        head = self._queues.head
        if head is None or head.is_fetch_pending or not self._kv_cache.can_extend_prefill(head):
            return False
        return head.seq in self._kv_cache.running or self._admission.is_admissible(head)
