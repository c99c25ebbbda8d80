"""Recorded layers are the same as layers called one by one, to the last bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gllm.kernels.attention_plan import PagedBatch, plan_attention
from gllm.kernels.native.library import load_library, using_library
from gllm.models.config import read_config
from gllm.models.loader import Checkpoint, Weights
from gllm.models.stage import ModelStage, StageInputs
from gllm.runtime.worker.kv_cache import KVCache
from tests.support.models.kernel_builds import UnrecordableLibrary
from tests.support.models.tiny_models import save

BLOCK = 4
PROMPTS = (7, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECORDED = [
    "llama3",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "phi3",
    "glm4",
    "baichuan-7b",
]
CALLED = ["mixtral", "cohere", "gpt2", "deepseek-v2"]
"""Families that compute something between compiled kernels."""


def rows_at(step: int) -> PagedBatch:
    """Step 0: both prompts; then a token of each."""
    counts = np.array(PROMPTS if step == 0 else (1, 1))
    context = np.array(PROMPTS) + step
    table = np.array([[5, 1, 4], [0, 2, 3]])
    start = np.concatenate(([0], counts.cumsum()))
    return PagedBatch(table, start, context, 0 if step == 0 else 2, BLOCK, 6)


class Served:
    """A family's only stage with a cache of its own."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        model = read_config(folder).model
        every = range(model.num_layers)
        with Checkpoint(folder, dtype, model, every) as checkpoint:
            self.stage = ModelStage(model, Weights(checkpoint), every, 64)
        self.cache = KVCache(model.layers, 6, BLOCK, dtype)
        self.windows = {layer.attention.window for layer in model.layers}
        self.dtype = dtype

    def step(self, step: int) -> Tensor:
        """The residual stream behind all layers."""
        rows = rows_at(step)
        counts = np.diff(rows.query_start)
        spots = [np.arange(n - c, n) for n, c in zip(rows.context_len, counts, strict=True)]
        positions = np.concatenate(spots)
        plans = {window: plan_attention(rows, self.dtype, window) for window in self.windows}
        ids = torch.from_numpy(positions * 7 % 100 + 3)
        inputs = StageInputs(ids, torch.from_numpy(positions), plans)
        with torch.inference_mode():
            return self.stage.forward(inputs, None, self.cache.layers).clone()


@pytest.mark.skipif(load_library() is None, reason="nothing is compiled")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, DTYPES[number % 3]) for number, family in enumerate(RECORDED)),
        *(("llama3", dtype) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_a_program_computes_the_same(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    recorded = Served(folder, dtype)
    results = [recorded.step(step) for step in range(4)]
    assert recorded.stage.layers.is_program
    with using_library(UnrecordableLibrary()):
        called = Served(folder, dtype)
        for step, result in enumerate(results):
            assert torch.equal(called.step(step), result)
    assert not called.stage.layers.is_program
    for one, other in zip(recorded.cache.layers, called.cache.layers, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


@pytest.mark.parametrize("family", CALLED)
def test_without_a_program(family: str, tmp_path: Path) -> None:
    served = Served(save(family, tmp_path), torch.float32)
    assert served.step(0).isfinite().all()
    assert not served.stage.layers.is_program
