"""Experts that the host computes beside a device: the texts of the CPU's executor, whatever the
order of streams and threads, and not without each of the waits."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu.host import HostQueues
from gllm.config.engine import EngineConfig
from gllm.models.config import read_config
from gllm.models.expert_placement import place_experts
from gllm.models.host_experts import HostExperts
from gllm.options.field_types import FieldError
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.scheduler.plan import StepPlan
from tests.runtime.worker.test_device_executor import check, expected_of, plans_of, registered
from tests.support.engines.pipeline import Pipeline
from tests.support.full_cases import full_but
from tests.support.gpu.device_stage import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Answer,
    as_on_a_device,
    executor_on,
    run_interleaved,
)
from tests.support.gpu.fake_streams import FakeQueues
from tests.support.gpu.memory_uses import Race
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
        executor = executor_on(queues, folder, **options)
        for message in registered():
            executor.register(message)
        return run_interleaved(queues, executor, plans, seed)


@pytest.mark.parametrize("family", full_but(FAMILIES[1:2], FAMILIES))
def test_the_text_is_that_of_the_cpu(family: str, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    plans = plans_for(folder)
    expected = expected_of(folder, plans, {})
    for seed in range(3):
        queues = FakeQueues(seed)
        check(compute_with(queues, folder, plans, seed), expected)
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


@pytest.mark.parametrize("cpu_experts", ["all", "1"])
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
