"""Reports of stages and the driver about their use of time."""

from gllm.messages.base import WireMessage
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
