"""Policies outside the registry: entries `module:Class`, imported when they are resolved."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from gllm.options.entries import load_entry

BASELINE_ENTRIES: Mapping[str, str] = MappingProxyType(
    {
        "throttle-no-wt": "experiments.policies.throttle_ablation:NoWaitingTokensPolicy",
        "throttle-no-ut": "experiments.policies.throttle_ablation:NoFreeCachePolicy",
        "orca+": "experiments.policies.orca_plus:OrcaPlusPolicy",
        "lightllm": "experiments.policies.lightllm:LightLlmPolicy",
        "fastertransformer": "experiments.policies.fastertransformer:FasterTransformerPolicy",
    }
)
"""Entries `module:Class` by the short names in step logs, profiles and pages of experiments."""

POLICY_METHODS = (
    "fill",
    "leads_with_prefill",
    "accepts_prompt",
    "decode_budget",
    "decode_cost",
    "prefill_budget",
    "size_chunk",
    "observe_step",
)
"""Methods of gllm.scheduler.policy.SchedulingPolicy."""


def expand_policy(name: str) -> str:
    """Return the `module:Class` entry of a policy's short name; return other names unchanged."""
    return BASELINE_ENTRIES.get(name, name)


def load_policy(entry: str, flag: str = "--policy") -> Any:
    """Import and return the policy class that an entry `module:Class` names.

    Args:
        entry: module and class, separated by a colon.
        flag: command-line flag that the entry was given to, for error messages.

    Raises:
        ValueError: the class does not exist or is not a policy; the message says how to fix it.
    """
    fix = "derive it from gllm.scheduler.policy.TokenBudgetPolicy"
    return load_entry(flag, entry, POLICY_METHODS, fix)
