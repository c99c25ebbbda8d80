"""Interface of a router's engines: their rows in reports, and the commands of an operator."""

from typing import Protocol

import msgspec

from gllm.routing.lengths.accuracy import BucketAccuracy


class EngineRow(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """State, load and counters of one engine behind a router, for GET /engines."""

    name: str
    role: str
    """mixed, prefill or decode."""
    state: str
    """loading, ready, recovering, draining, ejected or dead."""
    cause: str
    """Reason of the state; empty if the engine is ready."""
    address: str
    """Address of the connection's other end."""
    version: str
    """Version of gllm."""
    attached_seconds: float
    """Time since the engine attached."""
    silent_seconds: float
    """Time since its last message."""
    stats: dict[str, float]
    """Its scheduler's counters by name (SchedulerStats), over the requests of all its routers."""
    num_kv_blocks: int
    block_size: int
    num_stages: int
    num_requests: int
    """Requests of this router that it runs."""
    num_dispatched: int
    """Requests that this router has sent to it, those sent again included."""
    weight: float
    """Share of the requests that it would get normally: below 1 after it was ejected for failures,
    0 while it is ejected."""
    has_kv_transfer: bool
    """True if it gives KV blocks to other engines and fetches theirs at present."""


class RouterTotals(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Counters of a router since its start: migrated and refused requests, lost engines."""

    policy: str
    num_parked: int
    """Requests that wait for an engine."""
    held_requests: int
    """New requests that have waited for a heartbeat, or for an engine with room, although there
    were engines."""
    placement_heartbeat: float
    """Seconds for which new requests are collected and placed together; 0: none are."""
    migrations: dict[str, int]
    """Requests that were taken to another engine after they had been dispatched, by cause."""
    kv_checkpoints: int
    """Copies of running requests' KV to other engines that were started."""
    rebalancing_seconds: float
    """Seconds that requests of the cause `rebalanced` have waited for their next token, summed."""
    lost_engines: dict[str, int]
    """Ends of engines' connections, by kind: drained or lost."""
    refused_engines: int
    """Engines that were refused, such as those of another model."""
    refused_peers: int
    """Connections refused before they announced an engine, such as those without the secret."""
    shed_requests: dict[str, int]
    """Requests refused because no engine was likely to meet their SLO, by reason."""
    inexact_migrations: int
    """Requests that continued after their first tokens on an engine with other dtypes or kernels,
    because none with equal ones was attached; the rest of their text may differ."""
    stale_outputs: int
    """Tokens that arrived from an engine after their request had been taken elsewhere."""
    preset: str
    """Policy that chooses separate engines for prefill and decode; empty without."""
    decode_choice: str
    """When the router chooses the decode engine: at arrival, first_chunk or prefill_end."""
    flips: bool
    """True if idle engines are switched between the roles prefill and decode."""
    role_changes: dict[str, int]
    """Number of role changes that this router has commanded, by new role."""
    length_predictor: str
    """Name or file of the predictor of output lengths."""
    output_lengths: list[BucketAccuracy]
    """Outputs that have ended by bucket of their length, and how many were predicted right."""


class ScaleStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Autoscaling decision of a router: number of engines that should run, and which to drain."""

    is_leader: bool
    """True if the decision counts: all engines name this router their leader, or there are none."""
    num_wanted: int
    """Engines that should run, draining ones not counted."""
    drain: list[str]
    """Engines that should get no more requests."""
    undrain: list[str]
    """Draining engines that are needed again."""
    removable: list[str]
    """Draining engines without requests, which may be stopped."""
    rate: float
    """Requests per second since the last change of the rate."""
    engine_rate: float | None
    """Requests per second that one engine sustains; None while it is unknown."""
    startup_seconds: float
    """Expected seconds from the start of a new engine until it serves."""


class WorkloadMeans(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean request rate, prompt length and output length of consecutive requests."""

    rate: float
    """Requests per second."""
    prompt_tokens: float
    """Mean prompt length in tokens."""
    output_tokens: float
    """Mean number of output tokens, of all choices of a request."""


class WorkloadShiftStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lasting change of a router's request rate or lengths, with the means before and after."""

    quantities: list[str]
    """Means that have shifted: prompt tokens, output tokens, seconds between arrivals."""
    before: WorkloadMeans
    """Means before the shift."""
    after: WorkloadMeans
    """Means of the window that ended with the shift."""


class WorkloadStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean rate and lengths of a router's requests, and the latest lasting change of them."""

    is_leader: bool
    """True if all engines name this router their leader, or there are none."""
    num_samples: int
    """Requests whose lengths were counted."""
    num_shifts: int
    """Shifts since the start of the router."""
    profile: WorkloadMeans | None
    """Means since the running plan was adopted; None while they are measured."""
    shift: WorkloadShiftStatus | None
    """The latest shift; None before the first."""


class UnknownEngineError(Exception):
    """The router has no connected engine with this name."""


class EngineRoles(Protocol):
    """Interface to switch a router's engines between the roles mixed, prefill and decode."""

    def set_role(self, name: str, role: str) -> str:
        """Command an engine to take another role; its running requests continue.

        The role is shown once the engine has announced it.

        Args:
            name: name of a connected engine.
            role: mixed, prefill or decode.

        Returns:
            The role that it has announced last.

        Raises:
            UnknownEngineError: No engine has this name.
        """


class EngineScaling(Protocol):
    """Interface to read the autoscaling decision of a router."""

    def status(self) -> ScaleStatus | None:
        """Return the latest scaling decision; None without autoscaling."""


class WorkloadReport(Protocol):
    """Interface to read the mean rate and lengths of a router's requests, and changes of them."""

    def status(self) -> WorkloadStatus | None:
        """Return mean lengths and the latest shift; None unless shifts are detected."""

    def lengths(self) -> list[tuple[int, int]] | None:
        """Return (prompt tokens, output tokens) of the latest requests, in order of arrival.

        None unless the router detects shifts.
        """

    def reset_profile(self) -> bool:
        """Measure new reference means from the next requests.

        Returns:
            False if shifts are not detected.
        """


class FleetControl(Protocol):
    """Interface to inspect and control the engines of a router: drain, roles, scaling, workload."""

    @property
    def roles(self) -> EngineRoles:
        """Roles of the engines."""

    @property
    def scaling(self) -> EngineScaling:
        """Autoscaling of the engines."""

    @property
    def workload(self) -> WorkloadReport:
        """Workload statistics of the requests."""

    def engines(self) -> list[EngineRow]:
        """Return state and counters of the attached engines, by name."""

    def totals(self) -> RouterTotals:
        """Return the router's counters."""

    def drain_engine(self, name: str, migrates: bool, is_scaling: bool = False) -> int:
        """Send no new requests to an engine; return the number of its running requests.

        Autoscaling leaves the engine drained until `undrain_engine`, unless the drain is its own.

        Args:
            name: name of a connected engine.
            migrates: move its running requests to other engines at once; otherwise they finish
                there.
            is_scaling: the drain is autoscaling's, not an operator's.

        Raises:
            UnknownEngineError: No engine has this name.
        """

    def undrain_engine(self, name: str) -> None:
        """Send requests to a drained engine again. Raises UnknownEngineError."""
