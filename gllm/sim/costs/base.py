"""Interface of the simulator's cost models, their base classes and two simple models.

A cost model sees the work of a micro-batch, never the scheduling policy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple, Protocol, runtime_checkable

from gllm.scheduler.stage_work import StageWork

MEASURE_FURTHER = "measure further"


class TransferCost(NamedTuple):
    """Predicted time in seconds and size in bytes of one message on a network link."""

    occupancy_seconds: float
    """Time for which the link is busy with the message: size over bandwidth."""
    propagation_seconds: float = 0.0
    """Latency from then until the message arrives, during which the link is free."""
    num_bytes: int = 0
    """Size of the message in bytes; 0 if the cost model has times only."""

    @property
    def total_seconds(self) -> float:
        """Time from the start of the message until it arrives."""
        return self.occupancy_seconds + self.propagation_seconds

    @property
    def is_free(self) -> bool:
        """True if the message arrives at once, without a link."""
        return not self.occupancy_seconds and not self.propagation_seconds


NO_TRANSFER = TransferCost(0.0)


class CostRangeError(ValueError):
    """Raised for a batch larger than a cost model was measured for; the message names the range."""


def make_range_error(
    source: str, name: str, value: float, low: float, high: float, fix: str = MEASURE_FURTHER
) -> CostRangeError:
    """Return the error for a value above a cost model's measured range.

    Args:
        source: Name of the measurement, such as "the profile".
        name: Name of the quantity, such as "tokens".
        value: The value that is too large.
        low: Smallest measured value.
        high: Largest measured value.
        fix: Advice for how to measure larger values.
    """
    return CostRangeError(
        f"{source}: {name} is {value:g}, but was measured from {low:g} to {high:g}, and this cost "
        f"model does not extrapolate: keep requests and micro-batches within, {fix}, or use "
        "another cost model"
    )


class MeasuredRanges:
    """Measured range of each input of a cost model; clamps smaller values and rejects larger ones.

    Args:
        ranges: Smallest and largest measured value of each quantity by name, both inclusive.
        source: Name of the measurement in error messages, such as "the profile".
        fixes: Advice for how to measure larger values, by name of the quantity; default: "measure
            further".
    """

    def __init__(
        self,
        ranges: Mapping[str, tuple[float, float]],
        source: str,
        fixes: Mapping[str, str] | None = None,
    ) -> None:
        self.ranges = dict(ranges)
        self._source = source
        self._fixes = fixes or {}
        self.num_below: dict[str, int] = {}
        """Number of values below the range, by name of the quantity."""

    def clamp(self, name: str, value: float) -> float:
        """Return a value, or the smallest measured one if it is below the range.

        Raises:
            CostRangeError: The value is above the range.
        """
        low, high = self.ranges[name]
        if value > high:
            fix = self._fixes.get(name, MEASURE_FURTHER)
            raise make_range_error(self._source, name, value, low, high, fix)
        if value < low:
            self.num_below[name] = self.num_below.get(name, 0) + 1
            return low
        return value


class CostModel(ABC):
    """Base class of cost models, which predict the step and transfer times of a simulated pipeline.

    All times are in seconds. By default the driver and the links take no time, and batches have no
    size limit. Models fitted to measurements raise CostRangeError for larger batches than were
    measured; a smaller batch takes as long as the smallest measured one, and is counted.
    """

    _ranges = MeasuredRanges({}, "")

    @property
    def ranges(self) -> Mapping[str, tuple[float, float]]:
        """Smallest and largest measured value, by name of the quantity; empty without limits."""
        return self._ranges.ranges

    @property
    def num_below_range(self) -> Mapping[str, int]:
        """Number of predictions below the measured range, by name of the quantity."""
        return self._ranges.num_below

    @abstractmethod
    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time in which a stage computes a micro-batch that it starts at `now`."""

    def min_stage_seconds(self, stage: int, work: StageWork | None = None) -> float:
        """Return a lower bound of `stage_seconds` at any time, of one micro-batch or of all.

        A cluster lets an engine wait while it certainly has nothing to report.
        """
        return 0.0

    def arrival_seconds(self, stage: int) -> float:
        """Return the seconds that each arriving request adds to the running step of a stage."""
        return 0.0

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of sending the activations from `stage` to the next one."""
        return NO_TRANSFER

    def plan_seconds(self, work: StageWork) -> float:
        """Return the driver's time from the schedule until the plan is sent."""
        return 0.0

    def plan_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of sending the plan from the driver to a stage."""
        return NO_TRANSFER

    def sample_seconds(self, work: StageWork) -> float:
        """Return the time from a single stage's end until its tokens are sampled."""
        return 0.0

    def return_seconds(self, work: StageWork) -> float:
        """Return the time from the last stage's end until its result is sent, with sampling."""
        return 0.0

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of sending the result from the last stage to the driver."""
        return NO_TRANSFER

    def request_transfer(self, is_busy: bool) -> TransferCost:
        """Return the cost of a request's way from the client through the frontend to the driver.

        Args:
            is_busy: True if a micro-batch is in flight when the client sends it.
        """
        return NO_TRANSFER

    def delivery_seconds(self, num_tokens: int) -> float:
        """Return the time from the commit of so many tokens until the client has one of them."""
        return 0.0


@runtime_checkable
class OperatorCostModel(Protocol):
    """Protocol of cost models that break a stage's time down by operator class (attention, ...)."""

    def operator_seconds(self, stage: int, work: StageWork) -> Mapping[str, float]:
        """Return the time of each class of operators, which add up to `stage_seconds`."""


