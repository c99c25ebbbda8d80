"""What stages and the driver report about their use of time."""

from gllm.messages.base import WireMessage
from gllm.scheduler.plan import StepTime


class StageTimes(WireMessage, frozen=True):
    """When a stage computed the steps since its last message."""

    stage: int
    steps: list[StepTime]
    until: float
    """Every step that it began before this time has been told."""


class BubbleReport(WireMessage, frozen=True):
    """What the pipeline lost since its start, as gllm.observability.bubbles defines it."""

    seconds: list[float] = []
    """Of each stage."""
    work_seconds: float = 0.0
    """Time in which there was work for at least one stage."""


class StageUtilization(WireMessage, frozen=True):
    """What a stage computed since its start."""

    stage: int
    steps: int
    busy_seconds: float
    """Time spent computing; on a device by its own clock, within each step's graph or layers and
    within its sampling."""
    host_seconds: float = 0.0
    """On a device: time that the host took to build steps and to put their work into its queues."""
    compilations: int = 0
    """On a device: kernels that were compiled since the stage is ready."""
