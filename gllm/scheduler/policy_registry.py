"""The table of policies.

Owns their names, which gllm.scheduler.config.POLICY_NAMES repeats for the command line. Knows
nothing of what they do.
"""

from collections.abc import Callable

from gllm.scheduler.balance_policy import BalancePolicy
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policy import (
    PaperThrottlePolicy,
    PrefillFirstPolicy,
    SarathiPolicy,
    SchedulingPolicy,
    ThrottlePolicy,
)

POLICIES: dict[str, Callable[[SchedulerConfig], SchedulingPolicy]] = {
    "throttle": ThrottlePolicy,
    "throttle-paper": PaperThrottlePolicy,
    "throttle-no-wt": lambda config: PaperThrottlePolicy(config, by_waiting=False),
    "throttle-no-ut": lambda config: PaperThrottlePolicy(config, by_cache=False),
    "balance": BalancePolicy,
    "sarathi": SarathiPolicy,
    "prefill-first": PrefillFirstPolicy,
}
