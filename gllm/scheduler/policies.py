"""The table of policies.

Owns their names, which gllm.scheduler.config.POLICY_NAMES repeats for the command line. Knows
nothing of what they do.
"""

from collections.abc import Callable

from gllm.scheduler.balance import Balance
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policy import PaperThrottle, Policy, PrefillFirst, Sarathi, Throttle

POLICIES: dict[str, Callable[[SchedulerConfig], Policy]] = {
    "throttle": Throttle,
    "throttle-paper": PaperThrottle,
    "throttle-no-wt": lambda config: PaperThrottle(config, by_waiting=False),
    "throttle-no-ut": lambda config: PaperThrottle(config, by_cache=False),
    "balance": Balance,
    "sarathi": Sarathi,
    "prefill-first": PrefillFirst,
}
