"""Registry of routing policies by name."""

from random import Random

from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.routing.policies.deferred import DeferredPolicy
from gllm.routing.policies.predict import PredictPolicy
from gllm.routing.policies.prefix_aware import PrefixAwarePolicy
from gllm.routing.policies.session_affinity import SessionAffinityPolicy
from gllm.routing.policies.simple import (
    LeastRequestsPolicy,
    LeastTokensPolicy,
    PendingTokensPolicy,
    PowerOfTwoPolicy,
    RandomPolicy,
    RoundRobinPolicy,
)
from gllm.routing.policy import RoutingPolicy

POLICIES: dict[str, type[RoutingPolicy]] = {
    "predict": PredictPolicy,
    "prefix-aware": PrefixAwarePolicy,
    "session": SessionAffinityPolicy,
    "least-requests": LeastRequestsPolicy,
    "least-tokens": LeastTokensPolicy,
    "pending-tokens": PendingTokensPolicy,
    "power-of-two": PowerOfTwoPolicy,
    "round-robin": RoundRobinPolicy,
    "random": RandomPolicy,
    "aladdin": AladdinPolicy,
    "deferred": DeferredPolicy,
}
"""Policies by the name that users choose; the first one is the default."""


def make_policy(name: str, rng: Random) -> RoutingPolicy:
    """Create a routing policy by its name.

    Args:
        name: key of POLICIES.
        rng: source of its random choices.

    Raises:
        ValueError: the name is unknown.
    """
    if name not in POLICIES:
        raise ValueError(f"routing policy {name!r} is none of {', '.join(POLICIES)}")
    return POLICIES[name](rng)
