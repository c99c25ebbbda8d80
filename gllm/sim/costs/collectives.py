"""Times of collectives among the tensor-parallel ranks of one stage, in seconds.

A link with a node type takes the times of all-reduces from Vidur's measurements on such nodes
(MLSys 2024, arXiv 2405.05465, `gllm/sim/data/README.md`); other links, and numbers of ranks that
were not measured, the formulas of Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH" (2005), section 4, and of Patarasu and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations" (2009), section 3 (ring). Alpha is a link's
latency, beta the inverse of its bandwidth; additions cost nothing.
"""

import csv
import gzip
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from math import ceil, log2
from statistics import median

from gllm.sim.hardware.links import NetworkLink

POINTS_PER_DOUBLING = 2
"""Sizes per doubling that measurements are summarized at."""


def all_reduce_seconds(num_bytes: float, ranks: int, link: NetworkLink) -> float:
    """Return the time of an all-reduce: each rank has `num_bytes` and gets the sum.

    Without a measurement, the faster of two algorithms: recursive doubling sends the whole tensor
    in each of log2(ranks) steps, which suits decodes; the ring sends parts of it in twice ranks - 1
    steps, which suits prefills.
    """
    if ranks == 1:
        return 0.0
    if link.node is not None and (table := _all_reduce_tables(link.node).get(ranks)):
        return table.seconds(num_bytes)
    seconds = num_bytes / link.bandwidth
    doubling = ceil(log2(ranks)) * (link.latency + seconds)
    ring = 2 * (ranks - 1) * (link.latency + seconds / ranks)
    return min(doubling, ring)


def gather_seconds(num_bytes: float, ranks: int, link: NetworkLink) -> float:
    """Return the time of a gather: rank 0 gets a tensor of `num_bytes`, divided among the ranks.

    A binomial tree: log2(ranks) latencies, and all parts but one over the link of rank 0.
    """
    if ranks == 1:
        return 0.0
    size = num_bytes * (ranks - 1) / ranks
    return ceil(log2(ranks)) * link.latency + size / link.bandwidth


class CollectiveTable:
    """Time of a collective by size: increasing, linear between points.

    Below the smallest measured size the time is that of the smallest; above the largest it grows
    with the size.

    Args:
        seconds_by_bytes: Measured times of each size.
    """

    def __init__(self, seconds_by_bytes: Mapping[int, Sequence[float]]) -> None:
        groups: dict[float, list[float]] = defaultdict(list)
        for size, seconds in seconds_by_bytes.items():
            point = round(POINTS_PER_DOUBLING * log2(size)) / POINTS_PER_DOUBLING
            groups[2**point].extend(seconds)
        self._bytes = sorted(groups)
        self._seconds = _increasing([median(groups[size]) for size in self._bytes])

    def seconds(self, num_bytes: float) -> float:
        """Return the time for a tensor of `num_bytes`."""
        sizes, times = self._bytes, self._seconds
        if num_bytes <= sizes[0]:
            return times[0]
        if num_bytes >= sizes[-1]:
            return times[-1] * num_bytes / sizes[-1]
        right = bisect_right(sizes, num_bytes)
        left = right - 1
        share = (num_bytes - sizes[left]) / (sizes[right] - sizes[left])
        return times[left] + share * (times[right] - times[left])


@cache
def _all_reduce_tables(node: str) -> dict[int, CollectiveTable]:
    """Return the measured all-reduces within one node of a type, by number of ranks."""
    samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in _measurements():
        ranks = int(row["num_workers"])
        is_inside = int(row["devices_per_node"]) == ranks
        if row["node"] == node and row["collective"] == "all_reduce" and is_inside:
            samples[ranks][int(row["bytes"])].append(float(row["median_ms"]) / 1e3)
    return {ranks: CollectiveTable(times) for ranks, times in samples.items()}


@cache
def _measurements() -> list[dict[str, str]]:
    """Return the rows of the shipped table of collectives."""
    path = files("gllm.sim") / "data" / "vidur_collectives.csv.gz"
    return list(csv.DictReader(gzip.decompress(path.read_bytes()).decode().splitlines()))


def _increasing(values: Sequence[float]) -> list[float]:
    """Return the closest non-decreasing values by least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, weight = pools.pop()
            mean = (before * weight + mean * count) / (weight + count)
            count += weight
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]
