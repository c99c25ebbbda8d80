"""Number of groups of workers that are scheduled apart, each by a scheduler of its own.

Requests are divided equally among the groups, whose workers are disjoint. A heartbeat of one
scheduler sorts its workers for each of its requests.

Source: "Aladdin" (arXiv 2405.06856), section on distributed scheduling; the rule is ours.
"""

from math import log2

MAX_SECONDS = 0.05
"""Time that the placement of a heartbeat may take."""


def predict_scheduling_seconds(
    num_workers: float, num_requests: float, worker_seconds: float
) -> float:
    """Return the time in which the requests of a heartbeat are placed: r a n log n.

    Args:
        num_workers: n.
        num_requests: r.
        worker_seconds: a: time per worker and comparison.
    """
    n = max(2.0, num_workers)
    return num_requests * worker_seconds * n * log2(n)


def num_scheduling_groups(
    num_workers: int,
    rate: float,
    heartbeat_seconds: float,
    worker_seconds: float,
    least_rate: float,
    max_seconds: float = MAX_SECONDS,
) -> int:
    """Return the fewest groups whose placements are fast enough; at least 1.

    A group gets at least the rate at which its number of workers can be predicted, so the groups
    may be too few to be fast.

    Args:
        num_workers: Workers of all groups.
        rate: Requests per second of all groups.
        heartbeat_seconds: Time between placements.
        worker_seconds: Time per worker and comparison.
        least_rate: R: least requests per second of a group.
        max_seconds: Longest time of a placement.
    """
    groups = 1
    while groups < num_workers and rate / (groups + 1) >= least_rate:
        num_requests = rate * heartbeat_seconds / groups
        seconds = predict_scheduling_seconds(num_workers / groups, num_requests, worker_seconds)
        if seconds <= max_seconds:
            break
        groups += 1
    return groups
