"""Copies of KV blocks between a device and staging blocks: their bytes, and no wait to spare."""

import os

import pytest
import torch

from gllm.messages.kv_transfer import CopyKvBlocks
from gllm.runtime.worker.cuda.kv_staging import KvStager, find_runs
from gllm.runtime.worker.cuda.staging import copy_to_device
from gllm.runtime.worker.kv_cache import map_zeros
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.gpu.memory_uses import Race

NUM_LAYERS, NUM_BLOCKS, NUM_STAGING = 3, 9, 5
BLOCK = 4, 2, 8
"""Tokens, heads and bytes."""
OUT = CopyKvBlocks(1, [7, 2, 3, 4], [1, 2, 0, 4])
BACK = CopyKvBlocks(2, [8, 0], [2, 4], is_fetched=True)


def run(seed: int, ignored: str = "", checks: bool = True) -> tuple[bool, FakeQueues]:
    """Copy blocks out and others back; return whether all bytes are right when they are reported.

    Like another process, `read` looks at the staging blocks as soon as a layer is recorded.
    """
    with FakeQueues(seed, ignored, checks, eagerness=seed % 3 * 0.3) as queues:
        descriptor = os.memfd_create("staging")
        create = map_zeros(descriptor)
        shape = (NUM_BLOCKS, *BLOCK)
        contents = [
            [torch.randint(0, 255, shape, dtype=torch.uint8) for _ in range(2)]
            for _ in range(NUM_LAYERS)
        ]
        caches = [[queues.zeros(shape, torch.uint8) for _ in range(2)] for _ in range(NUM_LAYERS)]
        staging = [
            [create((NUM_STAGING, *BLOCK), torch.uint8) for _ in range(2)]
            for _ in range(NUM_LAYERS)
        ]
        steps, written = queues.stream(), queues.event()
        for layer, values in zip(caches, contents, strict=True):
            for cache, value in zip(layer, values, strict=True):
                pinned = copy_to_device(value, queues, steps)
                with steps.current():
                    cache.copy_(pinned)
        steps.record(written)
        # A step has ended before its blocks are copied.
        written.synchronize()
        is_right: list[bool] = []

        def record(number: int, num_layers: int) -> None:
            layer = num_layers - 1
            if number == OUT.number:
                for host, value in zip(staging[layer], contents[layer], strict=True):
                    for block, slot in zip(OUT.block_ids, OUT.staging_ids, strict=True):
                        is_right.append(torch.equal(host[slot], value[block]))

        stager = KvStager(queues, caches, staging, record)
        stager.copy(OUT)
        stager.copy(BACK)
        # The next step uses the blocks.
        with steps.current():
            used = [[cache.clone() for cache in layer] for layer in caches]
        steps.record(written)
        written.synchronize()
        for layer, values in zip(used, contents, strict=True):
            for cache, value in zip(queues.copies(layer), values, strict=True):
                expected = value.clone()
                expected[8], expected[0] = value[2], value[4]
                is_right.append(torch.equal(cache, expected))
        stager.close()
        os.close(descriptor)
        return all(is_right), queues


@pytest.mark.parametrize("seed", range(3))
def test_blocks_are_copied_out_and_back(seed: int) -> None:
    assert run(seed)[0]


def run_often(ignored: str) -> None:
    for seed in range(8):
        run(seed, ignored)


def test_no_wait_is_to_spare() -> None:
    """Without the wait for a copied layer another process reads what is not there."""
    waits = [wait for wait in run(0)[1].waits if wait.startswith("kv_staging.py")]
    assert len(waits) == 1
    for wait in waits:
        with pytest.raises(Race):
            run_often(wait)
        assert not all(run(seed, wait, checks=False)[0] for seed in range(8)), wait


def test_runs_of_blocks() -> None:
    assert list(find_runs([4, 5, 6, 1, 3, 4])) == [(0, 4, 3), (3, 1, 1), (4, 3, 2)]
    assert list(find_runs([])) == []
