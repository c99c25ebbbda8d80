"""One stage's arithmetic: weights, KV cache, and a micro-batch's way through them.

Owns what a stage remembers between steps. Knows nothing of processes, threads and sockets: the
worker calls `prepare` on one thread, `compute` on another and `sample` on a third, each in plan
order. What they share is handed over in the Batch; the one exception is the last token of each
sequence, which `sample` leaves for `compute` of a batch with placeholders.
"""

from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from gllm.config import EngineConfig
from gllm.messages import Register, Sampling
from gllm.models.config import ModelConfig
from gllm.models.loader import Checkpoint, Weights
from gllm.models.stage import ModelStage
from gllm.runtime.batch import Batch, BlockTables, CacheShape, build_inputs
from gllm.runtime.device import compute_dtype
from gllm.runtime.kv_cache import KVCache, block_bytes
from gllm.runtime.sampler import SampledRows, draw, plan_rows
from gllm.scheduler.mirror import Followed, Mirror
from gllm.scheduler.plan import Sampled, StepPlan


class StageExecutor:
    """One stage's model part and KV cache."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        stage: int,
        stages: int,
        layers: range,
    ) -> None:
        self.model = model_config.model
        self.layers = layers
        self._described = self.model.layers[layers.start : layers.stop]
        self._longest = engine_config.max_model_len or self.model.context_length
        self.is_first = stage == 0
        self.is_last = stage == stages - 1
        self.dtype = compute_dtype(engine_config.dtype, model_config.dtype)
        block_size = engine_config.scheduler.block_size
        self.block_bytes = block_bytes(self._described, block_size, self.dtype)
        self.weight_bytes = 0
        self._mirror = Mirror()
        self._tables = BlockTables()
        self._samplings: dict[int, Sampling] = {}
        self._keeps_tokens = stages == 1
        self._last_tokens: dict[int, int] = {}

    def load(self, folder: Path, progress: Callable[[int, int], None]) -> None:
        """Read the stage's weights; `progress` hears (bytes read, bytes in all).

        Raises ModelError where the folder does not hold them.
        """
        with Checkpoint(folder, self.dtype, self.model, self.layers) as checkpoint:
            checkpoint.report_to(progress)
            self._stage = ModelStage(self.model, Weights(checkpoint), self.layers, self._longest)
            checkpoint.finish()
        self.weight_bytes = checkpoint.weight_bytes

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks` KV blocks."""
        self._cache = KVCache(self._described, num_blocks, block_size, self.dtype)
        windows = frozenset(layer.attention.window for layer in self._described)
        self._shape = CacheShape(num_blocks, block_size, self.dtype, windows)

    def register(self, message: Register) -> None:
        """Sequences that coming plans may name."""
        for choice in range(message.n):
            seq = message.seq + choice
            self._mirror.register(seq, message.prompt_len, message.prompt)
            if message.sampling is not None:
                first = message.sampling.choice
                own = msgspec.structs.replace(message.sampling, choice=first + choice)
                self._samplings[seq] = own

    def prepare(self, plan: StepPlan) -> Batch:
        """The plan's micro-batch as tensors. Raises KeyError for an unregistered sequence."""
        followed = self._mirror.apply(plan)
        inputs, placeholders = build_inputs(
            plan, followed, self._tables, self._shape, self.is_first
        )
        sample_rows, sampled = self._sampled_rows(plan, followed)
        self._tables.release(plan.released)
        for seq in plan.released:
            self._samplings.pop(seq, None)
        num_tokens = len(inputs.positions)
        return Batch(
            plan.step, inputs, num_tokens, sample_rows, sampled, placeholders, plan.released
        )

    def _sampled_rows(self, plan: StepPlan, followed: list[Followed]) -> tuple[Tensor, SampledRows]:
        """Which token rows are sampled, and how; none but on the last stage."""
        owners, specs, indices, rows = [], [], [], []
        end = 0
        for row, sequence in zip(plan.rows, followed, strict=True):
            end += row.num_tokens
            if row.samples and self.is_last:
                rows.append(end - 1)
                owners.append((row.seq, row.epoch))
                specs.append(self._samplings[row.seq])
                indices.append(row.start + row.num_tokens - sequence.prompt_len)
        return torch.tensor(rows, dtype=torch.int64), plan_rows(owners, specs, indices)

    @torch.inference_mode()
    def compute(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Activations [tokens, hidden] for the next stage; on the last one logits
        [samples, vocabulary] float32.

        hidden: the activations of the stage before, None on the first. A batch with placeholders
        needs the step before sampled.
        """
        for row, seq in batch.placeholders:
            # A sequence whose step failed has no token; it has ended, and this row is discarded.
            batch.inputs.token_ids[row] = self._last_tokens.get(seq, 0)
        hidden = self._stage.forward(batch.inputs, hidden, self._cache.layers)
        if not self.is_last:
            return hidden
        return self._stage.logits(hidden[batch.sample_rows])

    @torch.inference_mode()
    def sample(self, batch: Batch, logits: Tensor) -> list[Sampled]:
        """What each sampling row drew; to be called for every batch of the last stage.

        logits: what `compute` returned; overwritten.
        """
        tokens, errors = draw(logits, batch.sampled)
        results = [
            Sampled(seq, epoch, token, error)
            for (seq, epoch), token, error in zip(batch.sampled.owners, tokens, errors, strict=True)
        ]
        if self._keeps_tokens:
            self._last_tokens.update((result.seq, result.token) for result in results)
            for seq in batch.released:
                self._last_tokens.pop(seq, None)
        return results
