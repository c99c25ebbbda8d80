"""A stage on the fake device, driven by hand-made plans on three threads of the host.

Owns what a test of the device's executor needs besides the executor: weights that are there,
operations without hidden waits, attention of one layout, and the order in which threads take turns.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu.host import HostQueues
from gllm.config.engine import EngineConfig
from gllm.kernels import sampling
from gllm.kernels.attention_plan import (
    AttentionPlan,
    DecodeGroup,
    GatherIndices,
    PagedBatch,
    build_device_tables,
    plan_attention,
)
from gllm.kernels.attention_window import AttentionWindow
from gllm.kernels.native.builds import BUILD_VARIABLE, OFF
from gllm.kernels.native.library import load_library
from gllm.kernels.sampling_plan import plan_sampling
from gllm.messages.sampling import SampleDetails
from gllm.models import stage as model_stage
from gllm.models.config import read_config
from gllm.models.host_experts import HostExperts
from gllm.models.split import split_layers
from gllm.runtime.worker import stage_resources as loader_module
from gllm.runtime.worker.batch import PlanAttention, Windows
from gllm.runtime.worker.cuda import backend as backend_module
from gllm.runtime.worker.cuda import sampler
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.scheduler.plan import SampledToken, StepPlan
from gllm.transport.groups import StageGroups
from tests.support.gpu.fake_streams import FakeQueues

BLOCK_SIZE, NUM_BLOCKS, IN_FLIGHT = 4, 64, 3
LONGEST = 64
Answer = tuple[list[SampledToken], list[SampleDetails]]
"""What a step sampled, and what its rows told."""
NONE: Answer = ([], [])


@torch.library.custom_op("gllm_tests::sample", mutates_args=())
def one_kernel(
    logits: torch.Tensor, settings: torch.Tensor, counters: torch.Tensor
) -> torch.Tensor:
    """Sampling as one operation, which looks at what a plan has for a GPU alone: the reference
    would wait within."""
    temperature, top_p, min_p = settings.numpy()
    top_k, seed, choice, index = counters.numpy()
    plan = plan_sampling(temperature, top_k, top_p, min_p, seed, choice, index)
    return sampling.sample(logits.clone(), plan)


@one_kernel.register_fake
def _(logits: torch.Tensor, settings: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    return torch.empty(len(logits), dtype=torch.int64, device=logits.device)


@contextmanager
def as_on_a_device() -> Iterator[None]:
    """Operations as they are where tensors are not the CPU's: by torch, and those that would wait
    as one kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(BUILD_VARIABLE, OFF)
        load_library.cache_clear()
        # The fake device's tensors are the CPU's.
        patch.setattr(model_stage, "check_token_ids", lambda ids, vocab_size: None)
        patch.setattr(
            sampler,
            "sample",
            lambda logits, plan: one_kernel(logits, plan.settings, plan.counters),
        )
        yield
    load_library.cache_clear()


@contextmanager
def host_as_gpu(create: Callable[[], HostQueues] = HostQueues) -> Iterator[None]:
    """Workers of this process find one GPU, whose work the CPU does at once."""
    with as_on_a_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_module, "CudaRuntime", lambda index: create())
        patch.setattr(loader_module, "count_gpus", lambda device: 1)
        yield


def tensors_of(thing: Any, seen: set[int]) -> Iterator[torch.Tensor]:
    """All tensors that an object holds on the device: not those of experts on the host."""
    if id(thing) in seen or isinstance(thing, HostExperts):
        return
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, dict):
        for value in thing.values():
            yield from tensors_of(value, seen)
    elif isinstance(thing, list | tuple):
        for value in thing:
            yield from tensors_of(value, seen)
    else:
        names = [*getattr(thing, "__dict__", ()), *getattr(thing, "__slots__", ())]
        for name in names:
            yield from tensors_of(getattr(thing, name), seen)


