"""Stages of a model whose ranks are threads, driven by hand-made steps.

Owns the bookkeeping of a few sequences: block tables, positions, and the tokens of each step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.all_reduce import RankGroup
from gllm.kernels.attention_plan import PagedBatch, plan_attention
from gllm.kernels.state_plan import NO_SLOT
from gllm.kernels.threads import set_num_threads
from gllm.models.attention import LayerCache
from gllm.models.config import read_config
from gllm.models.loader import Checkpoint, Weights
from gllm.models.shard import shard
from gllm.models.spec.model import ModelSpec
from gllm.models.split import split_layers
from gllm.models.stage import ModelStage, StageInputs
from gllm.transport.groups import StageGroups
from tests.support.models.state_plans import allocate_cache, plan_states
from tests.support.models.thread_group import run_ranks, thread_groups

BLOCK = 4
MAX_MODEL_LEN = 64
BLOCKS_EACH = MAX_MODEL_LEN // BLOCK
"""Blocks of each sequence; they do not share any."""

OpenGroups = Callable[[int, ModelSpec], list[StageGroups]]
"""(number of ranks, the whole model) to the groups of one stage, by rank."""


def open_thread_groups(size: int, model: ModelSpec | None = None) -> list[StageGroups]:
    """Open groups in plain torch."""
    ends = zip(thread_groups(size), thread_groups(size), strict=True)
    return [StageGroups(*pair) for pair in ends]


@dataclass
class Rank:
    """One rank of one stage."""

    stage: ModelStage
    caches: list[LayerCache]
    weight_bytes: int
    """Bytes in memory of its weights."""


class RankedModel:
    """All ranks of all stages of a model, and the sequences in their KV caches."""

    def __init__(
        self,
        folder: Path,
        degrees: Sequence[int],
        num_sequences: int,
        dtype: torch.dtype = torch.float32,
        quantization: str = "none",
        keep_quantized: bool = False,
        open_groups: OpenGroups = open_thread_groups,
    ) -> None:
        """Read the weights; `degrees` has the number of ranks of each stage."""
        self.model = read_config(folder).model
        self.dtype = dtype
        self.open_groups = open_groups
        self.windows = {layer.attention.window for layer in self.model.layers}
        self.num_computed = [0] * num_sequences
        shuffled = np.random.default_rng(5).permutation(num_sequences * BLOCKS_EACH)
        self.tables = shuffled.reshape(num_sequences, BLOCKS_EACH)
        load = partial(self._load, folder, quantization, keep_quantized)
        stages = zip(split_layers(self.model, len(degrees)), degrees, strict=True)
        self.stages = [
            [load(shard(self.model, rank, size), layers) for rank in range(size)]
            for layers, size in stages
        ]
        self.groups: list[list[StageGroups]] = []
        self.join()

    def _load(
        self, folder: Path, quantization: str, keep: bool, model: ModelSpec, layers: range
    ) -> Rank:
        with Checkpoint(folder, self.dtype, model, layers, keep_quantized=keep) as checkpoint:
            weights = Weights(checkpoint, quantization=quantization)
            stage = ModelStage(checkpoint.model, weights, layers, MAX_MODEL_LEN)
            checkpoint.check_all_read()
        specs = model.layers[layers.start : layers.stop]
        slots = len(self.num_computed)
        caches = allocate_cache(specs, self.tables.size, BLOCK, self.dtype, slots)
        return Rank(stage, caches, checkpoint.weight_bytes)

    def join(self) -> None:
        """Open new groups, which all ranks join."""
        self.groups = [self.open_groups(len(ranks), self.model) for ranks in self.stages]
        for ranks, groups in zip(self.stages, self.groups, strict=True):
            for rank, ends in zip(ranks, groups, strict=True):
                rank.stage.ranks.join(*ends)

    def leave(self) -> None:
        """Close the groups; the weights stay."""
        for ranks, groups in zip(self.stages, self.groups, strict=True):
            for rank, ends in zip(ranks, groups, strict=True):
                rank.stage.ranks.leave()
                rank.stage.release_workspace()
                ends.layers.close()
                ends.head.close()

    def step(self, tokens: dict[int, list[int]]) -> Tensor:
        """Compute the next tokens of some sequences; their logits [all tokens, vocabulary]."""
        owners = sorted(tokens, key=lambda seq: len(tokens[seq]) > 1)
        counts = np.array([len(tokens[seq]) for seq in owners])
        begins = np.array([self.num_computed[seq] for seq in owners])
        for seq in owners:
            self.num_computed[seq] += len(tokens[seq])
        rows = PagedBatch(
            self.tables[owners],
            np.concatenate(([0], counts.cumsum())),
            begins + counts,
            int((counts == 1).sum()),
            BLOCK,
            self.tables.size,
        )
        spots = [np.arange(b, b + c) for b, c in zip(begins, counts, strict=True)]
        inputs = StageInputs(
            torch.tensor([token for seq in owners for token in tokens[seq]]),
            torch.from_numpy(np.concatenate(spots)),
            {window: plan_attention(rows, self.dtype, window) for window in self.windows},
            plan_states(
                *(
                    [(len(tokens[seq]), seq if begin else NO_SLOT, seq)]
                    for seq, begin in zip(owners, begins, strict=True)
                )
            ),
        )
        hidden = None
        for ranks, groups in zip(self.stages, self.groups, strict=True):
            compute = partial(self._compute, ranks, inputs, hidden)
            results = run_ranks([ends.layers for ends in groups], compute)
            hidden = results[0][0]
            assert all(torch.equal(other, hidden) for other, _ in results), "ranks differ"
        logits = results[0][1]
        assert logits is not None
        assert all(other is not None and not len(other) for _, other in results[1:])
        ordered = dict(zip(owners, logits.split(counts.tolist()), strict=True))
        return torch.cat([ordered[seq] for seq in tokens])

    def _compute(
        self, ranks: list[Rank], inputs: StageInputs, hidden: Tensor | None, group: RankGroup
    ) -> tuple[Tensor, Tensor | None]:
        """Return the residual stream and, on the last stage, the logits of one rank."""
        set_num_threads(1)
        rank = ranks[group.rank]
        with torch.inference_mode():
            own = None if hidden is None else hidden.clone()
            output = rank.stage.forward(inputs, own, rank.caches).clone()
            if rank.stage.head is None:
                return output, None
            return output, rank.stage.compute_logits(output)

    def generate(
        self, prompts: list[list[int]], count: int
    ) -> tuple[list[list[int]], list[Tensor]]:
        """Continue prompts greedily; the answers, and the logits of all tokens but the last."""
        steps = [self.step(dict(enumerate(prompts)))]
        ends = np.cumsum([len(prompt) for prompt in prompts])
        logits = list(steps[0].split([len(prompt) for prompt in prompts]))
        answers = [[int(row)] for row in steps[0][ends - 1].argmax(dim=-1)]
        for _ in range(count - 1):
            rows = self.step({seq: answer[-1:] for seq, answer in enumerate(answers)})
            for seq, row in enumerate(rows):
                logits[seq] = torch.cat((logits[seq], row[None]))
                answers[seq].append(int(row.argmax()))
        return answers, logits


@contextmanager
def joined(model: RankedModel) -> Iterator[RankedModel]:
    """Close the groups of a model in the end."""
    try:
        yield model
    finally:
        model.leave()
