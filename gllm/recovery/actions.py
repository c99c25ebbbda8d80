"""Actions that `Recovery` returns and the supervisor executes, in the order of the list."""

from dataclasses import dataclass

from gllm.recovery.node_layout import NodeShape
from gllm.recovery.placement import LOCAL_NODE, Placement


@dataclass(frozen=True, slots=True)
class SpawnWorker:
    """Start a worker process; an attempt that fails is reported by `on_exit`."""

    sender: int
    place: int | None
    """Index of the place for which the worker is started; None for a standby worker."""
    node: str = LOCAL_NODE
    """Name of the machine on which the worker runs."""


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill a worker process; `on_exit` follows once it is reaped."""

    sender: int
    cause: str


@dataclass(frozen=True, slots=True)
class CloseInstances:
    """Ask surviving workers to close their stage instances; `on_closed` follows for each."""

    epoch: int
    senders: list[int]


@dataclass(frozen=True, slots=True)
class MeasureWorkers:
    """Let workers measure their speed; `on_measured` follows for each."""

    placement: Placement
    """The next epoch, with layers that are only preliminary."""


@dataclass(frozen=True, slots=True)
class ChooseLayers:
    """Divide the layers by the workers' measurements; `change_layers` follows."""


@dataclass(frozen=True, slots=True)
class ChangeShape:
    """Note other stages, or other nodes of the stages, from the next epoch on."""

    shape: NodeShape


@dataclass(frozen=True, slots=True)
class PrepareLayers:
    """Let workers load the layers of a planned change beside the present ones.

    `on_prepared` follows for each; `on_preparation_failed` if a node cannot do it.
    """

    number: int
    """Number of the change."""
    placement: Placement
    """The next epoch, if nothing disturbs the change."""
    cause: str
    """Description of the change."""
    node: str | None = None
    """The only node whose workers load; None for all of the placement."""


@dataclass(frozen=True, slots=True)
class BeginChange:
    """Note that a planned change ends the present epoch, which serves."""

    kind: str
    """rebalanced, drained or joined."""
    cause: str


@dataclass(frozen=True, slots=True)
class DismissNode:
    """End the membership of a node that has no stages any more."""

    node: str
    cause: str


@dataclass(frozen=True, slots=True)
class AssignEpoch:
    """Assign a placement to its workers; `on_loaded` follows for each.

    An attempt that fails before a worker is told is reported by `on_assignment_failed`.
    """

    placement: Placement


@dataclass(frozen=True, slots=True)
class InitializeCaches:
    """Let all workers allocate their KV cache; `on_ready` follows for each."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Compute one token on all stages; `on_warm` follows."""

    epoch: int


@dataclass(frozen=True, slots=True)
class DetachClient:
    """Park the running requests."""

    cause: str


@dataclass(frozen=True, slots=True)
class AttachClient:
    """Submit the parked requests again."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RejectParked:
    """End the parked requests with an error, and refuse new ones until the engine is ready."""

    cause: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """End the engine; nothing follows."""

    cause: str


Action = (
    SpawnWorker
    | KillWorker
    | CloseInstances
    | MeasureWorkers
    | ChooseLayers
    | ChangeShape
    | PrepareLayers
    | BeginChange
    | DismissNode
    | AssignEpoch
    | InitializeCaches
    | WarmUp
    | DetachClient
    | AttachClient
    | RejectParked
    | GiveUp
)
