"""Models with recurrent layers: stages against transformers, prompts whole and in chunks."""

from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from gllm.kernels.attention_plan import PagedBatch
from gllm.kernels.attention_window import AttentionWindow
from gllm.kernels.native.library import load_library, using_library
from gllm.kernels.state_plan import NO_SLOT
from gllm.models.attention import LayerCache
from gllm.models.config import read_config
from gllm.models.loader import Checkpoint, Weights
from gllm.models.stage import ModelStage, StageInputs
from gllm.runtime.worker.batch import plan_windows
from tests.support.full_cases import full_but
from tests.support.models.kernel_builds import UnrecordableLibrary
from tests.support.models.state_plans import Segment, allocate_cache, plan_states
from tests.support.models.tiny_models import HYBRIDS, reference, save

BLOCK, BLOCKS, SLOTS = 4, 24, 4
LENGTH = 19
PROMPTS = [[(7 * i + 3 * n) % 120 + 3 for i in range(LENGTH)] for n in range(2)]


@cache
def expected_logits(family: str, number: int) -> Tensor:
    """transformers' logits of a prompt, [tokens, vocabulary]."""
    with torch.no_grad():
        result: Tensor = reference(family)(torch.tensor([PROMPTS[number]])).logits[0]
    return result


@dataclass
class Pipeline:
    """Stages of a model that compute batches of prompts, with all logits."""

    stages: list[ModelStage]
    caches: list[list[LayerCache]]
    dtype: torch.dtype
    windows: frozenset[AttentionWindow]
    done: dict[int, int] = field(default_factory=dict)
    """Tokens computed so far, by prompt."""

    def step(self, counts: dict[int, int], checkpoints: bool = False) -> dict[int, Tensor]:
        """Compute further tokens of prompts; return their logits.

        The state of prompt n is in slot n. With checkpoints, that of its first token is kept in
        slot 2 + n.
        """
        numbers = list(counts)
        before = [self.done.get(number, 0) for number in numbers]
        ends = [begin + counts[n] for begin, n in zip(before, numbers, strict=True)]
        positions = np.concatenate([np.arange(*pair) for pair in zip(before, ends, strict=True)])
        half = BLOCKS // 2
        table = np.array([np.arange(half) * 2 + number for number in numbers])
        start = np.concatenate(([0], np.cumsum([counts[number] for number in numbers])))
        is_decode = all(count == 1 for count in counts.values())
        rows = PagedBatch(
            table, start, np.array(ends), len(numbers) if is_decode else 0, BLOCK, BLOCKS
        )
        plans: list[list[Segment]] = []
        for number, begin in zip(numbers, before, strict=True):
            source = number if begin else NO_SLOT
            segments: list[Segment] = [(counts[number], source, number)]
            if checkpoints and not begin:
                segments = [(1, source, 2 + number), (counts[number] - 1, 2 + number, number)]
            plans.append(segments)
        ids = [
            PROMPTS[n][p]
            for n, e, b in zip(numbers, ends, before, strict=True)
            for p in range(b, e)
        ]
        hidden = None
        with torch.inference_mode():
            for stage, cache in zip(self.stages, self.caches, strict=True):
                inputs = StageInputs(
                    torch.tensor(ids),
                    torch.from_numpy(positions),
                    plan_windows(rows, self.dtype, self.windows),
                    plan_states(*plans),
                )
                hidden = stage.forward(inputs, hidden, cache).clone()
            assert hidden is not None
            logits = self.stages[-1].compute_logits(hidden)
        self.done |= dict(zip(numbers, ends, strict=True))
        parts = logits.split([counts[number] for number in numbers])
        return dict(zip(numbers, parts, strict=True))


def load(folder: Path, dtype: torch.dtype, num_stages: int = 1) -> Pipeline:
    """Load a checkpoint into stages of equal numbers of layers."""
    model = read_config(folder).model
    size = model.num_layers // num_stages
    spans = [range(size * index, size * (index + 1)) for index in range(num_stages)]
    stages = []
    for span in spans:
        with Checkpoint(folder, dtype, model, span) as checkpoint:
            stages.append(ModelStage(model, Weights(checkpoint), span, 64))
            checkpoint.check_all_read()
    layers = [model.layers[span.start : span.stop] for span in spans]
    caches = [allocate_cache(each, BLOCKS, BLOCK, dtype, SLOTS) for each in layers]
    return Pipeline(
        stages, caches, dtype, frozenset(layer.attention.window for layer in model.layers)
    )


STEPS: dict[str, list[dict[int, int]]] = {
    "whole": [{0: LENGTH}],
    "chunks": [{0: 5}, {0: 1}, {0: 2}, {0: 11}],
    "token by token": [{0: 1}] * LENGTH,
    "two prompts": [{0: 12}, {1: 3, 0: 6}, {1: 15}, {0: 1, 1: 1}],
}


@pytest.mark.parametrize("family", HYBRIDS)
def test_equals_transformers(family: str, tmp_path: Path) -> None:
    """However prompts are divided into chunks, in one stage or two, with checkpoints or without."""
    folder = save(family, tmp_path)
    for number, (name, steps) in enumerate(STEPS.items()):
        pipeline = load(folder, torch.float32, 1 + number % 2)
        computed: dict[int, list[Tensor]] = {0: [], 1: []}
        for counts in steps:
            for prompt, logits in pipeline.step(counts, name == "whole").items():
                computed[prompt].append(logits)
        for prompt, parts in computed.items():
            if parts:
                logits = torch.cat(parts)[:LENGTH]
                expected = expected_logits(family, prompt)[: len(logits)]
                torch.testing.assert_close(logits, expected, rtol=2e-3, atol=2e-3)


CHUNKED = ["qwen3.5", "mamba", "kimi-linear", "jamba", "ling3", "minimax-text-01"]
"""Families whose recurrent layers differ in kind."""


def num_states(family: str) -> int:
    """Number of the four layers that are recurrent."""
    return {"mamba": 4, "kimi-linear": 3, "jamba": 3}.get(family, 2)


@pytest.mark.skipif(load_library() is None, reason="nothing is compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", full_but({"qwen3.5"}, CHUNKED))
def test_chunks_change_no_bit(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """States and logits are the same to the last bit, and those of a recorded program."""
    folder = save(family, tmp_path)
    whole = load(folder, dtype)
    logits = whole.step({0: LENGTH})[0]
    assert whole.stages[0].layers.is_program
    chunks = load(folder, dtype)
    with using_library(UnrecordableLibrary()):
        parts = [chunks.step(counts)[0] for counts in STEPS["chunks"]]
    assert not chunks.stages[0].layers.is_program
    assert torch.equal(torch.cat(parts), logits)
    state_of = [cache for cache in whole.caches[0] if len(cache[0]) == SLOTS]
    same_of = [cache for cache in chunks.caches[0] if len(cache[0]) == SLOTS]
    assert len(state_of) == num_states(family)
    for one, other in zip(state_of, same_of, strict=True):
        assert all(torch.equal(a[0], b[0]) for a, b in zip(one, other, strict=True))
