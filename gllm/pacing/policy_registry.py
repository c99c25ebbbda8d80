"""Registry of link policies by name."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from gllm.options.entries import load_entry
from gllm.pacing.policies.molink import MolinkPolicy
from gllm.pacing.policies.serial import SerialPolicy
from gllm.pacing.traffic import LinkPolicy

LINK_POLICIES: Mapping[str, Callable[[], LinkPolicy]] = MappingProxyType(
    {
        "serial": SerialPolicy,
        "molink": MolinkPolicy,
    }
)
"""Factories of link policies by name."""
DEFAULT_LINK_POLICY = "molink"


def make_link_policy(name: str) -> LinkPolicy:
    """Create the policy that orders the messages of a link between pipeline stages.

    Args:
        name: name in LINK_POLICIES, or `module:Class` of a policy outside gllm.

    Raises:
        ValueError: there is no such policy.
    """
    if ":" in name:
        fix = "give it those of gllm.pacing.traffic.LinkPolicy"
        members = ("uses_slack", "sends_whole", "select")
        policy: LinkPolicy = load_entry("link policy", name, members, fix)()
        return policy
    if name not in LINK_POLICIES:
        raise ValueError(f"link policy {name!r} is none of {', '.join(LINK_POLICIES)}")
    return LINK_POLICIES[name]()
