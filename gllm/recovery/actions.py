"""Actions that `Recovery` returns and the supervisor executes, in the order of the list."""

import msgspec

from gllm.recovery.node_layout import NodeShape
from gllm.recovery.placement import LOCAL_NODE, Placement


class Action(msgspec.Struct, frozen=True):
    """Base class of the actions."""


class SpawnWorker(Action, frozen=True):
    """Start a worker process; an attempt that fails is reported by `on_exit`."""

    sender: int
    place: int | None
    """Index of the place for which the worker is started; None for a standby worker."""
    node: str = LOCAL_NODE
    """Name of the machine on which the worker runs."""


class KillWorker(Action, frozen=True):
    """Kill a worker process; `on_exit` follows once it is reaped."""

    sender: int
    cause: str


class CloseInstances(Action, frozen=True):
    """Ask surviving workers to close their stage instances; `on_closed` follows for each."""

    epoch: int
    senders: list[int]


class MeasureWorkers(Action, frozen=True):
    """Let workers measure their speed; `on_measured` follows for each."""

    placement: Placement
    """The next epoch, with layers that are only preliminary."""


class ChooseLayers(Action, frozen=True):
    """Divide the layers by the workers' measurements; `change_layers` follows."""


class ChangeShape(Action, frozen=True):
    """Use other stages, or other nodes of the stages, from the next epoch on."""

    shape: NodeShape


class PrepareLayers(Action, frozen=True):
    """Let workers load the layers of a planned change while the present epoch serves.

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


class BeginChange(Action, frozen=True):
    """Announce that a planned change ends the present epoch."""

    kind: str
    """rebalanced, drained or joined."""
    cause: str


class DismissNode(Action, frozen=True):
    """End the membership of a node that has no stages any more."""

    node: str
    cause: str


class AssignEpoch(Action, frozen=True):
    """Assign a placement to its workers; `on_loaded` follows for each.

    An attempt that fails before a worker is told is reported by `on_assignment_failed`.
    """

    placement: Placement


class InitializeCaches(Action, frozen=True):
    """Let all workers allocate their KV cache; `on_ready` follows for each."""

    epoch: int


class WarmUp(Action, frozen=True):
    """Compute one token on all stages; `on_warm` follows."""

    epoch: int


class DetachClient(Action, frozen=True):
    """Park the running requests."""

    cause: str


class AttachClient(Action, frozen=True):
    """Submit the parked requests to the driver again."""

    epoch: int


class RejectParked(Action, frozen=True):
    """End the parked requests with an error, because the recovery has taken too long."""

    cause: str


class GiveUp(Action, frozen=True):
    """End the engine; no other action follows."""

    cause: str
