"""Policy `splitwise`: at most 2,048 prompt tokens, then decodes in the remaining places.

Source: "Splitwise: Efficient Generative LLM Inference Using Phase Splitting" (ISCA'24, arXiv
2311.18677), machine-level scheduler; its simulator has the order, the limit of four preemptions and
the reservation of memory for the longest output.
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.kv_admission import LongestReservation
from gllm.scheduler.plan import ScheduledRow, count_tokens
from gllm.scheduler.policies.whole_prompt import CappedPromptPolicy
from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.sequence import Sequence

if TYPE_CHECKING:
    from gllm.scheduler.micro_batch import MicroBatchFiller

MAX_PREEMPTIONS = 4
"""Preemptions of a request after which prompts displace it no more."""


class SplitwisePolicy(CappedPromptPolicy):
    """Policy `splitwise`: prompts go before decodes; a decode is postponed at most four times.

    A micro-batch has up to `prefill_batch_tokens` tokens of prompts and decodes. A longer prompt
    runs alone, except for decodes that have been postponed four times. Source: "Splitwise"
    (ISCA'24, arXiv 2311.18677).
    """

    admission: type[AdmissionController] = LongestReservation

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return the limit of several prompts, less the decodes that precede them."""
        self._prompt_budget = max(1, self.prefill_batch_tokens - load.num_scheduled_decodes)
        return self._prompt_budget

    def fill(self, batch: "MicroBatchFiller", now: float) -> list[ScheduledRow]:
        """Return rows of often postponed decodes, then of prompts, then of the other decodes.

        The other decodes get the tokens of `prefill_batch_tokens` that prompts leave. While a
        decode lacks a block, decodes come first: a victim of preemption would take it back.
        """
        if batch.is_decode_stalled:
            return super().fill(batch, now)
        budget = self.decode_budget(batch.load())
        aged, others = split_by_age(batch.select_decodes())
        max_tokens = batch.max_num_batched_tokens
        rows, cost = batch.schedule_ready(aged, budget, max_tokens)
        prefill = batch.schedule_prefills(rows, cost, now)
        max_tokens -= count_tokens(rows)
        if prefill:
            limit = min(self.prefill_batch_tokens - count_tokens(rows), max_tokens)
            max_tokens = max(0, limit - count_tokens(prefill))
        late, _ = batch.schedule_ready(others, budget - cost, max_tokens)
        if prefill:
            scheduled = {row.seq for row in late}
            for sequence in others[: max(0, math.ceil(budget - cost))]:
                sequence.num_displacements += sequence.seq not in scheduled
        single_token_rows = [row for row in rows + late if row.num_tokens == 1]
        multi_token_rows = [row for row in rows + late if row.num_tokens > 1]
        return single_token_rows + multi_token_rows + prefill


def split_by_age(decodes: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Split ready decodes into those that run before the micro-batch's prompts and those after.

    A decode runs before the prompts once it has been postponed or preempted MAX_PREEMPTIONS times
    in total. The others are sorted: postponed ones first, then running ones, then new ones.

    Args:
        decodes: decodes that can run.
    """
    aged: list[Sequence] = []
    others: list[Sequence] = []
    for sequence in decodes:
        is_aged = sequence.num_displacements + sequence.num_preemptions >= MAX_PREEMPTIONS
        (aged if is_aged else others).append(sequence)
    others.sort(key=_place)
    return aged, others


def _place(sequence: Sequence) -> int:
    if sequence.num_displacements:
        return 0
    return 1 if sequence.num_scheduled_tokens > sequence.num_prefill_tokens else 2
