"""Groups of engines among which requests are divided, so that a placement looks at few engines.

Requests are divided equally among the groups, whose engines are disjoint. A placement sorts the
engines of one group.

Source: "Aladdin" (arXiv 2405.06856), section on distributed scheduling; the rule is ours.
"""

from collections.abc import Sequence
from hashlib import blake2b
from math import log2

from gllm.routing.arrival_rate import ArrivalRate, least_stable_rate

MAX_SECONDS = 0.05
"""Time that the placement of a heartbeat may take."""
HEARTBEAT_SECONDS = 1.0
WORKER_SECONDS = 4e-6
"""Time per engine and comparison, with 64 requests on each engine (`benchmarks.placement`)."""
STABLE_SECONDS = 120.0
"""Time in which the mean rate of a group has to be known: that after which fewer engines are wanted
(`--scale-down-seconds`)."""


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


class SchedulingGroups:
    """Division of a router's engines among groups, and the group of each request.

    Pure: time is an argument. An engine hashes to its group, so that few engines change theirs when
    the number of groups or of engines does.
    """

    def __init__(self) -> None:
        self.num_groups = 1
        self._rate: ArrivalRate | None = None
        self._turn = 0
        self._group_by_name: dict[str, int] = {}

    def on_request(self, num_engines: int, now: float) -> None:
        """Count a request, and set the number of groups by the rate.

        Args:
            num_engines: Engines that may get the request.
            now: Time in seconds.
        """
        if self._rate is None:
            self._rate = ArrivalRate(now)
        self._rate.observe(1, now)
        num_groups = num_scheduling_groups(
            num_engines, self._rate.rate, HEARTBEAT_SECONDS, WORKER_SECONDS,
            least_stable_rate(STABLE_SECONDS),
        )  # fmt: skip
        if num_groups != self.num_groups:
            self.num_groups = num_groups
            self._group_by_name.clear()

    def divide(self, names: Sequence[str]) -> list[list[int]]:
        """Return the indexes of the engines of each group, that of the next request first.

        Args:
            names: Names of the engines. Groups without any of them are left out.
        """
        if self.num_groups == 1:
            return [[*range(len(names))]]
        if len(self._group_by_name) > 2 * len(names):
            # Engines that have gone.
            self._group_by_name.clear()
        groups: list[list[int]] = [[] for _ in range(self.num_groups)]
        for index, name in enumerate(names):
            group = self._group_by_name.get(name)
            if group is None:
                group = self._group_by_name[name] = _hash_to_group(name, self.num_groups)
            groups[group].append(index)
        self._turn = (self._turn + 1) % self.num_groups
        order = groups[self._turn :] + groups[: self._turn]
        return [each for each in order if each]


def _hash_to_group(name: str, num_groups: int) -> int:
    """Return the group of an engine: that with the highest hash together with its name."""
    return max(
        range(num_groups),
        key=lambda group: blake2b(f"{name}\0{group}".encode(), digest_size=8).digest(),
    )
