"""Policy `distserve`: prompts in batches of L_m tokens, decodes in batches of their own.

Source: "DistServe: Disaggregating Prefill and Decoding for Goodput-optimized Large Language Model
Serving" (OSDI'24, arXiv 2401.09670), online scheduling: L_m is the prompt length that saturates a
prefill instance. An instance that does both runs waiting prompts before decodes.
"""

from gllm.scheduler.policies.capped_prompts import CappedPromptPolicy
from gllm.scheduler.policy import PrefillLeads


class DistServePolicy(PrefillLeads, CappedPromptPolicy):
    """Prompts up to L_m tokens first, or decodes up to max_num_seqs / depth."""
