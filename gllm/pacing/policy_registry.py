"""Registry of link policies by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gllm.pacing.policies.concurrent import ConcurrentPolicy
from gllm.pacing.policies.fixed_chunk import FixedChunkPolicy
from gllm.pacing.policies.molink import MolinkPolicy
from gllm.pacing.policies.molink_paper import MolinkPaperPolicy
from gllm.pacing.policies.serial import SerialPolicy
from gllm.pacing.traffic import LinkPolicy

LINK_POLICIES: Mapping[str, Callable[[], LinkPolicy]] = MappingProxyType(
    {
        "serial": SerialPolicy,
        "concurrent": ConcurrentPolicy,
        "fixed-chunk": FixedChunkPolicy,
        "molink-paper": MolinkPaperPolicy,
        "molink": MolinkPolicy,
    }
)
"""Factories of link policies by name."""
DEFAULT_LINK_POLICY = "molink"


def make_link_policy(name: str) -> LinkPolicy:
    """Return a new policy of LINK_POLICIES.

    Raises:
        ValueError: There is no such policy.
    """
    if name not in LINK_POLICIES:
        raise ValueError(f"link policy {name!r} is none of {', '.join(LINK_POLICIES)}")
    return LINK_POLICIES[name]()
