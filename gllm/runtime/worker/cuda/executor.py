"""Executor of a stage on a device that runs asynchronously to the host.

`compute` only queues a step's work on streams (input copies, layers or a graph, sampling, output
copies) and `sample` waits for the tokens, so the device has its next step before it has finished
the current one.

The last stage stores the token of each slot of the KV cache in a table on the device. Sampling that
looks back at the output reads it from there, including the last token, which the host may not know.
"""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gllm.messages.sampling import SampleDetails
from gllm.models.stage import StageInputs
from gllm.runtime.worker.batch import Batch, gather_token_ids
from gllm.runtime.worker.cuda.readback import PendingTokens
from gllm.runtime.worker.cuda.sampler import SamplerInputs, to_sample_output
from gllm.runtime.worker.cuda.staging import copy_to_device
from gllm.runtime.worker.cuda.start_up import CudaStartUp
from gllm.runtime.worker.executor import DeviceTime
from gllm.runtime.worker.sampling import (
    advance_guides,
    build_embedding_details,
    collect_grammar_masks,
    to_sampled,
)
from gllm.scheduler.plan import SampledToken, StepPlan
from gllm.transport.device_streams import DeviceEvent


class StepInputs(NamedTuple):
    """All tensors of a step that are copied to the device."""

    stage: StageInputs
    logits_indices: Tensor
    """[samples] int64"""
    token_ids: Tensor
    """[tokens] int64: on the last of several stages, whose `stage` has none; else empty."""
    sampler: SamplerInputs
    placeholder_rows: Tensor
    """[placeholders] int64: token rows whose id is the last token of a sequence."""
    placeholder_slots: Tensor
    """[placeholders] int64: slots of those tokens in the table of last tokens; empty on ranks
    without one."""
    last_token_slots: Tensor
    """[samples] int64: slots that the sampled tokens are stored in; empty if they are not."""


@dataclass(slots=True)
class DeviceStepState:
    """State of a batch on a device."""

    inputs: StepInputs
    """On the host."""
    uses_graph: bool = False
    """True if a graph computes the layers."""
    spans: list[tuple[DeviceEvent, DeviceEvent]] = field(default_factory=list)
    """Timed events around each part of the step that the device computes, in order."""
    tokens: PendingTokens | None = None
    """With the sampler, once computed."""


