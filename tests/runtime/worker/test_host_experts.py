"""Experts that the host computes beside a device: the texts of the CPU's executor, whatever the
order of streams and threads, and not without each of the waits."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.host import HostQueues
from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.kernels.experts import StackedExperts, run_stacked
from gllm.models.config import read_config
from gllm.models.expert_placement import (
    ONCE_SLOTS,
    expert_elements,
    host_experts,
    place_experts,
)
from gllm.models.host_experts import HostExperts
from gllm.models.spec.feed_forward import ExpertsSpec
from gllm.options.field_types import FieldError
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.cuda import executor as executor_module
from gllm.runtime.worker.cuda import expert_slots
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.scheduler.expert_cache import ExpertCache, ExpertCosts, ExpertPlan
from gllm.scheduler.plan import StepPlan
from tests.runtime.test_recurrent_engine import make_folder
from tests.runtime.worker.test_device_executor import check, expected_of, plans_of, registered
from tests.support.engines.local_workers import LocalWorkers
from tests.support.engines.pipeline import Pipeline
from tests.support.full_cases import full_but
from tests.support.gpu.device_stage import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Answer,
    as_on_a_device,
    executor_on,
    host_as_gpu,
    run_interleaved,
)
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.gpu.memory_uses import Race
from tests.support.models.packed_models import save_both, save_gpt_oss
from tests.support.models.tiny_models import save

FAMILIES = ("mixtral", "qwen2-moe", "deepseek-v3", "gemma4-moe")
"""Experts alone, with a gated shared expert, in groups behind a dense layer, and beside an MLP."""


def plans_for(folder: Path) -> list[StepPlan]:
    return plans_of(Pipeline(folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS))


def compute_with(
    queues: FakeQueues, folder: Path, plans: list[StepPlan], seed: int, **options: Any
) -> list[Answer]:
    with as_on_a_device(), queues:
        options = {"cpu_experts": "all", "graphs": 4, "plan": None, **options}
        executor = options.pop("create", executor_on)(queues, folder, **options)
        for message in registered():
            executor.register(message)
        return run_interleaved(queues, executor, plans, seed)


@pytest.mark.parametrize("family", full_but(FAMILIES[1:2], FAMILIES))
def test_the_text_is_that_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    plans = plans_for(folder)
    expected = expected_of(folder, plans, {})
    queues = FakeQueues(1)
    check(compute_with(queues, folder, plans, 1), expected)
    assert not queues.num_replays, "the host cannot compute within a graph"


def test_no_wait_can_be_left_out(tmp_path: Path) -> None:
    """The host waits for the hidden states; all else is in the order of one stream."""
    folder = save("qwen2-moe", tmp_path)
    plans = plans_for(folder)[:3]
    queues = FakeQueues(0)
    compute_with(queues, folder, plans, 0)
    (place,) = {place for place in queues.waits if place.startswith("host_expert_runner")}
    # The numbers of experts may be poison.
    with pytest.raises((Race, RuntimeError)):
        compute_with(FakeQueues(0, ignored=place), folder, plans, 0)


@pytest.mark.parametrize("cpu_experts", full_but(["1"], ["all", "1"]))
@pytest.mark.parametrize("quantization", full_but(["none"], ["none", "int4"]))
def test_compiled_kernels_compute_the_experts(
    cpu_experts: str, quantization: str, tmp_path: Path
) -> None:
    """Everything by the kernels that a CPU has, with the device's work done at once."""
    folder = save("qwen2-moe", tmp_path)
    plans = plans_for(folder)
    pipeline = Pipeline(
        folder, block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, quantization=quantization
    )
    options: dict[str, Any] = {"cpu_experts": cpu_experts, "quantization": quantization}
    device: Any = Directly()
    executor = executor_on(device, folder, plan=None, **options)
    kept = [layer.host_experts for layer in executor.stage.layers.layers]
    assert sum(isinstance(each, HostExperts) for each in kept) == (3 if cpu_experts == "all" else 1)
    answers: list[list[Answer]] = []
    for each in (pipeline.executors[0], executor):
        for message in registered():
            each.register(message)
        answers.append([])
        for plan in plans:
            batch = each.prepare(plan)
            answers[-1].append(each.sample(batch, each.compute(batch, None)))
    check(answers[1], answers[0])


