"""Registry of pair policies by name."""

from random import Random

from gllm.routing.disaggregation.distserve import DistServePairPolicy
from gllm.routing.disaggregation.policy import PairPolicy
from gllm.routing.disaggregation.splitwise import SplitwisePairPolicy
from gllm.routing.disaggregation.tetri import TetriPairPolicy

PAIR_POLICIES: dict[str, type[PairPolicy]] = {
    "distserve": DistServePairPolicy,
    "splitwise": SplitwisePairPolicy,
    "tetri": TetriPairPolicy,
}
"""Pair policies by the name that users choose."""


def make_pair_policy(name: str, rng: Random) -> PairPolicy:
    """Return a new pair policy.

    Args:
        name: of PAIR_POLICIES.
        rng: source of its random choices.

    Raises:
        ValueError: there is no such policy.
    """
    if name not in PAIR_POLICIES:
        raise ValueError(f"pair policy {name!r} is none of {', '.join(PAIR_POLICIES)}")
    return PAIR_POLICIES[name](rng)
