"""Search for the last integer at which a monotone predicate holds.

Integers stand for the rates of a grid, sizes of batches or numbers of engines.
"""

from collections.abc import Callable

Predicate = Callable[..., bool]
"""Called with an integer, and with those that the search may need after it, so that they can be
computed at the same time."""


def bisect_last(holds: Predicate, low: int, high: int) -> int:
    """Find by bisection an integer at which a predicate is true, but false at the next integer.

    Args:
        holds: The predicate; assumed to be true at `low` and false at `high`, without a call.
        low: Lower end of the search.
        high: Upper end of the search, above `low`.
    """
    while high - low > 1:
        middle = (low + high) // 2
        if holds(middle, (middle + high) // 2, (low + middle) // 2):
            low = middle
        else:
            high = middle
    return low


def find_last(holds: Predicate, start: int, step: int, least: int, most: int) -> int | None:
    """Return the largest integer at which a monotone predicate is true.

    It must be true up to some integer and false above. The search doubles its step from a start
    value until the predicate changes, then bisects.

    Args:
        holds: The predicate.
        start: First integer to try.
        step: First step.
        least: Lower limit of the result.
        most: Upper limit of the result; if it is returned, the predicate may be true above it.

    Returns:
        The integer; None if the predicate is false at `least`.
    """
    direction = 1 if holds(start, start + step, start - step) else -1
    index = start
    while index != (end := most if direction > 0 else least):
        following = min(max(index + direction * step, least), most)
        if holds(following, following + direction * 2 * step) != (direction > 0):
            return bisect_last(holds, *sorted((index, following)))
        index, step = following, 2 * step
    return end if direction > 0 else None
