"""Search for the last integer at which a monotone predicate holds.

Integers stand for the rates of a grid, sizes of batches or numbers of engines.
"""

from collections.abc import Callable

Predicate = Callable[..., bool]
"""Called with an integer, and with those that the search may need after it, so that they can be
computed at the same time."""


def bisect_last(holds: Predicate, low: int, high: int) -> int:
    """Return an integer at which a predicate is true while it is false at the next one.

    Args:
        holds: Assumed to be true at `low` and false at `high`, without a call.
        low: Below `high`.
        high: Upper end.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle, (middle + high) // 2, (low + middle) // 2):
            low = middle
        else:
            high = middle
    return low


def find_last(holds: Predicate, start: int, step: int, least: int, most: int) -> int | None:
    """Return the last integer at which a monotone predicate is true.

    Steps away from the start double until the predicate changes; a bisection ends the search.

    Args:
        holds: The predicate.
        start: First integer.
        step: First step.
        least: The result is not below it.
        most: The result is not above it; `most` itself: the predicate may hold at larger ones.

    Returns:
        The integer; None if the predicate does not hold at `least`.
    """
    direction = 1 if holds(start, start + step, start - step) else -1
    index = start
    while index != (end := most if direction > 0 else least):
        following = min(max(index + direction * step, least), most)
        if holds(following, following + direction * 2 * step) != (direction > 0):
            return bisect_last(holds, *sorted((index, following)))
        index, step = following, 2 * step
    return end if direction > 0 else None
