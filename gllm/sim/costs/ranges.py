"""Ranges in which a cost was measured: refuse what is above, count what is below."""

from collections.abc import Mapping

from gllm.sim.costs.base import BaseCostModel, CostRangeError

MEASURE_FURTHER = "measure further"


class MeasuredRanges:
    """Smallest and largest measured value of each quantity, and a count of smaller ones.

    Args:
        ranges: Measured range of each quantity by name, both ends inclusive.
        source: Name of the measurement in messages.
        fixes: What measures larger values, by name of the quantity; default: MEASURE_FURTHER.
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
            raise above_range(self._source, name, value, low, high, fix)
        if value < low:
            self.num_below[name] = self.num_below.get(name, 0) + 1
            return low
        return value


class MeasuredCostModel(BaseCostModel):
    """Base of cost models that hold for measured ranges only."""

    _ranges: MeasuredRanges

    @property
    def ranges(self) -> Mapping[str, tuple[float, float]]:
        """Return the measured range of each quantity, both ends inclusive."""
        return self._ranges.ranges

    @property
    def num_below_range(self) -> Mapping[str, int]:
        """Return the number of predictions below each range."""
        return self._ranges.num_below


def above_range(
    source: str, name: str, value: float, low: float, high: float, fix: str = MEASURE_FURTHER
) -> CostRangeError:
    """Return the error for a value above the measured range, whose ends are inclusive."""
    return CostRangeError(
        f"{source}: {name} is {value:g}, but was measured from {low:g} to {high:g}, and this cost "
        f"model does not extrapolate: keep requests and micro-batches within, {fix}, or use "
        "another cost model"
    )