class CudaExecutor(CudaStartUp):
    """Model part and KV cache of one stage on a device."""

    _prepare_seconds = _compute_seconds = 0.0
    """Host time, each on a thread of its own."""

    @property
    def host_seconds(self) -> float:
        """Seconds that the host took to build steps and to queue their work."""
        return self._prepare_seconds + self._compute_seconds

    def bind_thread(self) -> None:
        """See Executor."""
        self._queues.bind_thread()

    def _build_batch(self, plan: StepPlan) -> Batch:
        begin = time.perf_counter()
        batch = super()._build_batch(plan)
        ids = np.zeros(0, dtype=np.int64)
        if self.has_sampler and not self.is_first:
            sequences = [self._mirror.sequences[row.seq] for row in plan.rows]
            ids = gather_token_ids(plan.rows, sequences)
        source_slots = target_slots = torch.empty(0, dtype=torch.int64)
        rows = torch.tensor([row for row, _ in batch.placeholders], dtype=torch.int64)
        if self._keeps_last_tokens and self.has_sampler:
            source_slots = self._last_tokens.find([seq for _, seq in batch.placeholders])
            target_slots = self._last_tokens.assign([seq for seq, _ in batch.sampling.sequences])
        inputs = StepInputs(
            batch.inputs,
            batch.logits_indices,
            torch.from_numpy(ids),
            self._plan_sampling(plan, batch),
            rows,
            source_slots,
            target_slots,
        )
        batch.device_state = DeviceStepState(inputs, self._can_replay(plan, batch))
        self._prepare_seconds += time.perf_counter() - begin
        return batch

    def _release(self, seqs: list[int]) -> None:
        super()._release(seqs)
        self._last_tokens.release(seqs)

    @torch.inference_mode()
    def compute(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Queue the work of a step.

        Args:
            batch: of the step.
            hidden: activations [tokens, hidden] of the previous stage, valid in `stream`.

        Returns:
            Activations [tokens, hidden], valid in `stream` as the other results; with the sampler
            tokens [samples] int64; on the other ranks of the last stage nothing of use.
        """
        begin = time.perf_counter()
        inputs, memory = self._staging.put(batch.device_state.inputs, self.stream)
        try:
            output, scores, embeddings = self._forward(batch, inputs, memory, hidden)
            if self.has_sampler:
                output = self._sample_tokens(batch, inputs, output, scores, embeddings)
            if self._group is not None:
                self._group.end_step(batch.step)
        finally:
            self._staging.release(self.stream)
        self._compute_seconds += time.perf_counter() - begin
        return output

    def wait(self, batch: Batch) -> DeviceTime:
        """See Executor."""
        spans: list[tuple[DeviceEvent, DeviceEvent]] = batch.device_state.spans
        first, last = spans[0][0], spans[-1][1]
        last.synchronize()
        return DeviceTime(
            last.seconds_since(first), sum(end.seconds_since(begin) for begin, end in spans)
        )

    @contextmanager
    def _timed(self, batch: Batch) -> Iterator[None]:
        """Measure, by the device's clock, the work queued on `stream` in this context."""
        begin, end = self._queues.event(timed=True), self._queues.event(timed=True)
        self.stream.record(begin)
        yield
        self.stream.record(end)
        batch.device_state.spans.append((begin, end))

    def sample(
        self, batch: Batch, output: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        """See Executor; the tokens are sampled already, the host waits for their copy."""
        pending = batch.device_state.tokens
        assert pending is not None, "a step is sampled once it is computed"
        tokens, scores, embeddings = pending.read()
        samples = to_sample_output(batch, tokens, scores)
        advance_guides(batch.sampling, samples)
        embedded = build_embedding_details(batch.sampling, embeddings, samples.errors)
        return to_sampled(batch.sampling, samples), samples.details + embedded

    def _plan_sampling(self, plan: StepPlan, batch: Batch) -> SamplerInputs:
        """Build the sampler's inputs of a step; they are empty without the sampler."""
        sampled = [i for i, row in enumerate(plan.rows) if row.should_sample and self.has_sampler]
        num_tokens = [plan.rows[i].start + plan.rows[i].num_tokens for i in sampled]
        block_table = next(iter(batch.inputs.attention.values())).rows.block_table
        return self._sampler.plan(
            batch.sampling, batch.prompt_chunks, num_tokens, block_table[sampled]
        )

    def _forward(
        self, batch: Batch, inputs: StepInputs, memory: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Queue the layers of a step.

        Returns:
            Activations [tokens, hidden] or, on the last stage, logits [samples, vocabulary], with
            no rows where there is no sampler; packed scores of prompts; and embeddings [embedding
            rows, hidden] float32 or None.
        """
        num_tokens, num_rows = batch.num_tokens, len(batch.inputs.positions)
        uses_graph = batch.device_state.uses_graph
        stage_inputs = inputs.stage
        with self.stream.current():
            if uses_graph:
                stage_inputs = self._graphs.fill_inputs(num_rows, stage_inputs, memory, hidden)
            elif hidden is not None and num_tokens < num_rows:
                hidden = functional.pad(hidden, (0, 0, 0, num_rows - num_tokens))
            if len(inputs.placeholder_rows):
                known = self._read_last_tokens(inputs)
                stage_inputs.token_ids.index_copy_(0, inputs.placeholder_rows, known)
            self._store_cached_tokens(stage_inputs, inputs.token_ids, num_tokens)
            if uses_graph:
                # Only the graph is timed: the host queues the operations before it one by one, and
                # a device that waits for the next one does no work.
                with self._timed(batch), self._launching():
                    output = self._graphs.replay(num_rows)[:num_tokens]
                if self.has_sampler and len(batch.logits_indices) < num_tokens:
                    output = output.index_select(0, inputs.logits_indices)
                return output, [], None
            with self._timed(batch):
                return self._run_layers(batch, inputs, stage_inputs, hidden)

    def _can_replay(self, plan: StepPlan, batch: Batch) -> bool:
        """Return whether a graph computes a step; it is the same on all ranks."""
        num_rows = len(batch.inputs.positions)
        attention = next(iter(batch.inputs.attention.values())).rows
        if attention.num_decodes < num_rows or num_rows not in self._graph_sizes:
            return False
        # Not by the sampling rows, which only one rank has.
        sampled = [self._states[row.seq] for row in plan.rows if row.should_sample and self.is_last]
        return not batch.prompt_chunks and not any(state.params.embeds for state in sampled)

    def _read_last_tokens(self, inputs: StepInputs) -> Tensor:
        """Return the tokens [placeholders] int64 of rows whose tokens the host does not know."""
        known = None
        if self.has_sampler:
            known = self._last_tokens.tokens.index_select(0, inputs.placeholder_slots)
        if self._group is not None:
            return self._group.broadcast(known, len(inputs.placeholder_rows))
        assert known is not None, "without ranks the sampler is here"
        return known

    def _launching(self) -> AbstractContextManager[None]:
        """Return a context in which a graph with collectives may be launched."""
        return nullcontext() if self._group is None else self._group.launching()

    def _run_layers(
        self, batch: Batch, inputs: StepInputs, stage_inputs: StageInputs, hidden: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Do the same as `_forward`, without a graph. Has to be called within the stream."""
        hidden = self._stage.forward(stage_inputs, hidden, self._cache.layers)[: batch.num_tokens]
        if not self.is_last:
            return hidden, [], None
        scores = self._sampler.score_prompts(hidden, inputs.sampler, self._stage.compute_logits)
        # Only sampling rows need logits, not the other tokens of a chunk.
        hidden, embeddings = hidden.index_select(0, inputs.logits_indices), None
        if len(inputs.sampler.embedding_rows):
            embeddings = self._stage.apply_final_norm(
                hidden.index_select(0, inputs.sampler.embedding_rows)
            )
        return self._stage.compute_logits(hidden), scores, embeddings

    def _store_cached_tokens(self, inputs: StageInputs, ids: Tensor, num_tokens: int) -> None:
        """Store the step's tokens at the slots of their keys and values, for the sampler.

        ids: [tokens] int64, for stages whose inputs have no token ids.
        """
        if self.has_sampler:
            slots = next(iter(inputs.attention.values())).slots
            ids = inputs.token_ids if self.is_first else ids
            self._cached_tokens.index_copy_(0, slots[:num_tokens], ids[:num_tokens])

    def _sample_tokens(
        self,
        batch: Batch,
        inputs: StepInputs,
        logits: Tensor,
        scores: list[Tensor],
        embeddings: Tensor | None,
    ) -> Tensor:
        """Queue sampling and the copy of tokens, scores and embeddings to the host.

        For rows with grammars the host first waits for their tokens of the steps before.

        Returns:
            Tokens [samples] int64; negative for rows that failed.
        """
        grammar_masks = self._copy_grammar_masks(batch)
        with self.stream.current():
            # Kernels are not launched for zero rows.
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            if len(logits):
                with self._timed(batch):
                    tokens, row_scores = self._sampler.sample(
                        logits, inputs.sampler, self._cached_tokens, grammar_masks
                    )
                scores = [*scores, *row_scores]
            pending = self._readback.start_copy(tokens, scores, self.stream, embeddings)
            batch.device_state.tokens = pending
            if len(inputs.last_token_slots):
                # For the placeholders of the next step.
                slots = inputs.last_token_slots
                self._last_tokens.tokens.index_copy_(0, slots, tokens.clamp(min=0))
        return tokens

    def _copy_grammar_masks(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return rows with grammars [n] int64 and their masks [n, words] int32, on the device."""
        sampling = batch.sampling
        if not sampling.grammar_rows:
            return None
        begin = time.perf_counter()
        masks, _ = collect_grammar_masks(sampling, self.model.vocab_size)
        # Waiting for guides is no work of the host.
        self._compute_seconds -= time.perf_counter() - begin
        rows = torch.tensor(sampling.grammar_rows)
        return (
            copy_to_device(rows, self._queues, self.stream),
            copy_to_device(masks, self._queues, self.stream),
        )
