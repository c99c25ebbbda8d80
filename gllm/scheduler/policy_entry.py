"""Policies outside the registry: entries `module:Class`, imported when they are resolved."""

import importlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

BASELINE_ENTRIES: Mapping[str, str] = MappingProxyType(
    {
        "throttle-no-wt": "experiments.policies.throttle_ablation:NoWaitingTokensPolicy",
        "throttle-no-ut": "experiments.policies.throttle_ablation:NoFreeCachePolicy",
        "orca+": "experiments.policies.orca_plus:OrcaPlusPolicy",
        "lightllm": "experiments.policies.lightllm:LightLlmPolicy",
        "fastertransformer": "experiments.policies.fastertransformer:FasterTransformerPolicy",
    }
)
"""Entries by the short names that step logs, profiles and the pages of experiments have."""

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
    """Return the entry of a short name; any other name as it is."""
    return BASELINE_ENTRIES.get(name, name)


def load_policy(entry: str, flag: str = "--policy") -> Any:
    """Import and return the policy class of an entry `module:Class`.

    Args:
        entry: The entry.
        flag: The flag that has it, for errors.

    Raises:
        ValueError: There is no such class, or it is no policy; the message names the fix.
    """
    name, _, class_name = entry.partition(":")
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        raise ValueError(
            f"{flag} {entry}: module {name} cannot be imported ({error}): run `python -m gllm` "
            "in the folder that has it, or add this folder to PYTHONPATH"
        ) from error
    policy = getattr(module, class_name, None)
    if not isinstance(policy, type):
        names = ", ".join(sorted(n for n, member in vars(module).items() if _is_policy(member)))
        raise ValueError(
            f"{flag} {entry}: module {name} has no class {class_name}: choose from "
            f"{names or 'another module, this one has no policy'}"
        )
    if missing := [method for method in POLICY_METHODS if not hasattr(policy, method)]:
        raise ValueError(
            f"{flag} {entry}: class {class_name} of module {name} lacks {', '.join(missing)}: "
            "derive it from gllm.scheduler.policy.TokenBudgetPolicy"
        )
    return policy


def _is_policy(member: object) -> bool:
    return isinstance(member, type) and all(hasattr(member, name) for name in POLICY_METHODS)
