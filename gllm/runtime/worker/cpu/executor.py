"""Executor of a stage on a CPU."""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from gllm.config.engine import CPU_EXPERTS_ON_CPU, EngineConfig
from gllm.kernels.native.library import log_kernels, operations_by_torch
from gllm.kernels.threads import num_threads, using_torch_threads
from gllm.messages.sampling import SampleDetails
from gllm.models.config import ModelConfig
from gllm.models.formats.stored_format import stored_format
from gllm.models.pooling import MeanPooling
from gllm.options.field_types import FieldError
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu.sampler import sample_rows
from gllm.runtime.worker.executor import Executor
from gllm.runtime.worker.sampling import build_embedding_details, to_sampled_tokens
from gllm.scheduler.plan import SampledToken

CPU = torch.device("cpu")
COUNTED_TOKENS = 32
"""Tokens of a step from which on its layers are counted one by one. Smaller steps are decodes or
short, and a recorded program runs without a stop."""
MANY_LOGITS = 2**21
"""Logits of a step from which on torch samples with as many threads as the kernels have."""


class CpuExecutor(Executor):
    """Runs the layers of one stage on a CPU; weights and KV cache are in the host's memory.

    If there is a single stage, one thread computes and samples, so `sample` may store the last
    token of each sequence for `compute` of the next batch with placeholders.
    """

    can_keep_kv_cache = True

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        num_stages: int,
        layers: range,
        device: torch.device = CPU,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Choose dtypes and the attention backend.

        Raises:
            FieldError: weights, KV cache or attention cannot be as configured, or the ranks cannot
                share the model, or `cpu_experts` is set.
        """
        if engine_config.has_cpu_experts:
            raise FieldError("cpu_experts", CPU_EXPERTS_ON_CPU)
        super().__init__(model_config, engine_config, num_stages, layers, device, rank, num_ranks)
        self._last_tokens: dict[int, int] = {}
        """Last sampled token by sequence, on rank 0."""
        self._pooling: MeanPooling | None = None
        """Pooling of embeddings, if it is not that of the last token."""

    def load(
        self,
        folder: Path,
        on_progress: Callable[[int, int], None],
        previous: Sequence[Executor] = (),
        running: Executor | None = None,
        limit_bytes: float = math.inf,
    ) -> None:
        """Load the stage's weights, then limit torch to one thread if compiled kernels compute."""
        super().load(folder, on_progress, previous, running, limit_bytes)
        if self.has_sampler and self.model.pooling is not None:
            self._pooling = MeanPooling(self.model.pooling, folder)
        if self._kernels_compute_layers:
            torch.set_num_threads(1)

    @property
    def _kernels_compute_layers(self) -> bool:
        """True if torch computes only what is short: embeddings, choices of experts, samples."""
        return (
            self.device.type == "cpu"
            and self.backend == "native"
            and self._has_kernels_for_weights
            and not operations_by_torch(self.dtype)
        )

    @property
    def _has_kernels_for_weights(self) -> bool:
        """False if torch multiplies by the checkpoint's weights: those in 8-bit floats."""
        stored = self.model.quantization
        return stored is None or self.device.type in stored_format(stored.format).devices

    def log_choices(self) -> None:
        """Log the attention backend, the dtypes and the kernels of the stage."""
        super().log_choices()
        if self.is_first and self._rank == 0 and self.device.type == "cpu":
            log_kernels()

    @property
    def held_seqs(self) -> set[int]:
        """Sequences that have been registered or scheduled and not released."""
        return super().held_seqs | self._last_tokens.keys()

    def _release(self, seqs: list[int]) -> None:
        super()._release(seqs)
        for seq in seqs:
            self._last_tokens.pop(seq, None)

    @torch.inference_mode()
    def compute(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Compute a micro-batch.

        Args:
            batch: if it has placeholders, the previous one has been sampled.
            hidden: activations [tokens, hidden] of the previous stage; None on the first stage.

        Returns:
            Activations [tokens, hidden]; on the last stage logits [samples, vocabulary] float32,
            of which ranks other than 0 have no row.

        Raises:
            GroupClosedError: another rank of the stage has ended or cancelled the groups.
        """
        if batch.placeholders:
            self._fill_placeholders(batch)
        hidden = self._forward(batch, hidden)
        if not self.is_last:
            return hidden
        for chunk in batch.prompt_chunks:
            chunk.compute_scores(hidden, self._stage.compute_logits)
        if self._draft is not None and self._draft.needs_hidden:
            batch.draft_hidden = self._stage.normalize(hidden)
        sampled = hidden[batch.logits_indices]
        if batch.sampling.embedding_rows:
            batch.embeddings = self._pool(batch, hidden)
        return self._stage.compute_logits(sampled)

    def _pool(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Return the embeddings [embedding rows, size] float32 of hidden [tokens, hidden]."""
        last_tokens = batch.logits_indices[batch.sampling.embedding_rows]
        if self._pooling is None:
            return self._stage.apply_final_norm(hidden[last_tokens])
        # Texts are in one piece: each is all tokens of its row.
        starts = next(iter(batch.inputs.attention.values())).rows.query_start
        pooled = []
        for last in last_tokens.tolist():
            begin = int(starts[np.searchsorted(starts, last, side="right") - 1])
            pooled.append(self._pooling(self._stage.apply_final_norm(hidden[begin : last + 1])))
        return torch.stack(pooled)

    def _forward(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Compute the layers, and count them for other engines that fetch the keys and values."""
        progress, on_layer = self._progress, None
        if progress is not None and self._counts_each_layer and batch.num_tokens >= COUNTED_TOKENS:
            on_layer = partial(progress.record, batch.lane, batch.step + 1)
        hidden = self._stage.forward(batch.inputs, hidden, self._cache.layers, on_layer)
        if progress is not None:
            progress.record(batch.lane, batch.step + 1, len(self.layers))
        return hidden

    def _fill_placeholders(self, batch: Batch) -> None:
        """Put the tokens that were sampled last into the inputs of a batch."""
        rows, seqs = zip(*batch.placeholders, strict=True)
        tokens: Tensor | None = None
        if self._rank == 0:
            # A sequence whose step failed has no token: it has ended, and this row is discarded.
            tokens = torch.tensor([self._last_tokens.get(seq, 0) for seq in seqs])
        if self._groups is not None:
            tokens = self._groups.head.broadcast(tokens, len(rows))
        assert tokens is not None, "without groups there is only rank 0"
        batch.inputs.token_ids[list(rows)] = tokens

    @torch.inference_mode()
    def sample(
        self, batch: Batch, output: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        """Return the result of each sampling row, and details of the rows that request any.

        `output` are logits.
        """
        for chunk in batch.prompt_chunks:
            chunk.store_scores()
        is_long = output.numel() >= MANY_LOGITS
        with using_torch_threads(num_threads()) if is_long else nullcontext():
            samples = sample_rows(output, batch.sampling)
        results = to_sampled_tokens(batch.sampling, samples)
        if self._keeps_last_tokens:
            self._last_tokens.update((result.seq, result.token_id) for result in results)
        drafter = None if self._draft is None else self._draft.drafter
        if drafter is not None and batch.draft_rows is not None:
            results = drafter.draft(batch.draft_rows, results, batch.draft_hidden)
        embedded = build_embedding_details(batch.sampling, batch.embeddings, samples.errors)
        return results, samples.details + embedded
