"""Report of an engine on one of its machines, for GET /nodes, `gllm nodes` and metrics.

The errors of a drain are here too, because the runtime raises them and the API handles them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.nodes import LinkState, NodeLoad

NODE_STATES = ("member", "spare", "draining", "lost", "left")
"""Values of NodeReport.state."""


class UnknownNodeError(Exception):
    """Error: no machine of the engine has the given name."""


class NodeDrainError(Exception):
    """Error: a machine cannot be drained; the message says why."""


class NodeReport(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State, hardware, load and connections of a machine of an engine; unknown values are null."""

    name: str
    """Unique among the machines of the engine."""
    state: Annotated[str, Meta(extra_json_schema={"enum": list(NODE_STATES)})]
    rank: int | None = None
    """Node rank; null for a machine that joined without one."""
    host_name: str = ""
    system: str = ""
    """Name and version of the operating system."""
    version: str = ""
    """Version of gllm."""
    address: str = ""
    """IP address of the machine's interface towards the head; empty for the head."""
    devices: list[str] = []
    """Names of the GPUs, or of the emulated devices of its stages; empty if the workers compute on
    the CPU."""
    load: NodeLoad = NodeLoad()
    stages: list[int] = []
    """Stages with workers on the machine, ascending."""
    round_trip_seconds: float | None = None
    """Least round trip of the last heartbeats between the head and the machine."""
    clock_offset_seconds: float | None = None
    """Clock of the machine minus that of the head."""
    links: list[LinkState] = []
    """Data connections of the machine."""
    last_cause: str = ""
    """Cause of the last loss of the machine; empty for none."""
    num_losses: int = 0
    """Number of times that the head lost the machine."""
