"""Number of KV blocks of an engine, by the memory of its workers and of their machines.

This module imports no torch.
"""

import math
from collections.abc import Mapping

from gllm.messages.lifecycle import StageLoaded
from gllm.recovery.placement import LOCAL_NODE, Placement
from gllm.runtime.worker.device import KV_SHARE, count_kv_blocks


def count_placement_blocks(
    requested_bytes: int | None, placement: Placement, loaded: Mapping[int, StageLoaded]
) -> int:
    """Return the number of KV blocks, which is the same for every worker of a placement.

    Requested bytes are divided among the nodes as a block is: each node has the keys and values of
    its layers. Without a request the node with the least memory per byte of its part of a block
    decides.

    Args:
        requested_bytes: for all workers; None for a share of the memory of each node.
        placement: of the workers.
        loaded: reports of the workers, by sender.
    """
    if requested_bytes is not None:
        return count_kv_blocks(requested_bytes, _sizes(placement, loaded))
    counts = []
    for node in {worker.node: None for worker in placement.workers}:
        available = _host_bytes(node, placement, loaded)
        sizes = _sizes(placement, loaded, node)
        has_own_memory = all(own is not None for _, own in sizes)
        if node == LOCAL_NODE or available is None or has_own_memory:
            # This machine is measured now, when all of its workers have loaded their weights.
            counts.append(count_kv_blocks(None, sizes))
        else:
            counts.append(count_kv_blocks(int(available * KV_SHARE), sizes))
    return min(counts)


def limit_blocks(placement: Placement, loaded: Mapping[int, StageLoaded]) -> int | float:
    """Return the number of KV blocks that the memory of all nodes can hold; infinity if unknown.

    It counts all available memory: for layers that have moved to other machines, where one sequence
    of full length is worth more than a reserve.
    """
    counts: list[float] = [math.inf]
    for node in {worker.node: None for worker in placement.workers}:
        sizes = _sizes(placement, loaded, node)
        counts += [own // block for block, own in sizes if own is not None]
        available = _host_bytes(node, placement, loaded)
        if available is not None:
            counts.append(available // sum(block for block, own in sizes if own is None))
    return min(counts)


def _sizes(
    placement: Placement, loaded: Mapping[int, StageLoaded], node: str | None = None
) -> list[tuple[int, int | None]]:
    """Return the bytes of a block and the bytes of own memory of each worker, of one node or all.

    See count_kv_blocks.
    """
    return [
        (loaded[worker.sender].block_bytes, loaded[worker.sender].available_bytes)
        for worker in placement.workers
        if node is None or worker.node == node
    ]


def _host_bytes(node: str, placement: Placement, loaded: Mapping[int, StageLoaded]) -> int | None:
    """Return the available memory of a machine by the reports of its workers; None if unknown.

    Each report has the memory after the weights of its worker were loaded, so the least one is the
    latest.
    """
    reports = [loaded[worker.sender].host_available_bytes for worker in placement.workers_on(node)]
    return min((report for report in reports if report is not None), default=None)
