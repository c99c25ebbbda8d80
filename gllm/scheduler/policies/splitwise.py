"""Policy `splitwise`: at most 2,048 prompt tokens, then decodes in the remaining places.

Source: "Splitwise: Efficient Generative LLM Inference Using Phase Splitting" (ISCA'24, arXiv
2311.18677), machine-level scheduler; its simulator has the order, the limit of four preemptions and
the reservation of memory for the longest output.
"""

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.kv_admission import LongestReservation
from gllm.scheduler.policies.capped_prompts import CappedPromptPolicy
from gllm.scheduler.policy import SchedulerLoad


class SplitwisePolicy(CappedPromptPolicy):
    """Prompts displace decodes from a micro-batch, each of them at most four times.

    A micro-batch has as many tokens as several prompts may have, decodes included; a longer prompt
    runs beside the decodes that have been displaced four times.
    """

    displaces_decodes = True
    admission: type[AdmissionController] = LongestReservation

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return the limit of several prompts, less the decodes that precede them."""
        self._prompt_budget = max(1, self._max_tokens - load.num_scheduled_decodes)
        return self._prompt_budget
