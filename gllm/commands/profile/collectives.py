"""Times of the ranks' sums and of transfers between stages, in the memory of this host.

Every end has a thread of this process; the compiled kernels of a sum do not hold the GIL.
"""

import threading
import time
from collections.abc import Callable, Sequence

import torch

from gllm.transport.base import EdgeLayout
from gllm.transport.edge import create_edge
from gllm.transport.groups import open_groups
from gllm.transport.region import RegionLayout, create_region
from gllm.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

MS_PER_SECOND = 1e3
SLOTS = 2
"""Messages on the way at a time."""


def time_all_reduce(
    num_ranks: int, token_counts: Sequence[int], hidden_size: int, dtype: torch.dtype, repeats: int
) -> dict[int, list[float]]:
    """Return the milliseconds of each repeat of a sum [tokens, hidden], by number of tokens."""
    layout = RegionLayout(max(token_counts), hidden_size, 0)
    region = create_region("profile-ranks", "shared-memory")
    groups = [open_groups(region, rank, num_ranks, layout).layers for rank in range(num_ranks)]
    region.close()
    times: dict[int, list[float]] = {tokens: [] for tokens in token_counts}

    def run(rank: int) -> None:
        group = groups[rank]
        for tokens in token_counts:
            partial = torch.ones(tokens, hidden_size)
            for _ in range(repeats):
                begin = time.perf_counter()
                group.sum(partial, None, dtype)
                if rank == 0:
                    times[tokens].append(MS_PER_SECOND * (time.perf_counter() - begin))

    _run_threads([lambda rank=rank: run(rank) for rank in range(num_ranks)])  # type: ignore[misc]
    for group in groups:
        group.close()
    return times


def time_send(
    token_counts: Sequence[int], hidden_size: int, dtype: torch.dtype, repeats: int
) -> dict[int, list[float]]:
    """Return the milliseconds from a send to the end of its receipt, by number of tokens."""
    layout = EdgeLayout(SLOTS, max(token_counts), hidden_size, dtype.itemsize)
    edge = create_edge("profile-edge", "shared-memory")
    sender = SharedMemorySender(edge.descriptors, layout, dtype)
    receiver = SharedMemoryReceiver(edge.descriptors, layout, dtype)
    steps = [tokens for tokens in token_counts for _ in range(repeats)]
    sent, received = [0.0] * len(steps), [0.0] * len(steps)
    arrived = [threading.Event() for _ in steps]

    def send() -> None:
        for step, tokens in enumerate(steps):
            hidden = torch.ones(tokens, hidden_size, dtype=dtype)
            sent[step] = time.perf_counter()
            sender.send(step, hidden)
            arrived[step].wait()

    def receive() -> None:
        for step, tokens in enumerate(steps):
            receiver.receive(step, tokens)
            received[step] = time.perf_counter()
            arrived[step].set()

    _run_threads([send, receive])
    sender.close()
    receiver.close()
    edge.close()
    times: dict[int, list[float]] = {tokens: [] for tokens in token_counts}
    for step, tokens in enumerate(steps):
        times[tokens].append(MS_PER_SECOND * (received[step] - sent[step]))
    return times


def _run_threads(runs: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
