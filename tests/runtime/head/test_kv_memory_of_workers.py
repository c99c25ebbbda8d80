"""KV caches of an engine's workers in files: layouts that they report, and memory that returns."""

import asyncio
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.kernels.native.library import load_library
from gllm.messages.codec import AnyMessage
from gllm.messages.kv_layout import KvLayout, plan_parts
from gllm.messages.lifecycle import StageReady
from gllm.options.field_types import FieldError
from gllm.runtime.head.event_receiver import EventReceiver
from gllm.runtime.worker.kv_cache import map_zeros
from gllm.transport.kv.pages import KvPages
from tests.support.engines.local_workers import LocalWorkers, local_engine
from tests.support.full_cases import full_but
from tests.support.gpu.device_stage import host_as_gpu

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPT = list(range(5, 30))
SECONDS = 60.0
"""Limit for anything that should happen at once."""


@pytest.fixture
def layouts(monkeypatch: pytest.MonkeyPatch) -> dict[int, KvLayout | None]:
    """Layouts that workers have reported, by sender."""
    reported: dict[int, KvLayout | None] = {}
    on_message = EventReceiver.on_message

    def record(self: EventReceiver, sender: int, message: AnyMessage) -> None:
        if isinstance(message, StageReady):
            reported[sender] = message.kv_layout
        on_message(self, sender, message)

    monkeypatch.setattr(EventReceiver, "on_message", record)
    return reported


async def generate(engine: Engine) -> list[int]:
    """Return the output for PROMPT."""
    deltas = engine.generate(PROMPT, GREEDY)
    return [token async for delta in deltas for token in delta.token_ids]


def mapped_caches() -> set[str]:
    """Return what this process still has of the files of KV caches: mappings and descriptors."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = {line.split(maxsplit=5)[5] for line in maps if "memfd:gllm-test-kv" in line}
    for each in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{each}")
        except OSError:
            continue
        if "memfd:gllm-test-kv" in name:
            names.add(name)
    return names


def file_bytes(node: LocalWorkers) -> int:
    """Return the memory that the KV caches of an epoch take."""
    return 512 * sum(os.fstat(each).st_blocks for each in node.kv_memory.values())


def check_pages(layout: KvLayout | None, descriptor: int, executor: Any) -> None:
    """Check that the file of a worker has the keys and values of its layers."""
    assert layout is not None
    pages = KvPages(layout, descriptor, is_writable=False)
    blocks = list(range(layout.num_blocks))
    slots = pages.find_slots(blocks, 0, len(blocks) * layout.block_size)
    for each, caches in zip(layout.layers, executor.layer_caches, strict=True):
        used = [tensor[:-1].contiguous().view(torch.uint8).flatten() for tensor in caches]
        run = torch.from_numpy(pages.read(each.layer, each.heads, slots))
        assert run.equal(torch.cat(used))
        assert run.any()


@pytest.mark.parametrize(
    ("stages", "ranks", "cached"),
    full_but([(1, 2, "int8")], [(1, 1, "auto"), (2, 1, "auto"), (1, 2, "auto"), (1, 2, "int8")]),
)
async def test_other_processes_can_read_the_keys_and_values_of_each_worker(
    stages: int, ranks: int, cached: str, layouts: dict[int, KvLayout | None]
) -> None:
    options: dict[str, Any] = {"tensor_parallel_size": (ranks,), "kv_cache_dtype": cached}
    async with local_engine(stages, **options) as (engine, node):
        expected = await generate(engine)
        assert not node.kv_memory
    assert set(layouts.values()) == {None}
    layouts.clear()
    async with local_engine(stages, kv_transfer="auto", **options) as (engine, node):
        assert await generate(engine) == expected
        assert set(layouts) == set(node.kv_memory) == set(node.workers)
        # Pages without tokens take no memory.
        whole = sum(os.fstat(each).st_size for each in node.kv_memory.values())
        assert 0 < file_bytes(node) < whole / 4
        for sender, worker in node.workers.items():
            check_pages(layouts[sender], node.kv_memory[sender], worker.instance.executor)
    assert not mapped_caches(), "the memory of the caches has returned to the system"


async def test_an_epoch_has_caches_of_its_own(layouts: dict[int, KvLayout | None]) -> None:
    async with local_engine(2, kv_transfer="auto", max_restarts=3) as (engine, node):
        expected = await generate(engine)
        first = {os.fstat(each).st_ino for each in node.kv_memory.values()}
        node.kill(max(node.workers))
        async with asyncio.timeout(SECONDS):
            while {os.fstat(each).st_ino for each in node.kv_memory.values()} == first:
                await asyncio.sleep(0.02)
        assert await generate(engine) == expected
        assert not first & {os.fstat(each).st_ino for each in node.kv_memory.values()}
        assert len(mapped_caches()) == len(node.kv_memory) == 2
        assert set(node.kv_memory) <= set(layouts)
    assert not mapped_caches()


async def test_caches_fit_if_only_ranks_stages_and_blocks_differ(
    layouts: dict[int, KvLayout | None],
) -> None:
    async def read(**options: Any) -> list[KvLayout]:
        layouts.clear()
        async with local_engine(kv_transfer="auto", **options):
            return [each for each in layouts.values() if each is not None]

    own = await read()
    other = await read(tensor_parallel_size=(2,), block_size=8, kv_cache_memory=2**24)
    assert {each.model for each in own} == {each.model for each in other}
    for mine, theirs in ((own, other), (other, own)):
        assert plan_parts([mine], [theirs])
    others = [
        await read(dtype="bfloat16"),
        await read(kv_cache_dtype="fp8"),
        await read(kv_cache_dtype="int8"),
        await read(attention_backend="torch"),
        await read(quantization="int8"),
    ]
    digests = {each.model for layouts in [own, *others] for each in layouts}
    assert len(digests) == 6


async def test_kernels_that_are_chosen_by_measurement_do_not_separate_caches(
    layouts: dict[int, KvLayout | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines that measure under different load may compute operations with torch."""

    async def read() -> tuple[set[str], str]:
        layouts.clear()
        async with local_engine(kv_transfer="auto") as (engine, node):
            await generate(engine)
            numerics = node.executors[0].numerics
        return {each.model for each in layouts.values() if each is not None}, numerics

    library = load_library()
    assert library is not None
    slow_operations: list[str] = []
    monkeypatch.setattr(
        type(library), "is_preferred", lambda self, name, dtype: name not in slow_operations
    )
    fast, fast_numerics = await read()
    slow_operations += ["linear", "norm", "attention"]
    slow, slow_numerics = await read()
    assert slow == fast
    assert "torch" in slow_numerics
    assert slow_numerics != fast_numerics, "other text may follow, so requests do not move"


def test_a_file_that_is_too_large_is_an_error_that_says_what_to_do() -> None:
    descriptor = os.memfd_create("gllm-test-limit")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        create = map_zeros(descriptor)
        assert not create((2**18,), torch.float32).any()
        with pytest.raises(FieldError, match=r"KV cache of 2097152 bytes .*ulimit -f") as caught:
            create((2**18,), torch.float32)
        assert caught.value.param == "kv_cache_memory"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(FieldError, match="lower kv_cache_memory"):
        create((2**50,), torch.float32)
    os.close(descriptor)


async def test_workers_of_gpus_share_staging_blocks(layouts: dict[int, KvLayout | None]) -> None:
    with host_as_gpu():
        async with local_engine(kv_transfer="auto", kv_staging_tokens=100, block_size=16):
            (layout,) = layouts.values()
    assert layout is not None
    assert (layout.is_staged, layout.num_blocks) == (True, 7)
