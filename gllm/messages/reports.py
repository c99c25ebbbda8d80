"""Reports on the use of time, and on measured speeds of workers and of links."""

import msgspec

from gllm.messages.base import ProcessMessage, WireMessage
from gllm.scheduler.plan import StepTime
from gllm.scheduler.step_cost import StepCostCoefficients


class StageTimes(WireMessage, frozen=True):
    """Times of the steps that a stage computed since its last report, measured on its rank 0."""

    stage: int
    steps: list[StepTime]
    complete_until: float
    """Every step that the stage began before this time has been reported; time.monotonic()."""


class BubbleReport(WireMessage, frozen=True):
    """Idle time of the pipeline since its start, as defined in gllm.observability.bubbles."""

    seconds: list[float] = []
    """Idle seconds of each stage while there was work for it."""
    work_seconds: float = 0.0
    """Seconds in which there was work for at least one stage."""


class StageUtilization(WireMessage, frozen=True):
    """Totals of a rank of a stage since its start."""

    stage: int
    num_steps: int
    busy_seconds: float
    """Time spent computing. On a device it is measured by the device's clock, within each step's
    graph or layers and within its sampling."""
    host_seconds: float = 0.0
    """On a device: time in which the host built steps and queued their work."""
    num_compilations: int = 0
    """On a device: kernels compiled since the stage is ready."""
    rank: int = 0


class StepCostReport(WireMessage, frozen=True):
    """Report of the driver on a new fit of the time of a step on the slowest stage."""

    coefficients: StepCostCoefficients


class StageMeasured(ProcessMessage, frozen=True):
    """Measured time and memory of each layer of the model on a worker.

    A time is that of a decode step, plus a share of that of a prefill step
    (gllm/runtime/worker/probe.py).
    """

    stage: int
    rank: int
    layer_seconds: list[float]
    """Time of each layer of the model."""
    head_seconds: float
    """Time of the LM head; 0 unless the worker belongs to the last stage."""
    step_seconds: float
    """Time of a step in addition to that of its layers."""
    layer_bytes: list[int]
    """Weights of each layer, and its keys and values of the longest sequence."""
    embedding_bytes: int
    head_bytes: int
    """0 unless the worker belongs to the last stage."""
    available_bytes: int | None = None
    """Memory for both; None in the host's memory, which all stages share."""
    keeps_weights: bool = True
    """False if the process has to end to free the memory of the measurement."""
    cache_key: str = ""
    """Key under which the worker's machine keeps the measurement."""


class LinkTime(msgspec.Struct, frozen=True, array_like=True):
    """Measured speed of the link between two neighbouring stages; the defaults on one machine."""

    bytes_per_second: float | None = None
    """Rate of a message that waits for nothing, without its propagation; None for no limit."""
    round_trip_seconds: float = 0.0
    """Least round trip, without queues."""


class LinkTimes(WireMessage, frozen=True):
    """Report of the head to the driver on the links of its pipeline."""

    links: list[LinkTime]
    """From each stage but the last one to the next one."""
    driver_round_trips: list[float]
    """Round trip in seconds between the machines of the driver and of each stage."""
