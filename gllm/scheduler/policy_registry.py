"""Registry of scheduling policies by name; gllm.scheduler.config.POLICY_NAMES lists the names."""

from collections.abc import Callable

from gllm.scheduler.balance_policy import BalancePolicy
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policies.splitwise import SplitwisePolicy
from gllm.scheduler.policies.tetri import TetriPolicy
from gllm.scheduler.policies.whole_prompt import DistServePolicy, VllmPolicy
from gllm.scheduler.policy import (
    PaperThrottlePolicy,
    PrefillFirstPolicy,
    SarathiPolicy,
    SchedulingPolicy,
)
from gllm.scheduler.policy_entry import load_policy
from gllm.scheduler.throttle_policy import ThrottlePolicy

POLICIES: dict[str, Callable[[SchedulerConfig], SchedulingPolicy]] = {
    "throttle": ThrottlePolicy,
    "throttle-paper": PaperThrottlePolicy,
    "balance": BalancePolicy,
    "sarathi": SarathiPolicy,
    "prefill-first": PrefillFirstPolicy,
    "vllm": VllmPolicy,
    "distserve": DistServePolicy,
    "splitwise": SplitwisePolicy,
    "tetri": TetriPolicy,
}


def create_policy(config: SchedulerConfig) -> SchedulingPolicy:
    """Create the scheduling policy that `config.policy` names.

    Raises:
        ValueError: `config.policy` is an entry `module:Class` whose class is not a policy.
    """
    create = POLICIES.get(config.policy) or load_policy(config.policy)
    policy: SchedulingPolicy = create(config)
    return policy
