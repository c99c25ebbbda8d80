"""A whole engine with stages on a device, from its start: the CPU in the place of a GPU."""

import asyncio
import gc
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.gpu.host import HostQueues
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.runtime.worker import stage_resources as resources_module
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.runtime.worker.cuda.graphs import graph_sizes
from gllm.transport.registry import open_edges
from tests.support.engines.local_workers import local_engine
from tests.support.full_cases import full_but
from tests.support.gpu.device_stage import BLOCK_SIZE, as_on_a_device, executor_on, host_as_gpu
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.models.tiny_models import save

SMALL = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


async def tokens_of(engine: Engine) -> list[int]:
    deltas = engine.generate([5, 6, 7], GREEDY)
    return [token async for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize(
    ("stages", "lanes"),
    full_but([(2, "2")], [(1, "1"), (2, "1"), (2, "2")]),
)
async def test_edges_are_open_before_the_memory_left_is_divided(
    stages: int, lanes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_engine(stages, **SMALL) as (engine, _):
        expected = await tokens_of(engine)
    order: list[str] = []

    class Measured(HostQueues):
        def measure_free_bytes(self, work: Callable[[], None], share: float) -> int:
            order.append("room")
            return super().measure_free_bytes(work, share)

    def open_and_note(*args: Any) -> Any:
        order.append("edges")
        return open_edges(*args)

    monkeypatch.setattr(resources_module, "open_edges", open_and_note)
    with host_as_gpu(Measured):
        async with local_engine(stages, lanes=lanes, **SMALL) as (engine, workers):
            assert all(isinstance(each, CudaExecutor) for each in workers.executors)
            running = [tokens_of(engine) for _ in range(4)]
            assert await asyncio.wait_for(asyncio.gather(*running), 60) == [expected] * 4
    assert order.count("room") == order.count("edges") == stages
    first = [order.index(name) for name in ("edges", "room")]
    assert first == sorted(first)


def test_what_graphs_take_is_no_room(tmp_path: Any) -> None:
    """The trial records two, and leaves none behind."""
    folder = save("llama3", tmp_path)
    with as_on_a_device(), FakeQueues(4, num_bytes=2 * 10**9) as queues:
        executor = executor_on(queues, folder)
        room = executor.available_bytes(0.5, BLOCK_SIZE, 8)
        largest, second = queues.used_bytes
        assert largest > 0
        assert room == 10**9 - largest - (len(graph_sizes(8)) - 1) * second
        gc.collect()
        assert not queues.graphs
