"""A service of a cluster: its request, its processes, and its rates over the last seconds."""

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from operator import ge
from typing import Any, NamedTuple

from gllm.config.engine import EngineConfig
from gllm.deploy.cluster.selection import NodeRequirements, NodeSelection
from gllm.messages.services import ServiceReading
from gllm.options.field_types import FieldError

WINDOW_SECONDS = 10.0
"""Time over which rates are measured."""
INFERENCE_PARAMETERS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "max_model_len",
    "kv_cache_memory",
    "seed",
    "policy",
    "max_prefill_tokens",
    "min_prefill_tokens",
    "prefill_iterations",
    "max_num_batched_tokens",
    "max_num_seqs",
    "max_in_flight",
    "expected_output_tokens",
    "async_scheduling",
    "block_size",
    "prefix_cache",
)
"""Flags of `gllm serve`, with underscores, that a service may set. Flags with paths and addresses
are those of the node's owner, and the number of stages follows from the nodes."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class ServiceRequest:
    """Request to deploy an engine on a cluster: service name, model, nodes and engine parameters.

    Raises:
        FieldError: a field is invalid; the message names it and the fix.
    """

    name: str
    model: str
    """Model by its hub name, demo, or a folder that all nodes have."""
    requirements: NodeRequirements = field(default_factory=NodeRequirements)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """Engine parameters by name, of those in INFERENCE_PARAMETERS."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise FieldError(
                "service_name",
                f"service_name {self.name!r:.80} has to have 1 to 63 letters, digits, dots, "
                "hyphens and underscores, and begin with a letter or a digit",
            )
        if not self.model or not self.model.isprintable() or self.model.startswith("-"):
            raise FieldError("model_name", "model_name has to be the name or folder of a model")
        check_parameters(self.model, self.parameters)


def check_parameters(model: str, parameters: Mapping[str, Any]) -> None:
    """Check the engine parameters in a request to deploy a service.

    Args:
        model: name or folder of the model.
        parameters: values by name, such as max_model_len.

    Raises:
        FieldError: a parameter is unknown or has an invalid value; the message names it.
    """
    unknown = sorted(set(parameters) - set(INFERENCE_PARAMETERS))
    if unknown:
        raise FieldError(
            "inference_parameters",
            f"inference_parameters has {', '.join(map(repr, unknown))[:200]}, but may have "
            f"{', '.join(INFERENCE_PARAMETERS)}",
        )
    try:
        EngineConfig.from_options(model, **parameters)
    except ValueError as error:
        raise FieldError("inference_parameters", f"inference_parameters: {error}") from error


class ServiceRates(NamedTuple):
    """Measured requests and tokens per second of an engine, and utilization of its stages."""

    requests_per_second: float = 0.0
    prompt_tokens_per_second: float = 0.0
    generated_tokens_per_second: float = 0.0
    stages: tuple[float, ...] = ()
    """Share of time in which each stage computed, 0 to 1."""


class ServiceMeter:
    """Computes throughput of an engine from its counters, over a sliding time window."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, ServiceReading]] = deque()

    def add(self, reading: ServiceReading, now: float) -> None:
        """Add a reading; if a counter has decreased, the engine is new and the window is cleared.

        Args:
            reading: state and counters of the engine.
            now: time in seconds.
        """
        if self._readings and not _follows(reading, self._readings[-1][1]):
            self._readings.clear()
        self._readings.append((now, reading))
        while len(self._readings) > 2 and self._readings[1][0] <= now - WINDOW_SECONDS:
            self._readings.popleft()

    @property
    def rates(self) -> ServiceRates:
        """Rates over the window; 0 before there are two readings."""
        if len(self._readings) < 2:
            return ServiceRates()
        (begin, first), (end, last) = self._readings[0], self._readings[-1]
        seconds = end - begin
        if seconds <= 0:
            return ServiceRates()
        finished, failed, prompt, generated, *stages = (
            (after - before) / seconds
            for before, after in zip(_counters(first), _counters(last), strict=True)
        )
        busy = tuple(min(1.0, share) for share in stages)
        return ServiceRates(finished + failed, prompt, generated, busy)


def _counters(reading: ServiceReading) -> list[float]:
    """Return the counters of an engine: requests, tokens, and busy seconds per stage."""
    requests = reading.num_finished, reading.num_failed
    tokens = reading.num_prompt_tokens, reading.num_generated_tokens
    return [*requests, *tokens, *reading.stage_busy_seconds]


def _follows(later: ServiceReading, earlier: ServiceReading) -> bool:
    """Return True if two readings can be of the same engine with the same stages."""
    after, before = _counters(later), _counters(earlier)
    return len(after) == len(before) and all(map(ge, after, before))


class ServiceState(StrEnum):
    """State of a service (deployed engine), from starting to failed, as the API shows it."""

    STARTING = "starting"
    """Its processes start, or load the model."""
    READY = "ready"
    RECOVERING = "recovering"
    """Its engine recovers, or the node of its head is lost; requests wait."""
    MOVING = "moving"
    """Its processes end, because a node leaves, and start again on other nodes."""
    STOPPING = "stopping"
    """Its processes end, because it was deleted."""
    FAILED = "failed"


RUNNING_STATES = frozenset({ServiceState.STARTING, ServiceState.READY, ServiceState.RECOVERING})
"""States in which a service has an engine."""


@dataclass(slots=True)
class ServiceProcess:
    """State of one process of a deployed engine: its node, its rank and its restarts."""

    number: int
    service: str
    node: str
    rank: int
    is_started: bool = False
    """True once the command to start it was sent to the node."""
    is_ending: bool = False
    num_restarts: int = 0
    restart_at: float | None = None
    """Time at which the exited process is started again; None while it runs."""

    @property
    def is_entry(self) -> bool:
        """True for the process with the engine's API server and scheduler (rank 0)."""
        return self.rank == 0


@dataclass(slots=True)
class Service:
    """Engine deployed on a cluster: request, nodes, state, and latest counters of the engine."""

    request: ServiceRequest
    api_key: str
    selection: NodeSelection
    state: ServiceState = ServiceState.STARTING
    cause: str = ""
    """Cause of the state; empty for none."""
    url: str = ""
    """URL of its API; empty before the head's process has started."""
    head: str = ""
    """HOST:PORT at which nodes join its engine; empty as above."""
    ready_at: float | None = None
    """Time at which its engine was ready first; None before."""
    reading: ServiceReading = field(default_factory=lambda: ServiceReading("loading"))
    meter: ServiceMeter = field(default_factory=ServiceMeter)
    left_nodes: set[str] = field(default_factory=set)
    """Nodes of the selection that have left the running engine."""

    created: int = 0
    """Time of its deployment, in seconds since 1970."""

    def uptime_seconds(self, now: float) -> float:
        """Return the time since its engine was first ready; 0 before that and after a failure."""
        if self.ready_at is None or self.state not in RUNNING_STATES:
            return 0.0
        return now - self.ready_at

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of the nodes of its engine, the head first."""
        return tuple(name for name in self.selection.nodes if name not in self.left_nodes)
