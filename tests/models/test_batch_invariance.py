"""With compiled kernels hidden states do not depend on what shares a sequence's micro-batches."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gllm.kernels.attention_plan import PagedBatch, plan_attention
from gllm.kernels.native.library import load_library
from gllm.models.config import read_config
from gllm.models.loader import Checkpoint, Weights
from gllm.models.stage import ModelStage, StageInputs
from gllm.runtime.kv_cache import KVCache
from tests.tiny_models import save

BLOCK, BLOCKS = 4, 48
PROMPT, OTHERS = 41, (3, 29, 1)
FAMILIES = ["llama3", "gemma2", "qwen3", "gpt2", "mixtral"]
"""With and without windows, compiled kernels alone and others between them."""


class Model:
    """A family's only stage with a cache of its own."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        model = read_config(folder).model
        every = range(model.num_layers)
        with Checkpoint(folder, dtype, model, every) as checkpoint:
            self.stage = ModelStage(model, Weights(checkpoint), every, 64)
        self.cache = KVCache(model.layers, BLOCKS, BLOCK, dtype)
        self.windows = {layer.attention.window for layer in model.layers}
        self.dtype = dtype

    def run(self, steps: list[list[tuple[int, int]]]) -> Tensor:
        """The hidden states of sequence 0, from steps of (sequence, tokens)."""
        table = np.zeros((len(OTHERS) + 1, 12), dtype=np.int64)
        table[0] = np.arange(12)
        for other in range(len(OTHERS)):
            blocks = np.arange(12 + other, BLOCKS, len(OTHERS))
            table[other + 1, : len(blocks)] = blocks
        seen = np.zeros(len(table), dtype=np.int64)
        states = []
        for step in steps:
            owners = np.array([sequence for sequence, _ in step])
            counts = np.array([tokens for _, tokens in step])
            begin = seen[owners]
            seen[owners] += counts
            start = np.concatenate(([0], counts.cumsum()))
            decodes = int((counts == 1).cumprod().sum())
            rows = PagedBatch(table[owners], start, seen[owners], decodes, BLOCK, BLOCKS)
            spots = [np.arange(b, b + c) for b, c in zip(begin, counts, strict=True)]
            ids = np.concatenate(
                [(o * 31 + s * 7) % 100 + 3 for o, s in zip(owners, spots, strict=True)]
            )
            plans = {w: plan_attention(rows, self.dtype, w) for w in self.windows}
            positions = torch.from_numpy(np.concatenate(spots))
            inputs = StageInputs(torch.from_numpy(ids), positions, plans)
            with torch.inference_mode():
                hidden = self.stage.forward(inputs, None, self.cache.layers)
            own = int(np.flatnonzero(owners == 0)[0])
            states.append(hidden[start[own] : start[own + 1]].clone())
        return torch.cat(states)


@pytest.mark.skipif(load_library() is None, reason="without compiled kernels sums are a BLAS's")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_do_not_depend_on_neighbours_and_chunks(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = Model(save(family, tmp_path), dtype)
    alone = model.run([[(0, PROMPT)]])
    assert alone.isfinite().all()
    chunked = model.run([[(0, 1)], [(0, 17)], [(0, 22)], [(0, 1)]])
    crowded = model.run(
        [[(0, 30), *enumerate(OTHERS, start=1)], [(0, 10), (2, 1)], [(1, 1), (0, 1), (3, 1)]]
    )
    assert torch.equal(chunked, alone)
    assert torch.equal(crowded, alone)