@torch.library.custom_op("gllm_tests::run_stacked", mutates_args=())
def one_kernel(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """Experts as one operation, as a GPU has it: the reference would wait within."""
    return run_stacked(x, expert_ids, expert_weights, StackedExperts(up, down, activation))


@one_kernel.register_fake
def _(x: torch.Tensor, *rest: object) -> torch.Tensor:
    return torch.empty_like(x)


def run_as_one(
    x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor, stack: StackedExperts
) -> torch.Tensor:
    assert stack.gate_up_bias is None
    made: torch.Tensor = one_kernel(
        x, expert_ids, weights, stack.gate_up_proj, stack.down_proj, stack.activation
    )
    return made


def cached(costs: ExpertCosts, slots_of: list[int]) -> Callable[..., Any]:
    """Create executors with given costs of experts, and record the size of each layer's cache."""

    def create(*args: Any, **options: Any) -> CudaExecutor:
        executor = executor_on(*args, **options)
        runner = executor._expert_runner
        assert runner is not None
        runner.costs = costs
        slots_of.extend(layer.cache.num_slots for layer in runner._layers.values())
        return executor

    return create


USEFUL = ExpertCosts(host=1.0, host_row=0.1, copy=1.5, device=0.1, device_row=0.01)
"""An expert is copied at its second use, and for many rows at its first."""
LARGE = ExpertCosts(host=1.0, host_row=1.0, copy=1.5, device=0.1, device_row=0.01)
"""Copies pay from two rows on, whether they are kept or not."""


@pytest.mark.parametrize("costs", [pytest.param(USEFUL, marks=pytest.mark.full), LARGE])
@pytest.mark.parametrize("num_slots", full_but([2], [1, 2, 4]))
def test_a_cache_changes_no_text(
    costs: ExpertCosts, num_slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("qwen2-moe", tmp_path)
    plans = plans_for(folder)
    expected = expected_of(folder, plans, {})
    specs = list(host_experts_of(folder))
    one = 4 * expert_elements(specs[0], 48)
    num_bytes = one * (len(specs) * (num_slots + 1) + ONCE_SLOTS + 1)
    monkeypatch.setattr(expert_slots, "run_stacked", run_as_one)
    seen: list[ExpertPlan] = []
    original = ExpertCache.plan

    def note(self: ExpertCache, *args: Any) -> ExpertPlan:
        seen.append(original(self, *args))
        return seen[-1]

    monkeypatch.setattr(ExpertCache, "plan", note)
    slots_of: list[int] = []
    queues = FakeQueues(1, num_bytes=10 * num_bytes)
    options = {"expert_cache": num_bytes, "create": cached(costs, slots_of)}
    check(compute_with(queues, folder, plans, 1, **options), expected)
    assert slots_of == [num_slots] * len(specs)
    assert any(plan.resident for plan in seen)
    copied = [slot for plan in seen for _, slot in plan.copied]
    assert any(slot is not None for slot in copied)
    assert any(plan.on_host for plan in seen) if costs is USEFUL else None in copied


def test_no_wait_of_the_cache_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned weights are overwritten only when the device has copied them."""
    folder = save("qwen2-moe", tmp_path)
    plans = plans_for(folder)
    monkeypatch.setattr(expert_slots, "run_stacked", run_as_one)

    def compute(ignored: str = "") -> FakeQueues:
        queues = FakeQueues(0, ignored, eagerness=0.05, num_bytes=10**9)
        options = {"expert_cache": 10**6, "create": cached(LARGE, [])}
        compute_with(queues, folder, plans, 0, **options)
        return queues

    (place,) = {place for place in compute().waits if place.startswith("expert_slots")}
    with pytest.raises(Race):
        compute(place)


def test_costs_are_measured_at_the_start(tmp_path: Path) -> None:
    folder = save("qwen2-moe", tmp_path)
    device: Any = Directly()
    executor = executor_on(device, folder, plan=None, cpu_experts="all", expert_cache=10**6)
    executor.warm_up()
    runner = executor._expert_runner
    assert runner is not None
    assert not any(layer.cache.slots for layer in runner._layers.values())
    executor.measure_expert_costs()
    costs = runner.costs
    assert costs is not None
    assert min(costs.host, costs.copy, costs.device) > 0
    assert min(costs) >= 0


@pytest.mark.parametrize(
    ("num_bytes", "message"),
    [(10_000, "one expert of each of the 3 layers needs"), (10**9, "lower it, or raise gpu_mem")],
)
def test_a_cache_that_does_not_fit_is_refused(num_bytes: int, message: str, tmp_path: Path) -> None:
    folder = save("qwen2-moe", tmp_path)
    options: dict[str, Any] = {"cpu_experts": "all", "expert_cache": num_bytes, "plan": None}
    queues = FakeQueues(0, num_bytes=10**6)
    with as_on_a_device(), queues, pytest.raises(FieldError, match=message):
        executor_on(queues, folder, **options)


def test_experts_that_do_not_fit_the_host_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save("qwen2-moe", tmp_path)
    device: Any = Directly()
    stored = 4 * 3 * 5 * expert_elements(next(host_experts_of(folder)), 48)
    monkeypatch.setattr(executor_module, "available_memory_bytes", lambda: stored // 3)
    with pytest.raises(FieldError, match="free memory, lower it, or set quantization"):
        executor_on(device, folder, plan=None, cpu_experts="all")
    monkeypatch.setattr(executor_module, "available_memory_bytes", lambda: stored)
    executor_on(device, folder, plan=None, cpu_experts="all")


def host_experts_of(folder: Path) -> Iterator[ExpertsSpec]:
    return host_experts(place_experts(read_config(folder).model, "all").layers)


async def test_an_engine_serves_with_experts_on_the_host(tmp_path: Path) -> None:
    """From the flags to the text, by two stages, of which the first has such a layer."""
    folder = make_folder("qwen2-moe", tmp_path)
    limits: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 8}
    options = limits | {"dtype": "float32", "threads": 1, "pipeline_parallel_size": 2}

    async def generate(**further: Any) -> list[int]:
        config = EngineConfig.from_options(str(folder), **options, **further)
        workers = LocalWorkers()
        async with Engine(config, node=workers) as engine:
            runners = [getattr(each, "_expert_runner", None) for each in workers.executors]
            assert [runner is not None for runner in runners] == ["cpu_experts" in further, False]
            prompt = list(range(5, 45))
            deltas = engine.generate(prompt, SamplingParams(temperature=0, max_tokens=20))
            return [token async for delta in deltas for token in delta.token_ids]

    expected = await generate(kv_cache_memory=2**21)
    with host_as_gpu():
        assert await generate(cpu_experts="1", expert_cache=10**6) == expected


@pytest.mark.full
@pytest.mark.parametrize("style", ["compressed", "gptq symmetric", "mxfp4", "int8", "gpt-oss"])
def test_experts_of_few_bits_stay_so_on_the_host(style: str, tmp_path: Path) -> None:
    """The texts are those of the CPU; a cache has floats of the same values."""
    is_gpt_oss = style == "gpt-oss"
    folder, _ = save_gpt_oss(tmp_path) if is_gpt_oss else save_both("Qwen3Moe", style, tmp_path)
    plans = plans_for(folder)
    device: Any = Directly()
    executor = executor_on(device, folder, plan=None, cpu_experts="all")
    for message in registered():
        executor.register(message)
    answers: list[Answer] = []
    for plan in plans:
        batch = executor.prepare(plan)
        answers.append(executor.sample(batch, executor.compute(batch, None)))
    check(answers, expected_of(folder, plans, {}))
    (experts, *_) = executor._loaded_host_experts()
    assert {each.format for each in experts.down} == {"int8" if style == "int8" else "grouped"}
    options: dict[str, Any] = {"cpu_experts": "all", "expert_cache": 2**24, "plan": None}
    if style == "int8":
        with pytest.raises(FieldError, match="are int8 for CPUs"):
            executor_on(device, folder, **options)
        return
    runner = executor_on(device, folder, **options)._expert_runner
    assert runner is not None
    cached = next(iter(runner._layers))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, executor.model.hidden_size, generator=generator)
    ids = torch.stack([torch.randperm(len(cached.down), generator=generator)[:2] for _ in x])
    weights, on_host = torch.rand(8, 2, generator=generator), torch.empty_like(x)
    cached.compute(x, ids, weights, on_host)
    runner.costs = LARGE
    for _ in range(4):
        result = runner.run(cached, x, ids, weights, lambda: None)
        # The host rounds activations to 8 bits.
        assert (result - on_host).norm() < 0.02 * on_host.norm()
    assert runner._layers[cached].cache.slots


class Directly(HostQueues):
    """The CPU in the place of a device, for `executor_on`."""

    def adopt(self, *trees: Any) -> None:
        """Nothing: all memory is the host's."""


def test_experts_are_read_to_the_host(tmp_path: Path) -> None:
    """On a device without numbers, all else is there and the experts are not."""
    folder = save("qwen2-moe", tmp_path)
    config = read_config(folder)
    engine = EngineConfig.from_options(str(folder), cpu_experts="2", max_model_len=64)

    class Meta(HostQueues):
        device = torch.device("meta")

    executor = CudaExecutor(config, engine, 1, range(config.model.num_layers), Meta())
    executor.load(folder, lambda done, total: None)
    experts = [layer.host_experts for layer in executor.stage.layers.layers]
    kept = [each for each in experts if each is not None]
    assert len(kept) == 2
    for each in kept:
        assert each.gate_up[0].gate_up.weight.device.type == "cpu"  # type: ignore[union-attr]
        assert each.down[0].weight.device.type == "cpu"  # type: ignore[attr-defined]
    for layer in executor.stage.layers.layers:
        norm = layer.mlp_norm
        assert norm is not None
        assert norm.weight.is_meta


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpu_experts": "all", "device": "cpu"}, "leave cpu_experts out"),
        ({"cpu_experts": "some"}, "has to be all, none or a number"),
        ({"cpu_experts": "0"}, "has to be all, none or a number"),
        ({"cpu_experts": "2", "tensor_parallel_size": 2}, "use pipeline_parallel_size instead"),
        ({"expert_cache": 1000}, "set cpu_experts to all"),
    ],
)
def test_bad_combinations_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        EngineConfig.from_options("demo", **options)


@pytest.mark.parametrize(
    ("family", "value", "message"),
    [("llama3", "all", "has no experts"), ("qwen2-moe", "4", "has 3 layers with experts")],
)
def test_models_without_those_experts_are_refused(
    family: str, value: str, message: str, tmp_path: Path
) -> None:
    model = read_config(save(family, tmp_path)).model
    with pytest.raises(FieldError, match=message):
        place_experts(model, value)


def test_a_cpu_has_all_experts_in_its_memory(tmp_path: Path) -> None:
    """As with device auto on a machine without a GPU."""
    config = read_config(save("qwen2-moe", tmp_path))
    engine = EngineConfig.from_options(str(tmp_path), cpu_experts="all", max_model_len=64)
    with pytest.raises(FieldError, match="all weights are there"):
        CpuExecutor(config, engine, 1, range(config.model.num_layers))
