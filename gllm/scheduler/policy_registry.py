"""Registry of scheduling policies by name; gllm.scheduler.config.POLICY_NAMES lists the names."""

from collections.abc import Callable

from gllm.scheduler.balance_policy import BalancePolicy
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policies.distserve import DistServePolicy
from gllm.scheduler.policies.fastertransformer import FasterTransformerPolicy
from gllm.scheduler.policies.lightllm import LightLlmPolicy
from gllm.scheduler.policies.orca_plus import OrcaPlusPolicy
from gllm.scheduler.policies.splitwise import SplitwisePolicy
from gllm.scheduler.policies.tetri import TetriPolicy
from gllm.scheduler.policies.vllm import VllmPolicy
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
    "throttle-no-wt": lambda config: PaperThrottlePolicy(config, uses_waiting_tokens=False),
    "throttle-no-ut": lambda config: PaperThrottlePolicy(config, uses_free_cache=False),
    "balance": BalancePolicy,
    "sarathi": SarathiPolicy,
    "prefill-first": PrefillFirstPolicy,
    "vllm": VllmPolicy,
    "orca+": OrcaPlusPolicy,
    "lightllm": LightLlmPolicy,
    "fastertransformer": FasterTransformerPolicy,
    "distserve": DistServePolicy,
    "splitwise": SplitwisePolicy,
    "tetri": TetriPolicy,
}
