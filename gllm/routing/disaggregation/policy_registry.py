"""Registry of pair policies by name."""

from random import Random

from gllm.routing.disaggregation.distserve import DistServePairPolicy
from gllm.routing.disaggregation.flow import FlowPairPolicy, Routes
from gllm.routing.disaggregation.policy import PairPolicy
from gllm.routing.disaggregation.splitwise import SplitwisePairPolicy
from gllm.routing.disaggregation.tetri import TetriPairPolicy

PAIR_POLICIES: dict[str, type[PairPolicy]] = {
    "distserve": DistServePairPolicy,
    "splitwise": SplitwisePairPolicy,
    "tetri": TetriPairPolicy,
    "flow": FlowPairPolicy,
}
"""Pair policies by the name that users choose."""


def make_pair_policy(name: str, rng: Random, routes: Routes | None = None) -> PairPolicy:
    """Create the policy that chooses prefill and decode engines, by its name.

    Args:
        name: key of PAIR_POLICIES.
        rng: source of its random choices.
        routes: flow between engines, required by the policy `flow`.

    Raises:
        ValueError: the name is unknown, or `flow` has no routes.
    """
    if name not in PAIR_POLICIES:
        raise ValueError(f"pair policy {name!r} is none of {', '.join(PAIR_POLICIES)}")
    if routes and name != "flow":
        raise ValueError(f"pair policy {name} has no routes: choose flow")
    return FlowPairPolicy(rng, routes) if routes else PAIR_POLICIES[name](rng)
