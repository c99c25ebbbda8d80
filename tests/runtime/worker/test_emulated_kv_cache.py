"""KV caches of emulated stages: their layout, and the engines that may exchange blocks."""

import os
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.models.config import read_config
from gllm.models.hub import DEMO
from gllm.runtime.emulation.device import EmulatedDevice
from gllm.runtime.worker.emulated.executor import EmulatedExecutor
from gllm.sim.costs.base import ConstantCostModel

BLOCKS, BLOCK_SIZE = 4, 16


def make_executor(
    device: str = "L20", rank: int = 0, num_ranks: int = 1, **options: Any
) -> EmulatedExecutor:
    config = EngineConfig.from_options("demo", device=f"emulated:{device}", **options)
    timeline = EmulatedDevice(ConstantCostModel(0.0), 0)
    return EmulatedExecutor(
        read_config(DEMO), config, 2, range(3), timeline, 0, rank=rank, num_ranks=num_ranks
    )


def test_engines_of_any_device_exchange_blocks_of_one_size() -> None:
    """Requests with tokens continue at once only where a real engine would compute the same."""
    first, other = make_executor(), make_executor("A100-80G")
    small, text = make_executor(emulated_bytes=False), make_executor(emulated_text="prompt")
    assert first.kv_numerics == other.kv_numerics == text.kv_numerics != small.kv_numerics
    assert len({each.numerics for each in (first, other, small, text)}) == 4


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_entries_are_real_or_as_small_as_their_layout_permits(num_ranks: int) -> None:
    """The memory that is counted on the device stays the same."""
    layouts = []
    for is_real in (True, False):
        executor = make_executor(num_ranks=num_ranks, emulated_bytes=is_real)
        memory = os.memfd_create("cache")
        try:
            executor.allocate(BLOCKS, BLOCK_SIZE, memory)
            layouts.append(executor.describe_kv_cache("model"))
            assert os.fstat(memory).st_size >= layouts[-1].num_bytes
        finally:
            os.close(memory)
        assert executor.block_bytes == BLOCK_SIZE * layouts[0].bytes_per_token
    real, small = layouts
    head_dim = executor.model.layers[0].attention.kv_entry.key_dim
    assert [each.num_heads for each in small.layers] == [each.num_heads for each in real.layers]
    assert {each.key_bytes for each in small.layers} == {executor.cache_dtype.itemsize}
    assert real.bytes_per_token == head_dim * small.bytes_per_token