def plan_of_one_layout(
    rows: PagedBatch, dtype: torch.dtype, windows: Windows
) -> dict[AttentionWindow, AttentionPlan]:
    """As `plan_each` for layers without windows; decodes are one group over the longest context,
    so that all steps of a bucket are laid out alike but for block tables, at the end."""
    assert windows == {None}
    tables = build_device_tables(rows, torch.device("cpu"))
    plan = replace(plan_attention(rows, dtype), tables=tables)
    count = len(rows.context_len)
    if rows.num_decodes < count or not count:
        return {None: plan}
    places = np.arange(LONGEST)
    hidden = places >= rows.context_len[:, None]
    blocks = rows.block_table[:, np.minimum(places // BLOCK_SIZE, rows.block_table.shape[1] - 1)]
    slots = blocks * BLOCK_SIZE + places % BLOCK_SIZE
    slots[hidden] = rows.num_blocks * BLOCK_SIZE
    bias = torch.zeros(count, LONGEST, dtype=dtype)
    bias.masked_fill_(torch.from_numpy(hidden), float("-inf"))
    group = DecodeGroup(
        torch.arange(count),
        torch.from_numpy(slots.reshape(-1)),
        bias[:, None, None],
        torch.from_numpy(rows.context_len.copy()),
    )
    gathers = GatherIndices([group], [], torch.zeros(1, 1, dtype=dtype))
    return {None: replace(plan, gathers=gathers)}


def executor_on(
    queues: FakeQueues,
    folder: Path,
    stage: int = 0,
    stages: int = 1,
    graphs: int = 0,
    plan: PlanAttention | None = plan_of_one_layout,
    ranks: tuple[int, int] = (0, 1),
    connect: Callable[[CudaExecutor], StageGroups] | None = None,
    **options: Any,
) -> CudaExecutor:
    """A loaded stage; `graphs`: most rows of a decode that is one; `ranks`: its own and their
    number, which `connect` gives groups; `options`: of the engine."""
    config = read_config(folder)
    engine = EngineConfig.from_options(
        str(folder),
        pipeline_parallel_size=stages,
        dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=LONGEST,
        max_num_seqs=8,
        max_in_flight=IN_FLIGHT,
        max_num_batched_tokens=64,
        **options,
    )
    layers = split_layers(config.model, stages)[stage]
    executor = CudaExecutor(
        config, engine, stages, layers, queues, plan, rank=ranks[0], num_ranks=ranks[1]
    )
    executor.load(folder, lambda done, total: None)
    queues.adopt(*tensors_of(executor.stage, set()))
    executor.reserve(engine.scheduler.resolve(stages, NUM_BLOCKS, LONGEST))
    if connect is not None:
        executor.join(connect(executor))
    executor.allocate(NUM_BLOCKS, BLOCK_SIZE)
    if graphs:
        executor.record_graphs(graphs, lambda done, total: None)
    return executor


def run_interleaved(
    queues: FakeQueues,
    executor: CudaExecutor,
    plans: list[StepPlan],
    seed: int,
    meet: Callable[[int], object] = lambda step: None,
) -> list[Answer]:
    """All steps through three threads that take turns at random, as far as each has something to
    do: a step is planned when the one IN_FLIGHT before it has been sampled. `meet`: before one is
    computed."""
    order = random.Random(seed)
    prepared: list[Any] = []
    computed: list[Any] = []
    sampled: list[Answer] = []
    while len(sampled) < len(plans):
        able = []
        if len(prepared) < min(len(plans), len(sampled) + IN_FLIGHT):
            able.append("loop")
        if len(computed) < len(prepared):
            able.append("compute")
        if len(sampled) < len(computed):
            able.append("sample")
        match order.choice(able):
            case "loop":
                with queues.thread("loop"):
                    prepared.append(executor.prepare(plans[len(prepared)]))
                queues.hand_over("loop", "compute")
            case "compute":
                with queues.thread("compute"):
                    batch = prepared[len(computed)]
                    meet(batch.step)
                    computed.append(executor.compute(batch, None))
                queues.hand_over("compute", "sample")
            case "sample":
                with queues.thread("sample"):
                    batch, made = prepared[len(sampled)], computed[len(sampled)]
                    if executor.has_sampler:
                        sampled.append(executor.sample(batch, made))
                    else:
                        executor.wait(batch)
                        sampled.append(NONE)
                queues.hand_over("sample", "loop")
    return sampled
