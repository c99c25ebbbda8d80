"""Commands that the state machine `Recovery` returns and the supervisor executes, in list order."""

import msgspec

from gllm.recovery.node_layout import NodeShape
from gllm.recovery.placement import LOCAL_NODE, Placement


class Action(msgspec.Struct, frozen=True):
    """Base class of the commands that `Recovery` returns to the supervisor of the workers."""


class SpawnWorker(Action, frozen=True):
    """Start a worker process; a failed attempt is reported to `Recovery.on_exit`."""

    sender: int
    """Id of the new process, unique within a run."""
    place: int | None
    """Index of the (stage, rank) for which the worker is started; None for a standby worker."""
    node: str = LOCAL_NODE
    """Name of the machine on which the worker runs."""


class KillWorker(Action, frozen=True):
    """Kill a worker process; `Recovery.on_exit` is called once it has exited."""

    sender: int
    cause: str


class CloseInstances(Action, frozen=True):
    """Ask surviving workers to free their KV cache and connections, so that they can be used again.

    `Recovery.on_closed` is called for each.
    """

    epoch: int
    senders: list[int]


class MeasureWorkers(Action, frozen=True):
    """Let workers measure the time and memory of each layer; `on_measured` is called for each."""

    placement: Placement
    """The next epoch, with layers that are only preliminary."""


class ChooseLayers(Action, frozen=True):
    """Divide the layers among the stages by the workers' measurements; `change_layers` follows."""


class ChangeShape(Action, frozen=True):
    """Use other stages, or other nodes for the stages, from the next restart of the pipeline on."""

    shape: NodeShape


class PrepareLayers(Action, frozen=True):
    """Let workers load weights for a planned change of the stages while the engine serves.

    `on_prepared` is called for each; `on_preparation_failed` if a node cannot do it.
    """

    number: int
    """Number of the change."""
    placement: Placement
    """Layers of each worker after the change."""
    cause: str
    """Description of the change."""
    node: str | None = None
    """The only node whose workers load; None for all of the placement."""
    standby: int = 0
    """Standby worker that gets the layers of every worker of that node, of which it will replace
    one; 0 for a change, for which the workers of the placement load their own."""


class BeginChange(Action, frozen=True):
    """Announce that the pipeline stops now for a planned change of its stages."""

    kind: str
    """rebalanced, drained or joined."""
    cause: str


class DismissNode(Action, frozen=True):
    """Remove a node that has no stages any more from the cluster."""

    node: str
    cause: str


class AssignEpoch(Action, frozen=True):
    """Send each worker its layers and connections for a new start of the pipeline (epoch).

    `on_loaded` is called for each. An attempt that fails before a worker has got them is reported
    to `on_assignment_failed`.
    """

    placement: Placement
    keeps_kv_cache: bool = False
    """True if the workers may use the KV caches of their predecessors in the same places."""


class InitializeCaches(Action, frozen=True):
    """Let all workers allocate their KV cache; `on_ready` is called for each."""

    epoch: int


class WarmUp(Action, frozen=True):
    """Compute one token on all stages before requests are served; `on_warm` is called then."""

    epoch: int


class DetachClient(Action, frozen=True):
    """Stop sending requests to the pipeline; unfinished requests wait for its recovery."""

    cause: str


class AttachClient(Action, frozen=True):
    """Send the waiting requests to the recovered pipeline again."""

    epoch: int


class RejectParked(Action, frozen=True):
    """End the requests that wait for the recovery with an error, because it has taken too long."""

    cause: str


class GiveUp(Action, frozen=True):
    """End the engine, because it cannot be recovered; no other command follows."""

    cause: str
