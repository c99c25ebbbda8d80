"""Policy `orca+`: iteration-level scheduling with whole prompts and a paged KV cache.

Source: "Orca: A Distributed Serving System for Transformer-Based Generative Models" (OSDI'22), with
vLLM's paged KV cache, as in Vidur (arXiv 2405.05465).
"""

from experiments.policies import VIDUR_BATCHED_TOKENS
from gllm.scheduler.policies.whole_prompt import WholePromptPolicy


class OrcaPlusPolicy(WholePromptPolicy):
    """Every ready decode, then whole prompts up to max_num_batched_tokens."""

    default_batched_tokens = VIDUR_BATCHED_TOKENS
