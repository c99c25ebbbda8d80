"""Policy `vllm`: whole prompts before decodes.

Source: the default scheduler of vLLM before chunked prefill ("Efficient Memory Management for Large
Language Model Serving with PagedAttention", SOSP'23), as in Vidur (arXiv 2405.05465).
"""

from gllm.scheduler.policies.whole_prompt import WholePromptPolicy
from gllm.scheduler.policy import PrefillLeads


class VllmPolicy(PrefillLeads, WholePromptPolicy):
    """Whole prompts whenever their blocks are free, decodes in between.

    A decode that gets no block preempts the newest sequence, which is computed again later: the
    victim that the scheduler selects for every policy.
    """
