"""Times of collectives among the tensor-parallel ranks of one stage, in seconds.

Source: Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication Operations in
MPICH" (2005), section 4; Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for clusters
of workstations" (2009), section 3 (ring). Alpha is a link's latency, beta the inverse of its
bandwidth; additions cost nothing.
"""

from math import ceil, log2

from gllm.sim.hardware.links import NetworkLink


def all_reduce_seconds(num_bytes: float, ranks: int, link: NetworkLink) -> float:
    """Return the time of an all-reduce: each rank has `num_bytes` and gets the sum.

    The faster of two algorithms: recursive doubling sends the whole tensor in each of log2(ranks)
    steps, which suits decodes; the ring sends parts of it in twice ranks - 1 steps, which suits
    prefills.
    """
    if ranks == 1:
        return 0.0
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
