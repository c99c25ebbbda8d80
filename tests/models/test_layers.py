"""Recorded layers are the same as layers called one by one, to the last bit."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gllm.kernels.attention_plan import PagedBatch, plan_attention
from gllm.kernels.native.library import load_library, using_library
from gllm.kernels.state_plan import NO_SLOT
from gllm.models.config import read_config
from gllm.models.loader import Checkpoint, Weights
from gllm.models.stage import ModelStage, StageInputs
from tests.support.models.kernel_builds import UnrecordableLibrary
from tests.support.models.state_plans import allocate_cache, plan_states
from tests.support.models.tiny_models import FAMILIES, save

BLOCK = 4
PROMPTS = (7, 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = {
    "qwen3": "norms of heads",
    "gemma2": "norms after the blocks too",
    "qwen2-moe": "experts, some with a shared one",
    "olmo2": "norms after the blocks alone, norms of all heads together",
    "gpt-neox": "parallel blocks, LayerNorm",
    "gemma4-e": "per-layer embedding, shared keys and values, factors of layers",
    "deepseek-v2": "latent attention",
    "ministral3": "factors of late queries",
    "falcon-h1": "attention beside Mamba 2",
    "qwen3-next": "delta nets, gates of heads",
}
"""Families that together have all kinds of layers."""


def rows_at(step: int) -> PagedBatch:
    """Step 0: both prompts; then a token of each."""
    counts = np.array(PROMPTS if step == 0 else (1, 1))
    context = np.array(PROMPTS) + step
    table = np.array([[5, 1, 4], [0, 2, 3]])
    start = np.concatenate(([0], counts.cumsum()))
    return PagedBatch(table, start, context, 0 if step == 0 else 2, BLOCK, 6)


class Served:
    """A family's only stage with a cache of its own; the state of sequence n is in slot n."""

    def __init__(self, folder: Path, dtype: torch.dtype, quantization: str = "none") -> None:
        model = read_config(folder).model
        every = range(model.num_layers)
        with Checkpoint(folder, dtype, model, every) as checkpoint:
            weights = Weights(checkpoint, quantization=quantization)
            self.stage = ModelStage(model, weights, every, 64)
        self.cache = allocate_cache(model.layers, 6, BLOCK, dtype, len(PROMPTS))
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
        states = plan_states(
            *([(count, n if step else NO_SLOT, n)] for n, count in enumerate(counts.tolist()))
        )
        inputs = StageInputs(ids, torch.from_numpy(positions), plans, states)
        with torch.inference_mode():
            return self.stage.forward(inputs, None, self.cache).clone()


@pytest.mark.skipif(load_library() is None, reason="nothing is compiled")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *((family, DTYPES[number % 3]) for number, family in enumerate(KINDS)),
        *(
            pytest.param(family, DTYPES[number % 3], marks=pytest.mark.full)
            for number, family in enumerate(FAMILIES)
            if family not in KINDS
        ),
        *(pytest.param("llama3", dtype, marks=pytest.mark.full) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_a_program_computes_the_same(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = save(family, tmp_path)
    recorded = Served(folder, dtype)
    results = [recorded.step(step) for step in range(4)]
    assert recorded.stage.layers.is_program
    assert all(result.isfinite().all() for result in results)
    with using_library(UnrecordableLibrary()):
        called = Served(folder, dtype)
        for step, result in enumerate(results):
            assert torch.equal(called.step(step), result)
    assert not called.stage.layers.is_program
    for caches in zip(recorded.cache, called.cache, strict=True):
        assert all(torch.equal(*parts) for parts in zip(*caches, strict=True))
