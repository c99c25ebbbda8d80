"""Link policies that serve comparisons alone: those of MoLink's papers and of systems beside it."""

from collections.abc import Mapping
from types import MappingProxyType

BASELINE_LINK_POLICIES: Mapping[str, str] = MappingProxyType(
    {
        "concurrent": "experiments.link_policies.concurrent:ConcurrentPolicy",
        "fixed-chunk": "experiments.link_policies.fixed_chunk:FixedChunkPolicy",
        "molink-paper": "experiments.link_policies.molink_paper:MolinkPaperPolicy",
    }
)
"""Entries, which simulated links take, by short name."""
