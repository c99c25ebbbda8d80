"""With compiled kernels, logits do not depend on the batch, nor on how a sequence is chunked.

A request that is recomputed after a failure therefore continues as if nothing had happened: its
tokens pass again as prefill chunks, and the logits are those of the decodes.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gllm.kernels.attention_plan import PagedBatch, plan_attention
from gllm.kernels.native.library import load_library
from gllm.kernels.state_plan import NO_SLOT
from gllm.kernels.threads import set_num_threads
from gllm.models.config import read_config
from gllm.models.loader import Checkpoint, Weights
from gllm.models.stage import ModelStage, StageInputs
from gllm.runtime.worker.kv_cache import KVCache
from tests.models.test_fp8 import save_both
from tests.support.models.state_plans import plan_states
from tests.support.models.tiny_models import FAMILIES, save

BLOCK, BLOCKS = 4, 48
LENGTH, PROMPT, OTHERS = 41, 17, (3, 29, 1)
"""Tokens of the sequence under test, those of them that are its prompt, tokens of the others."""
LATENT = "deepseek-v2"
VARIED = ["llama3", "gemma2", "bloom", LATENT]
"""Families whose attention differs: plain, with windows and soft caps, ALiBi, latents."""
QUICK = {
    ("llama3", torch.float32),
    ("llama3", torch.bfloat16),
    ("llama3", torch.float16),
    ("gemma2", torch.bfloat16),
    ("bloom", torch.float32),
    ("deepseek-v2", torch.bfloat16),
    ("qwen2-moe", torch.float32),
    ("phi3-long", torch.float16),
    ("gpt2", torch.float32),
    ("falcon-40b", torch.bfloat16),
    ("cohere-normed", torch.float16),
}
"""Families whose layers differ, in turn in each type."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Step = list[tuple[int, int]]
"""Sequences of a step and the number of tokens of each; decodes first."""
DECODED: list[Step] = [
    [(0, PROMPT), *enumerate(OTHERS, start=1)],
    *([(0, 1), (1, 1), (3, 1)] for _ in range(PROMPT, LENGTH)),
]
RECOMPUTED: dict[str, list[Step]] = {
    "whole": [[(0, LENGTH)]],
    "in chunks of 1": [[(0, 1)] for _ in range(LENGTH)],
    "in chunks of 7": [[(0, count)] for count in (7, 7, 7, 7, 7, 6)],
    "in chunks of 16, beside others": [
        [(0, 16), (2, 29)],
        [(2, 1), (0, 16), (1, 3)],
        [(1, 1), (2, 1), (0, 9)],
    ],
    "a long chunk beside others, then a decode": [[(0, 40), (1, 3), (3, 1)], [(0, 1), (1, 1)]],
}


pytestmark = pytest.mark.skipif(load_library() is None, reason="a BLAS decides the order of sums")


class Model:
    """A family's only stage with a cache of its own."""

    def __init__(self, folder: Path, dtype: torch.dtype, cached: torch.dtype | None = None) -> None:
        model = read_config(folder).model
        every = range(model.num_layers)
        with Checkpoint(folder, dtype, model, every) as checkpoint:
            self.stage = ModelStage(model, Weights(checkpoint), every, 64)
        self.cache = KVCache(
            model.layers, BLOCKS, BLOCK, cached or dtype, num_state_slots=len(OTHERS) + 1
        )
        self.windows = {layer.attention.window for layer in model.layers}
        self.dtype = dtype

    def logits(self, steps: list[Step]) -> Tensor:
        """Those of sequence 0, [LENGTH, vocabulary], computed by these steps."""
        table = np.zeros((len(OTHERS) + 1, 12), dtype=np.int64)
        table[0] = np.arange(12)
        for other in range(len(OTHERS)):
            blocks = np.arange(12 + other, BLOCKS, len(OTHERS))
            table[other + 1, : len(blocks)] = blocks
        seen = np.zeros(len(table), dtype=np.int64)
        results = []
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
            states = plan_states(
                *(
                    [(int(count), owner if first else NO_SLOT, owner)]
                    for owner, count, first in zip(owners.tolist(), counts, begin, strict=True)
                )
            )
            inputs = StageInputs(torch.from_numpy(ids), positions, plans, states)
            with torch.inference_mode():
                hidden = self.stage.forward(inputs, None, self.cache.layers)
                logits = self.stage.compute_logits(hidden)
            own = int(np.flatnonzero(owners == 0)[0])
            results.append(logits[start[own] : start[own + 1]])
        return torch.cat(results)


def marks_of(family: str, dtype: torch.dtype) -> list[pytest.MarkDecorator]:
    if (family, dtype) in QUICK:
        return []
    is_full = dtype != torch.float16 or family in VARIED
    return [pytest.mark.full if is_full else pytest.mark.long]


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        pytest.param(family, dtype, marks=marks_of(family, dtype))
        for family in FAMILIES
        for dtype in DTYPES
    ],
    ids=str,
)
def test_recomputed_logits_are_those_of_the_decodes(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    check(Model(save(family, tmp_path), dtype))


@pytest.mark.parametrize(
    ("family", "dtype", "cached"),
    [
        pytest.param(
            *(family, dtype, cached), marks=[] if (row - column) % 3 == third else pytest.mark.full
        )
        for third, cached in enumerate((torch.float8_e4m3fn, torch.int8))
        for row, family in enumerate(VARIED)
        for column, dtype in enumerate(DTYPES)
        if (family, cached) != (LATENT, torch.int8)
    ],
    ids=str,
)
def test_with_a_kv_cache_of_8_bits(
    family: str, dtype: torch.dtype, cached: torch.dtype, tmp_path: Path
) -> None:
    check(Model(save(family, tmp_path), dtype, cached))


def test_with_weights_in_fp8(tmp_path: Path) -> None:
    made, _ = save_both("qwen3-moe", "blocks", tmp_path)
    check(Model(made, torch.bfloat16))


def test_with_several_threads(tmp_path: Path) -> None:
    """Of 3, which do not divide the rows evenly."""
    model = Model(save("falcon-7b", tmp_path), torch.float32)
    decoded = model.logits(DECODED)
    set_num_threads(3)
    try:
        assert torch.equal(model.logits(RECOMPUTED["whole"]), decoded)
    finally:
        set_num_threads(1)


def check(model: Model) -> None:
    """Compute a sequence as decodes, then in every other way: all logits are the same bits."""
    decoded = model.logits(DECODED)
    assert decoded.isfinite().all()
    differing = {
        name: int((model.logits(steps) != decoded).any(dim=1).sum())
        for name, steps in RECOMPUTED.items()
    }
    assert differing == dict.fromkeys(RECOMPUTED, 0)