class DelegatingCostModel(CostModel):
    """Base class of cost models that wrap another cost model and change some of its predictions.

    Args:
        cost: The wrapped cost model.
    """

    def __init__(self, cost: CostModel) -> None:
        self._cost = cost
        self._ranges = cost._ranges

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the wrapped model."""
        return self._cost.stage_seconds(stage, work, now)

    def min_stage_seconds(self, stage: int, work: StageWork | None = None) -> float:
        """Return 0, because changed predictions may be below those of the wrapped model."""
        return 0.0

    def arrival_seconds(self, stage: int) -> float:
        """Return the time of the wrapped model."""
        return self._cost.arrival_seconds(stage)

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of the wrapped model."""
        return self._cost.activation_transfer(stage, work)

    def plan_seconds(self, work: StageWork) -> float:
        """Return the time of the wrapped model."""
        return self._cost.plan_seconds(work)

    def plan_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of the wrapped model."""
        return self._cost.plan_transfer(stage, work)

    def sample_seconds(self, work: StageWork) -> float:
        """Return the time of the wrapped model."""
        return self._cost.sample_seconds(work)

    def return_seconds(self, work: StageWork) -> float:
        """Return the time of the wrapped model."""
        return self._cost.return_seconds(work)

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of the wrapped model."""
        return self._cost.return_transfer(work)

    def request_transfer(self, is_busy: bool) -> TransferCost:
        """Return the cost of the wrapped model."""
        return self._cost.request_transfer(is_busy)

    def delivery_seconds(self, num_tokens: int) -> float:
        """Return the time of the wrapped model."""
        return self._cost.delivery_seconds(num_tokens)


class DecodeOnlyCostModel(DelegatingCostModel):
    """Cost model wrapper for a decode engine: prefill takes no time, since KV cache is fetched.

    Args:
        cost: The wrapped cost model.
    """

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the decodes of a micro-batch."""
        if not work.num_decodes:
            return 0.0
        if work.prefill_chunks:
            work = work._replace(num_tokens=work.num_decodes, prefill_chunks=())
        return self._cost.stage_seconds(stage, work, now)


class ConstantCostModel(CostModel):
    """Cost model in which all micro-batches take the same time.

    Args:
        stage: Time of a micro-batch on each stage, in seconds.
        link: Time for which its activations occupy each link between stages, in seconds.
    """

    def __init__(self, stage: float, link: float = 0.0) -> None:
        self._stage = stage
        self._link = link

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the constant stage time."""
        return self._stage

    def min_stage_seconds(self, stage: int, work: StageWork | None = None) -> float:
        """Return the constant stage time."""
        return self._stage

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the constant occupancy of the link."""
        return TransferCost(self._link)
