"""Measure NCCL collectives in a CUDA graph on one GPU, by a communicator of one rank.

One rank adds nothing, so the row shows that NCCL's operations can be captured, and the least time
of a sum. Several ranks on one device are compared in stages.py.
"""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import distributed

from benchmarks.gpu.operations import TOLERANCES, relative_error
from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, PendingRow, SkipRowError, judged
from gllm.kernels.all_reduce import RankGroup
from gllm.transport.device_group import DeviceRankGroup
from gllm.transport.device_streams import DeviceRuntime, DeviceStream
from gllm.transport.nccl import create_communicator
from gllm.transport.nccl_group import open_nccl_groups
from gllm.transport.region import RegionLayout, create_region

HIDDEN_SIZE, NUM_ROWS, NUM_SUMS = 3584, 16, 56
"""A decode of Qwen2.5-7B at 16 rows: two sums in each of 28 layers."""


def rows(place: Place) -> Iterator[PendingRow]:
    """Yield the row of sums within a graph."""
    yield PendingRow(f"{NUM_SUMS} sums of ranks in a graph, NCCL, 1 rank", partial(measure, place))


def measure(place: Place) -> Measured:
    """Measure the replay of a graph of sums, and check all collectives."""
    if not place.is_dry and not distributed.is_nccl_available():
        raise SkipRowError("this PyTorch has no NCCL")
    hidden, num_rows = (64, 4) if place.is_dry else (HIDDEN_SIZE, NUM_ROWS)
    queues, region = place.queues(), create_region("benchmark")
    stream = queues.stream()
    layout = RegionLayout(num_rows, hidden, hidden)
    create = _create_gloo if place.is_dry else create_communicator
    groups = open_nccl_groups(region.descriptors, 0, 1, layout, queues, stream, create=create)
    region.close()
    try:
        return _measure(place, queues, stream, groups.layers, (num_rows, hidden))
    finally:
        groups.layers.close()


def _measure(
    place: Place,
    queues: DeviceRuntime,
    stream: DeviceStream,
    group: RankGroup,
    shape: tuple[int, int],
) -> Measured:
    """Measure with a group of one rank; shape: rows and width of a sum."""
    assert isinstance(group, DeviceRankGroup)
    x = torch.randn(shape, device=place.device).to(place.dtype)
    bias = torch.randn(shape[1], device=place.device).to(place.dtype)
    out = torch.zeros_like(x)
    queues.synchronize()

    def work() -> None:
        total = group.sum(x.clone(), None, x.dtype)
        for _ in range(NUM_SUMS - 2):
            total = group.sum(total, None, x.dtype)
        out.copy_(group.sum(total, bias, x.dtype))

    with stream.current():
        work()
        logits = group.gather(x, [shape[1]])
        tokens = group.broadcast(torch.arange(3, device=place.device), 3)
        out.zero_()
    queues.synchronize()
    graph = queues.capture(stream, work)

    def replay(_: int) -> None:
        with group.launching():
            graph.replay()

    replay(0)
    queues.synchronize()
    figures = {
        "error": relative_error(out, x.to(torch.float64) + bias.to(torch.float64)),
        "tolerance": TOLERANCES[x.dtype],
        "ms": 1000 * place.seconds(replay, 1),
        "bytes": 2.0 * NUM_SUMS * x.nbytes,
    }
    measured = judged(figures, {})
    if logits is None or not torch.equal(logits, x) or tokens.tolist() != [0, 1, 2]:
        measured.fault = measured.fault or "gathered logits or broadcast tokens differ"
    return measured


def _create_gloo(store: Any, rank: int, size: int) -> Any:
    """Create a process group on the CPU."""
    return distributed.ProcessGroupGloo(store, rank, size, timedelta(seconds=60))
