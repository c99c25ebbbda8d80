"""Continuous functions that are linear between measured points."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise


class PiecewiseLinear:
    """Continuous function that is linear between given points (knots).

    Below the first knot the function is constant; above the last one the last segment continues.

    Args:
        knots: Arguments in ascending order, at least two.
        values: Value at each knot.

    Raises:
        ValueError: The knots do not ascend, or the numbers of knots and values differ.
    """

    def __init__(self, knots: Sequence[float], values: Sequence[float]) -> None:
        is_ascending = all(low < high for low, high in pairwise(knots))
        if len(knots) < 2 or len(knots) != len(values) or not is_ascending:
            raise ValueError(
                f"{len(knots)} knots {list(knots)[:4]} with {len(values)} values: pass at least "
                "two ascending knots and a value for each"
            )
        self.knots = tuple(map(float, knots))
        self.values = tuple(map(float, values))

    def __call__(self, argument: float) -> float:
        """Return the value at an argument."""
        knots, values = self.knots, self.values
        if argument <= knots[0]:
            return values[0]
        index = min(bisect_right(knots, argument), len(knots) - 1)
        low, high = knots[index - 1], knots[index]
        share = (argument - low) / (high - low)
        return values[index - 1] + share * (values[index] - values[index - 1])
