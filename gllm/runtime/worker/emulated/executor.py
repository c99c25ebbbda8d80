"""Executor of a stage on an emulated device: it waits as long as the device would compute."""

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from gllm.config.engine import EngineConfig
from gllm.kernels.attention_backends import BackendChoice
from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import RegisterSequences
from gllm.models.config import ModelConfig
from gllm.models.hub import require_tokenizer
from gllm.models.spec.layer import LayerSpec
from gllm.models.stage import StageInputs
from gllm.runtime.emulation.device import EmulatedDevice
from gllm.runtime.emulation.kv_bytes import shrink_entries
from gllm.runtime.emulation.output import EmulatedOutput, EmulatedText
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu.sampler import sample_rows
from gllm.runtime.worker.executor import Executor
from gllm.runtime.worker.sampling import (
    SampleOutput,
    build_embedding_details,
    to_sampled_tokens,
)
from gllm.scheduler.plan import SampledToken, StepPlan
from gllm.scheduler.stage_work import StageWork, compute_stage_work
from gllm.transport.base import EdgeClosedError
from gllm.transport.groups import StageGroups

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
SPIN_SECONDS = 0.15e-3
"""Last part of a wait, in which the thread does not sleep: waking up takes about half of it."""
SPECIAL_LOGIT = -50.0
"""Logit of special tokens, which are sampled only where a request allows no others."""
STAMP_BYTES = 8
"""Bytes of the time with which activations begin."""


@dataclass(slots=True)
class EmulatedStep:
    """A step on an emulated device."""

    work: StageWork
    planned_at: float
    """Time at which the step was prepared; time.monotonic()."""
    texts: list[EmulatedText]
    """Output of each sampling row."""
    begin: float = 0.0
    end: float = 0.0


