"""What a stage on a GPU takes for its attention: nothing is put there, what it has is asked."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gllm.config.engine import EngineConfig
from gllm.kernels.attention_plan import PagedBatch
from gllm.models.config import read_config
from gllm.options.field_types import FieldError
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.runtime.worker.device import check_quantization
from tests.support.gpu import fake_flash_attention
from tests.support.models.tiny_models import save


class OnGpu:
    """Queues of a GPU, of which only its kind is looked at."""

    device = torch.device("cuda", 0)

    def __init__(self, capability: tuple[int, int]) -> None:
        self.capability = capability

    def stream(self) -> None:
        return None


@pytest.fixture(autouse=True)
def flash_attention() -> Iterator[None]:
    with fake_flash_attention.installed():
        yield


def executor(folder: Path, capability: tuple[int, int] = (9, 0), **options: Any) -> CudaExecutor:
    """A stage on a GPU of sm_90 or another."""
    given = {"dtype": "bfloat16", "block_size": 256} | options
    config, engine = read_config(folder), EngineConfig.from_options(str(folder), **given)
    layers = range(config.model.num_layers)
    return CudaExecutor(config, engine, 1, layers, OnGpu(capability))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("llama3", tmp_path_factory.mktemp("llama3"))


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "flash-attn"),
        ({"block_size": 16}, "triton"),
        ({"kv_cache_dtype": "fp8"}, "triton"),
        ({"dtype": "float32"}, "triton"),
        ({"attention_backend": "triton"}, "triton"),
        ({"attention_backend": "torch"}, "torch"),
    ],
)
def test_plans_are_those_of_the_backend(
    folder: Path, options: dict[str, Any], backend: str
) -> None:
    made = executor(folder, **options)
    rows = PagedBatch(np.array([[1, 0]]), np.array([0, 6]), np.array([6]), 0, 256, 8)
    (plan,) = made.plan_attention(rows, made.dtype, frozenset({None})).values()
    assert made.backend == plan.backend == backend
    assert (plan.gathers is None) == (plan.tables is not None) == (backend != "torch")
    assert made.supports_graphs == (backend != "torch")
    # Staging takes a plan there from the host.
    assert plan.slots.is_cpu


def test_one_layer_that_does_not_fit_is_enough(tmp_path: Path) -> None:
    assert executor(save("deepseek-v2", tmp_path)).backend == "triton"


def test_a_gpu_without_8_bit_floats_refuses_them(folder: Path) -> None:
    with pytest.raises(FieldError, match=r"--kv-cache-dtype fp8 needs .*this one has 8\.0"):
        executor(folder, (8, 0), kv_cache_dtype="fp8")
    assert executor(folder, (8, 0), kv_cache_dtype="float16").cache_dtype == torch.float16


def test_8_bit_integers_are_refused_on_a_gpu(folder: Path) -> None:
    with pytest.raises(FieldError, match=r"--quantization int8 .*--device cpu") as caught:
        executor(folder, quantization="int8")
    assert caught.value.param == "quantization"
    # On a CPU it is served.
    check_quantization("int8", "cpu")
    with pytest.raises(FieldError, match=r"--kv-cache-dtype int8 .* GPUs: choose fp8 or auto"):
        executor(folder, kv_cache_dtype="int8")
