"""Goodput: the highest request rate at which enough requests meet their latency limits.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 4.1 and simu_prefill/simu_decode of its
artifact, here with the joint test of both limits.
"""

from collections.abc import Callable

TARGET_ATTAINMENT = 0.9
"""Share of requests that meet their limits at the goodput."""
MAX_DOUBLINGS = 20


def find_goodput(
    attainment: Callable[[float], float],
    highest_rate: float,
    precision: float,
    target: float = TARGET_ATTAINMENT,
) -> float:
    """Return the highest rate that attains the target, by bisection; 0 if none is found.

    Attainment is assumed to fall with the rate.

    Args:
        attainment: Returns the share (0..1) of requests within their limits at a rate per second.
        highest_rate: First upper end of the search, which doubles as long as it attains the target.
        precision: Requests per second by which the result may be too low.
        target: Required share, 0..1.

    Raises:
        ValueError: An argument is out of range, or no rate misses the target.
    """
    if highest_rate <= 0 or precision <= 0 or not 0 < target <= 1:
        raise ValueError(
            f"highest_rate {highest_rate}, precision {precision}, target {target}: the first two "
            "must be above 0, the target above 0 and at most 1"
        )
    low, high = 0.0, highest_rate
    for _ in range(MAX_DOUBLINGS):
        if attainment(high) < target:
            break
        low, high = high, 2 * high
    else:
        raise ValueError(f"every rate up to {low} attains {target}: set tighter limits")
    while high - low > precision:
        middle = (low + high) / 2
        if attainment(middle) >= target:
            low = middle
        else:
            high = middle
    return low