class EmulatedExecutor(Executor):
    """Waits as long as an emulated device computes a step, and returns tokens of a given text.

    Weights are counted and not loaded, and the KV cache takes no memory until other engines write
    to it. Activations are zeros that begin with the time at which the stage had them.
    """

    measures_time = False
    needs_all_prompts = True

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        num_stages: int,
        layers: range,
        device: EmulatedDevice,
        weight_bytes: int,
        receives_remotely: bool = False,
        returns_remotely: bool = False,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Create the executor of one rank.

        Args:
            model_config: configuration of the whole model.
            engine_config: configuration of the engine.
            num_stages: stages of the pipeline.
            layers: indices of the stage's layers.
            device: timeline of the stage.
            weight_bytes: bytes of the weights of this rank.
            receives_remotely: True if activations come over a real link.
            returns_remotely: True if results go to the driver over a real link.
            rank: index among the workers of the stage.
            num_ranks: workers of the stage.

        Raises:
            FieldError: the ranks cannot share the model.
        """
        if engine_config.dtype == "auto":
            # As on a GPU, and not what this host computes fastest: sizes are those of this type.
            engine_config = replace(engine_config, dtype=model_config.dtype)
        super().__init__(model_config, engine_config, num_stages, layers, CPU, rank, num_ranks)
        self._device, self._counted_bytes = device, weight_bytes
        self._receives_remotely, self._returns_remotely = receives_remotely, returns_remotely
        self._emulation = engine_config.emulation
        self._device_name = engine_config.device
        speculation = engine_config.scheduler.speculative_config
        self._repeats = speculation is not None and speculation.method == "synthetic"
        """True if texts are one repeated token, which the synthetic drafter expects."""
        self._output: EmulatedOutput | None = None
        self._texts: dict[int, EmulatedText] = {}
        """Output by sequence, on the rank that samples."""
        self._activations = torch.empty(0)
        self._is_cancelled = threading.Event()
        self.late_seconds = 0.0
        """Sum over the steps of the time after a step's end at which this process noticed it."""

    def _choose_attention_backend(
        self, config: EngineConfig, gpu_capability: tuple[int, int] | None
    ) -> BackendChoice:
        self._supported_backend = "emulated"
        return BackendChoice("emulated", "nothing is computed")

    @property
    def activation_width(self) -> int:
        """Elements of a token's activations: all of the model's, or those of a header."""
        return self.model.hidden_size if self._emulation.emulated_bytes else STAMP_BYTES

    def _describe_numerics(self, kernels: str, backend: str) -> str:
        output = f"{self._emulation.emulated_text}, {self._emulation.emulated_output}"
        return f"{self._device_name}; {self.kv_numerics}; output {output}"

    @property
    def kv_numerics(self) -> str:
        """Part of `numerics` that engines have to share to transfer KV blocks: no device."""
        size = "real" if self._emulation.emulated_bytes else "small"
        return f"emulated; {self.dtype}, KV cache {self.cache_dtype}, {size} entries"

    def log_choices(self) -> None:
        """Log which device is emulated."""
        if self.is_first and self._rank == 0:
            log.warning(
                "nothing is computed: the device is %s, and texts are made up", self._device_name
            )

    def load(
        self,
        folder: Path,
        on_progress: Callable[[int, int], None],
        previous: Sequence[Executor] = (),
        running: Executor | None = None,
        limit_bytes: float = math.inf,
    ) -> None:
        """Count the weights and prepare the output."""
        self.weight_bytes = self._counted_bytes
        on_progress(self.weight_bytes, self.weight_bytes)
        if self.has_sampler:
            tokenizer = require_tokenizer(self._tokenizer, folder)
            self._output = EmulatedOutput(
                self._emulation, tokenizer, self._eos_ids, self.model.vocab_size
            )
            self._create_grammars(folder)

    def join(self, groups: StageGroups) -> None:
        """Join the other ranks of the stage, which only agree on steps."""
        self._groups = groups

    def close(self) -> None:
        """Free everything; only `load` of a successor may follow."""
        super().close()
        self._texts = {}
        self.release_weights()

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_memory: int | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """Allocate the KV cache where other engines read and write it."""
        if kv_memory is not None:
            super().allocate(num_blocks, block_size, kv_memory, num_state_slots)

    @property
    def held_seqs(self) -> set[int]:
        """Sequences that have been registered or scheduled and not released."""
        return super().held_seqs | self._texts.keys()

    def register(self, message: RegisterSequences) -> "Future[bytes] | None":
        """Register sequences that later plans name."""
        grammar = super().register(message)
        if self._output is not None:
            for seq in range(message.seq, message.seq + message.n):
                choice = self._states[seq].params.choice
                text = self._output.create_text(message.prompt, choice)
                if self._repeats:
                    text = text._replace(tokens=[text.continuation(0)], start=0)
                self._texts[seq] = text
        return grammar

    def _release(self, seqs: list[int]) -> None:
        super()._release(seqs)
        for seq in seqs:
            self._texts.pop(seq, None)

    @property
    def _cached_layers(self) -> Sequence[LayerSpec]:
        """Layers of the stage, with small cache entries if real bytes are off."""
        if self._emulation.emulated_bytes:
            return self._layer_specs
        return shrink_entries(self._layer_specs, self._whole_model.layers)

    def _build_batch(self, plan: StepPlan) -> Batch:
        """Build a micro-batch without tensors of inputs."""
        now = time.monotonic()
        sequences = self._mirror.apply(plan)
        logits_indices, sampling, chunks = self._build_sampling(plan, sequences)
        texts = [self._texts[seq] for seq, _ in sampling.sequences]
        nothing = torch.empty(0, dtype=torch.int64)
        work = compute_stage_work(plan.step, plan.rows)
        return Batch(
            plan.step,
            StageInputs(nothing, nothing, {}),
            work.num_tokens,
            logits_indices,
            sampling,
            chunks,
            [],
            plan.lane,
            device_state=EmulatedStep(work, now, texts),
        )

    def compute(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Wait until the device would have computed a micro-batch.

        Raises:
            EdgeClosedError: `cancel` was called.
        """
        step, now = _step_of(batch), time.monotonic()
        ready_at = step.planned_at
        if hidden is not None:
            sent_at = _read_stamp(hidden)
            arrived = self._device.receive(sent_at, now, step.work, self._receives_remotely)
            ready_at = max(ready_at, arrived)
        step.begin, step.end = self._device.run(step.work, ready_at)
        if not _wait_until(step.end, self._is_cancelled):
            raise EdgeClosedError
        self.late_seconds += time.monotonic() - step.end
        if self._progress is not None:
            self._progress.record(batch.lane, batch.step + 1, len(self.layers))
        return self._activations if self.is_last else self._stamp(step)

    def cancel(self) -> None:
        """End a step that waits."""
        self._is_cancelled.set()

    def span(self, batch: Batch, begin: float, end: float) -> tuple[float, float]:
        """Return begin and end of a computed step by the device's timeline."""
        step = _step_of(batch)
        return step.begin, step.end

    def sample(
        self, batch: Batch, output: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        """Return the token of each sampling row and details, once the driver would have them.

        A plain row gets the next token of its made-up text. Others, such as with a grammar or
        penalties, are sampled from logits that prefer it.
        """
        result = self._sample(batch)
        if not self._returns_remotely:
            step = _step_of(batch)
            _wait_until(self._device.returned_at(step.end, step.work), self._is_cancelled)
        return result

    def _sample(self, batch: Batch) -> tuple[list[SampledToken], list[SampleDetails]]:
        assert self._output is not None, "this stage samples"
        sampling, texts = batch.sampling, _step_of(batch).texts
        rows = zip(texts, sampling.output_indices, strict=True)
        tokens = [text.token(index) for text, index in rows]
        for chunk in batch.prompt_chunks:
            chunk.compute_scores(torch.zeros(batch.num_tokens, 1), self._equal_logits)
            chunk.store_scores()
        samples = SampleOutput(tokens, [""] * len(tokens), [])
        special = [row for row, state in enumerate(sampling.states) if not state.is_plain]
        embedded: list[SampleDetails] = []
        if special:
            part = sampling.select(special)
            logits = self._equal_logits(torch.empty(len(special)))
            logits[:, self._output.special_ids] = SPECIAL_LOGIT
            for logit_row, row in zip(logits, special, strict=True):
                has_grammar = sampling.states[row].guide is not None
                index = sampling.output_indices[row]
                preferred = self._output.preferences(texts[row], index, has_grammar)
                logit_row[[*preferred]] = torch.tensor([*preferred.values()])
            special_samples = sample_rows(logits, part)
            samples.update(special, special_samples)
            if part.embedding_rows:
                embeddings = torch.zeros(len(part.embedding_rows), self.model.embedding_size)
                errors = special_samples.errors
                embedded = build_embedding_details(part, embeddings, errors)
        return to_sampled_tokens(sampling, samples), samples.details + embedded

    def _equal_logits(self, rows: Tensor) -> Tensor:
        """Return logits [rows, vocabulary] float32 that prefer no token."""
        return torch.zeros(len(rows), self.model.vocab_size)

    def _stamp(self, step: EmulatedStep) -> Tensor:
        """Return activations [tokens, width] that begin with the end of their step."""
        num_tokens, width = step.work.num_tokens, self.activation_width
        if len(self._activations) < num_tokens:
            self._activations = torch.zeros(num_tokens, width, dtype=self.dtype)
        stamp = torch.tensor([step.end], dtype=torch.float64).view(self.dtype)
        self._activations[0, : len(stamp)] = stamp
        return self._activations[:num_tokens]


def _step_of(batch: Batch) -> EmulatedStep:
    step = batch.device_state
    assert isinstance(step, EmulatedStep)
    return step


def _read_stamp(hidden: Tensor) -> float:
    """Return the time with which activations begin."""
    stamp = hidden[0, : STAMP_BYTES // hidden.element_size()].clone()
    return float(stamp.view(torch.float64)[0])


def _wait_until(end: float, is_cancelled: threading.Event) -> bool:
    """Wait until a time of time.monotonic(), asleep but for the last moment.

    Returns:
        False if the wait was cancelled.
    """
    seconds = end - time.monotonic() - SPIN_SECONDS
    if is_cancelled.wait(max(seconds, 0.0)):
        return False
    while time.monotonic() < end:
        pass
    return True
