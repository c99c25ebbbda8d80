"""Reports on measured times of stages, workers and links."""

import msgspec

from gllm.messages.base import ProcessMessage, WireMessage
from gllm.scheduler.plan import StepTime
from gllm.scheduler.step_cost import StepCostCoefficients

STAGE_REPORT_SECONDS = 0.5
"""Seconds between two reports of the step times of a worker."""


class StageTimes(WireMessage, frozen=True):
    """Measured start and end of each step that a stage has computed since its last report.

    Measured on rank 0 of the stage, by time.monotonic().
    """

    stage: int
    steps: list[StepTime]
    complete_until: float
    """Every step that the stage began before this time has been reported; time.monotonic()."""


class BubbleReport(WireMessage, frozen=True):
    """Idle seconds of each stage while there was work for it (bubbles), since the pipeline's start.

    The definition is in gllm.observability.bubbles.
    """

    seconds: list[float] = []
    """Idle seconds of each stage while there was work for it."""
    work_seconds: float = 0.0
    """Seconds in which there was work for at least one stage."""


class StageUtilization(WireMessage, frozen=True):
    """Number of steps and busy seconds of one rank of a stage since its start."""

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
    late_seconds: float = 0.0
    """On an emulated device: seconds after the ends of steps until the worker noticed them."""


class StepCostReport(WireMessage, frozen=True):
    """Newly fitted coefficients of the linear step time model, for the slowest stage."""

    coefficients: StepCostCoefficients


class StageMeasured(ProcessMessage, frozen=True):
    """Measured time and memory of each layer of the model on one worker.

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
    """Measured bandwidth and round trip between two neighbouring stages.

    The defaults are those of stages on one machine.
    """

    bytes_per_second: float | None = None
    """Rate of a message that waits for nothing, without its propagation; None for no limit."""
    round_trip_seconds: float = 0.0
    """Least round trip, without queues."""
    min_bytes_per_second: float | None = None
    """Rate that the link has at least, 0 if nothing is known; None for no limit."""


class LinkTimes(WireMessage, frozen=True):
    """Bandwidths and round trips of a pipeline's links, sent by the head to the scheduler."""

    links: list[LinkTime]
    """From each stage but the last one to the next one."""
    driver_round_trips: list[float]
    """Round trip in seconds between the machines of the driver and of each stage."""
