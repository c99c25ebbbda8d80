"""One stage's arithmetic: weights, KV cache, and a micro-batch's way through them.

Owns what a stage remembers between steps. Knows nothing of processes, threads and sockets: the
worker calls `prepare` on one thread, `compute` on another and `sample` on a third, each in plan
order. What they share is handed over in the Batch; the one exception is the last token of each
sequence, which `sample` leaves for `compute` of a batch with placeholders. Those are at one stage
alone, where one thread does both.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from gllm.config.engine import EngineConfig
from gllm.config.field_types import FieldError
from gllm.kernels.attention_backends import AttentionRequirements, choose_backend
from gllm.kernels.native.library import log_kernels
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.attention import head_shape
from gllm.models.config import ModelConfig
from gllm.models.loader import Checkpoint, Weights
from gllm.models.stage import ModelStage
from gllm.runtime.batch import Batch, BlockTables, CacheShape, build_inputs, plan_each
from gllm.runtime.device import cache_dtype, capability, check_quantization, compute_dtype
from gllm.runtime.grammars import Grammars
from gllm.runtime.kv_cache import KVCache, block_bytes
from gllm.runtime.logprobs import PromptRows, prompt_rows
from gllm.runtime.sampler import SampledRows, draw, give_up, plan_rows, results, tell_embedded
from gllm.runtime.sampling_state import SamplingState, states_of
from gllm.scheduler.block_table_replica import BlockTableReplica, SequenceView
from gllm.scheduler.plan import SampledToken, StepPlan

CPU = torch.device("cpu")

log = logging.getLogger(__name__)


class DeviceTime(NamedTuple):
    """Seconds that a device took for a step, by its own clock."""

    elapsed: float
    """From its first work to its last."""
    busy: float
    """Without what it waited in between, for grammars say."""


class StageExecutor:
    """One stage's model part and KV cache."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        stage: int,
        stages: int,
        layers: range,
        device: torch.device = CPU,
    ) -> None:
        """Raises FieldError where weights, KV cache or attention cannot be as configured."""
        self.model = model_config.model
        self.layers = layers
        self._described = self.model.layers[layers.start : layers.stop]
        self._longest = engine_config.max_model_len or self.model.context_length
        self.is_first = stage == 0
        self.is_last = stage == stages - 1
        self.dtype = compute_dtype(engine_config.dtype, model_config.dtype, device.type)
        check_quantization(engine_config.quantization, device.type)
        self._quantization = engine_config.quantization
        self.device = device
        gpu = capability(device)
        self.cache_dtype = cache_dtype(engine_config.kv_cache_dtype, self.dtype, gpu)
        block_size = engine_config.scheduler.block_size
        self.block_bytes = block_bytes(self._described, block_size, self.cache_dtype)
        if self.is_first and device.type == "cpu":
            log_kernels()
        self.backend = self._attention_backend(engine_config, gpu)
        self.weight_bytes = 0
        self._mirror = BlockTableReplica()
        self._tables = BlockTables()
        self._samplings: dict[int, SamplingState] = {}
        self._keeps_tokens = stages == 1
        self._last_tokens: dict[int, int] = {}
        self._eos_ids = model_config.eos_ids
        self._grammars: Grammars | None = None

    def _attention_backend(self, config: EngineConfig, gpu: tuple[int, int] | None) -> str:
        """What computes attention; the log tells why. gpu: its capability, None on a CPU."""
        requirements = AttentionRequirements(
            "cpu" if gpu is None else "cuda",
            gpu or (0, 0),
            self.dtype,
            self.cache_dtype,
            config.scheduler.block_size,
            frozenset(head_shape(layer.attention) for layer in self._described),
        )
        try:
            choice = choose_backend(config.attention_backend, requirements)
        except ValueError as error:
            raise FieldError("attention_backend", str(error)) from error
        log.log(
            # It is the slowest everywhere.
            logging.WARNING if choice.name == "torch" else logging.INFO,
            "attention by %s (%s); KV cache in %s, %d bytes a block",
            *(choice.name, choice.reason, self.cache_dtype, self.block_bytes),
        )
        return choice.name

    def load(self, folder: Path, progress: Callable[[int, int], None]) -> None:
        """Read the stage's weights; `progress` hears (bytes read, bytes in all).

        Raises ModelError where the folder does not hold them.
        """
        part = self.model, self.layers, self.device
        with Checkpoint(folder, self.dtype, *part) as checkpoint:
            checkpoint.report_to(progress)
            weights = Weights(checkpoint, quantization=self._quantization)
            # What is made beside the weights, frequencies say, belongs there too.
            with self.device:
                self._stage = ModelStage(checkpoint.model, weights, self.layers, self._longest)
            checkpoint.finish()
        self.weight_bytes = checkpoint.weight_bytes
        if self.is_last:
            self._grammars = Grammars(folder, self.model.vocab_size, self._eos_ids)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """Make room for `num_blocks` KV blocks."""
        self._cache = KVCache(self._described, num_blocks, block_size, self.cache_dtype)
        windows = frozenset(layer.attention.window for layer in self._described)
        plan = partial(plan_each, backend=self.backend)
        self._shape = CacheShape(num_blocks, block_size, self.dtype, windows, plan)

    def register(self, message: RegisterSequences) -> "Future[bytes] | None":
        """Register sequences that coming plans may name.

        Returns a future that is done once their grammar is compiled, None where they have none. It
        fails for a request that cannot be sampled: rows that name it are then sampled anyhow, so
        that they disturb no others, and the driver has to end it.
        """
        for seq in range(message.seq, message.seq + message.n):
            self._mirror.register(seq, message.prompt_len, message.prompt)
        try:
            states = states_of(message, self._grammars)
        except Exception as error:
            log.exception("request %d could not be registered", message.seq)
            plain = [SamplingState(SequenceSamplingParams(), None, []) for _ in range(message.n)]
            self._samplings.update(enumerate(plain, start=message.seq))
            failed: Future[bytes] = Future()
            failed.set_exception(error)
            return failed
        self._samplings.update(enumerate(states, start=message.seq))
        guides = [state.guide for state in states if state.guide is not None]
        return guides[-1].first_mask if guides else None

    def prepare(self, plan: StepPlan) -> Batch:
        """Build the plan's micro-batch as tensors.

        Raises KeyError for an unregistered sequence. Everything held for the sequences that the
        plan releases is freed, even if this raises; `give_up_plan` is still to be called then.
        """
        try:
            return self._build(plan)
        finally:
            self._free(plan.released_seqs)

    def _build(self, plan: StepPlan) -> Batch:
        """Build the plan's micro-batch."""
        followed = self._mirror.apply(plan)
        inputs, placeholders = build_inputs(
            plan, followed, self._tables, self._shape, self.is_first
        )
        sample_rows, sampled, prompts = self._sampled_rows(plan, followed)
        return Batch(
            plan.step,
            inputs,
            sum(row.num_tokens for row in plan.rows),
            sample_rows,
            sampled,
            prompts,
            placeholders,
        )

    def _free(self, seqs: list[int]) -> None:
        """Free everything held for sequences that have ended.

        The driver releases a sequence once all its steps have committed, so no thread samples it
        any more.
        """
        self._mirror.release(seqs)
        self._tables.release(seqs)
        for seq in seqs:
            self._samplings.pop(seq, None)
            self._last_tokens.pop(seq, None)

    def _sampled_rows(
        self, plan: StepPlan, followed: list[SequenceView]
    ) -> tuple[Tensor, SampledRows, list[PromptRows]]:
        """Which token rows are sampled and which scored, and how; none but on the last stage."""
        owners, states, indices, rows = [], [], [], []
        prompts: list[PromptRows] = []
        end = 0
        for row, sequence in zip(plan.rows, followed, strict=True):
            begin, end = end, end + row.num_tokens
            if not self.is_last:
                continue
            state = self._samplings[row.seq]
            if state.spec.prompt_logprobs is not None:
                prompts += prompt_rows(state, row, begin)
            if row.should_sample:
                rows.append(end - 1)
                owners.append((row.seq, row.epoch))
                states.append(state)
                indices.append(row.start + row.num_tokens - sequence.prompt_len)
        sampled = plan_rows(owners, states, indices)
        return torch.tensor(rows, dtype=torch.int64), sampled, prompts

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
        for prompt in batch.prompts:
            prompt.compute(hidden, self._stage.compute_logits)
        sampling = hidden[batch.sample_rows]
        if batch.sampled.embedded:
            batch.embeddings = self._stage.apply_final_norm(sampling[batch.sampled.embedded])
        return self._stage.compute_logits(sampling)

    @torch.inference_mode()
    def sample(
        self, batch: Batch, logits: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        """What each sampling row drew, and the log-probabilities of those that tell them; to be
        called for every batch of the last stage.

        logits: what `compute` returned; overwritten.
        """
        for prompt in batch.prompts:
            prompt.record()
        drawn = draw(logits, batch.sampled)
        sampled = results(batch.sampled, drawn)
        if self._keeps_tokens:
            self._last_tokens.update((result.seq, result.token_id) for result in sampled)
        embedded = tell_embedded(batch.sampled, batch.embeddings, drawn.errors)
        return sampled, drawn.logprobs + embedded

    def give_up(self, batch: Batch, error: str) -> None:
        """Fail the guides of a step that failed, so that no later step waits for its tokens."""
        give_up(batch.sampled.states, error)

    def give_up_plan(self, plan: StepPlan, error: str) -> None:
        """Fail the guides of a plan that could not be prepared, as `give_up` does."""
        states = [self._samplings.get(row.seq) for row in plan.rows]
        give_up([state for state in states if state is not None], error)
