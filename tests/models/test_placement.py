"""A stage is where it was told to be, with all that belongs to it: shown on a device without
numbers, where operations refuse tensors of the CPU."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gllm.config.engine import EngineConfig
from gllm.kernels.attention_plan import PagedBatch
from gllm.models import attention
from gllm.models.config import read_config
from gllm.models.split import split_layers
from gllm.models.stage import StageInputs
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.cuda.graphs import plan_table_attention
from gllm.runtime.worker.cuda.staging import map_tensors
from tests.support.models.tiny_models import save

META = torch.device("meta")
FAMILIES = (
    *("llama3", "qwen2", "qwen3-tied", "gemma2", "gemma4-e", "phi3", "gpt2", "bloom"),
    "deepseek-v3",
)


def attended(query: Tensor, keys: Tensor, values: Tensor, *rest: object) -> Tensor:
    """The shape of attention: its kernels need numbers."""
    assert query.is_meta
    assert keys.is_meta
    return query.new_empty((*query.shape[:2], values.shape[3]))


@pytest.fixture(autouse=True)
def without_attention() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "paged_attention", attended)
        yield


@pytest.mark.parametrize("family", FAMILIES)
def test_nothing_of_a_stage_stays_behind(family: str, tmp_path: Path) -> None:
    config = read_config(save(family, tmp_path))
    # The first layer of DeepSeek alone: behind it are experts, which are chosen by numbers.
    stages = 4 if family.startswith("deepseek") else 2
    cut = split_layers(config.model, stages)[: 1 if stages == 4 else 2]
    hidden = None
    for layers in cut:
        engine = EngineConfig.from_options(
            str(tmp_path), pipeline_parallel_size=stages, max_model_len=64
        )
        executor = CpuExecutor(config, engine, stages, layers, META)
        executor.load(tmp_path, lambda done, total: None)
        described = config.model.layers[layers.start : layers.stop]
        rows = PagedBatch(np.array([[1, 0]]), np.array([0, 6]), np.array([6]), 0, 4, 8)
        windows = frozenset(layer.attention.window for layer in described)
        six = torch.arange(6)
        inputs = StageInputs(six, six, plan_table_attention(rows, executor.dtype, windows))
        inputs = map_tensors(inputs, lambda tensor: tensor.to(META))
        caches: list[tuple[Tensor, Tensor]] = []
        for layer in described:
            back = getattr(layer.attention, "kv_layers_back", 0)
            if back:
                caches.append(caches[-back])
                continue
            held = layer.attention.kv_entry
            keys = torch.empty(
                9, 4, held.num_heads, held.key_dim, dtype=executor.dtype, device=META
            )
            values = (
                keys[..., : held.value_dim]
                if held.is_shared
                else keys.new_empty(9, 4, held.num_heads, held.value_dim)
            )
            caches.append((keys, values))
        hidden = executor.stage.forward(inputs, hidden, caches)
        assert hidden.is_meta
    if len(cut) == 2:
        assert hidden is not None
        assert executor.stage.compute_logits(hidden).shape == (6, config.model.vocab_size)
