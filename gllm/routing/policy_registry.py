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


def check_placement_heartbeat(name: str, seconds: float, option: str) -> None:
    """Check that a policy places requests in heartbeats, if there is one.

    Args:
        name: key of POLICIES.
        seconds: length of a heartbeat; 0 for none.
        option: name of the option with the policy.

    Raises:
        ValueError: the policy places each request at its arrival; the message has the fix.
    """
    if seconds and not POLICIES[name].places_in_heartbeats:
        raise ValueError(
            f"placement_heartbeat is {seconds:g}, but policy {name} places requests at their "
            f"arrival: set {option} to aladdin, or leave placement_heartbeat out"
        )
