"""Executor of a worker: weights, KV cache and the computation of micro-batches.

`Executor` loads weights, follows block tables, registers sequences and builds micro-batches on the
host; `gllm.runtime.worker.cpu.executor` and `gllm.runtime.worker.cuda.executor` compute and sample.
`DeviceBackend` is the device around an executor.
"""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from gllm.config.engine import WEIGHT_CACHE_ON_GPU, EngineConfig
from gllm.config.sized_folder import parse_sized_folder
from gllm.kernels.attention_backends import (
    AttentionRequirements,
    BackendChoice,
    choose_backend,
    find_supported_backend,
)
from gllm.kernels.attention_window import AttentionWindow
from gllm.kernels.native.library import describe_build, describe_kernels
from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import CopyKvBlocks
from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import RegisterSequences
from gllm.models.attention import LayerCache, head_shape
from gllm.models.config import ModelConfig
from gllm.models.draft_plan import plan_draft
from gllm.models.expert_placement import place_experts
from gllm.models.hub import require_tokenizer
from gllm.models.loader import Checkpoint, Weights
from gllm.models.ranks import Ranks
from gllm.models.shard import shard, unsupported_shard_reason
from gllm.models.spec.layer import LayerSpec
from gllm.models.stage import (
    ModelStage,
    ReusableParts,
    describe_stage_part,
    estimate_bytes,
    find_reusable_parts,
    has_ends,
)
from gllm.models.weight_cache.weight_cache import WeightCache
from gllm.observability.process_memory import trim_memory
from gllm.options.field_types import FieldError
from gllm.runtime.worker.batch import (
    Batch,
    BatchConfig,
    BlockTables,
    build_inputs,
    gather_token_ids,
    plan_windows,
)
from gllm.runtime.worker.device import (
    check_quantization,
    choose_cache_dtype,
    choose_compute_dtype,
)
from gllm.runtime.worker.grammars import GuideFactory
from gllm.runtime.worker.kv_cache import (
    KVCache,
    block_bytes,
    describe_layout,
    map_zeros,
    state_bytes,
)
from gllm.runtime.worker.kv_file import KvFile
from gllm.runtime.worker.sampling import (
    PromptChunk,
    SampledWindow,
    SamplingMetadata,
    SamplingState,
    build_sampling_metadata,
    create_default_states,
    create_prompt_chunks,
    create_sampling_states,
    create_window,
    fail_guides,
)
from gllm.runtime.worker.stage_draft import StageDraft
from gllm.runtime.worker.stage_drafter import DraftRows
from gllm.scheduler.block_table_replica import BlockTableReplica, SequenceView
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan
from gllm.transport.groups import StageGroups
from gllm.transport.kv.progress import LayerProgress

if TYPE_CHECKING:
    from gllm.runtime.head.assignment import StageAssignment
    from gllm.transport.device_streams import DeviceRuntime, DeviceStream

log = logging.getLogger(__name__)


class WeightMemoryError(Exception):
    """There is not enough memory to load more layers while another stage still computes."""


class DeviceTime(NamedTuple):
    """Measured duration of one step on a device, in seconds."""

    elapsed: float
    """From the begin of the first operation to the end of the last."""
    busy: float
    """Without the time in which the device waited, for grammar masks for example."""


class Executor(ABC):
    """Runs one rank of a stage: weights, KV cache, and steps; subclasses for CPU and GPU.

    A worker calls `prepare` on one thread, `compute` on a second and `sample` on a third, each in
    the order of steps. Each step's state is in its Batch.
    """

    is_asynchronous = False
    """True if `compute` only queues work on a device; `wait` then waits for it."""
    measures_time = True
    """True if the times of steps are those that the host or the device measures."""
    needs_all_prompts = False
    """True if the stage that samples needs the prompts of all sequences."""
    verifies_grammars = True
    """True if windows of draft tokens may have a grammar: each row waits for the sample before."""
    keeps_weights = True
    """True if `load` can take over the weights of a closed executor in the same process."""
    weight_bytes = 0
    """Bytes of the loaded weights."""
    can_keep_kv_cache = False
    """True if the KV cache can be in a file that outlives the worker."""
    kv_file: KvFile | None = None
    """File of the KV cache that outlives the worker, set before `allocate`; None for none."""
    num_staging_blocks = 0
    """Blocks through which KV blocks of a device pass to other engines; 0 if its KV cache is in the
    memory of the host."""
    _stage: ModelStage
    _folder: Path | None = None
    """Folder of the loaded weights."""
    _grammars: GuideFactory | None = None
    has_packed_weights = False
    """True if `load` has packed weights in the memory of this host."""
    _draft: StageDraft | None = None
    """Draft of speculation, on the rank that samples."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        num_stages: int,
        layers: range,
        device: torch.device,
        rank: int = 0,
        num_ranks: int = 1,
        gpu_capability: tuple[int, int] | None = None,
    ) -> None:
        """Choose dtypes and the attention backend.

        Args:
            model_config: configuration of the whole model.
            engine_config: configuration of the engine.
            num_stages: stages of the pipeline.
            layers: indices of the stage's layers.
            device: that computes.
            rank: index among the workers of the stage.
            num_ranks: workers of the stage, which compute its layers together.
            gpu_capability: compute capability of the GPU; None on a CPU.

        Raises:
            FieldError: weights, KV cache or attention cannot be as configured, or the ranks cannot
                share the model, or it has no experts for `cpu_experts`.
        """
        if (reason := unsupported_shard_reason(model_config.model, num_ranks)) is not None:
            raise FieldError("tensor_parallel_size", reason)
        self._max_model_len = engine_config.max_model_len or model_config.model.context_length
        whole = model_config.model.limit_length(self._max_model_len)
        self._whole_model = place_experts(whole, engine_config.cpu_experts)
        self.model = shard(self._whole_model, rank, num_ranks)
        """With the sizes of this rank."""
        self._rank, self._num_ranks = rank, num_ranks
        self._groups: StageGroups | None = None
        self.layers = layers
        """Layers of this stage."""
        self._layer_specs = self.model.layers[layers.start : layers.stop]
        self.is_first = layers.start == 0
        """True on the first stage."""
        self.reads_token_ids = model_config.model.reads_token_ids(layers)
        """True if the inputs of steps have token ids."""
        self.is_last = layers.stop == self.model.num_layers
        """True on the last stage."""
        self.has_sampler = self.is_last and rank == 0
        """True on rank 0 of the last stage, which samples."""
        self.dtype = choose_compute_dtype(engine_config.dtype, model_config.dtype, device.type)
        """Type of activations and arithmetic."""
        check_quantization(engine_config.quantization, device.type)
        self._quantization = engine_config.quantization
        self._weight_cache = engine_config.weight_cache
        if self._weight_cache is not None and device.type == "cuda":
            raise FieldError("weight_cache", WEIGHT_CACHE_ON_GPU)
        self._overrides = engine_config.hf_overrides
        self._tokenizer = engine_config.tokenizer
        self.device = device
        self._gpu_capability = gpu_capability
        self.cache_dtype = choose_cache_dtype(
            engine_config.kv_cache_dtype, self.dtype, gpu_capability
        )
        block_size = engine_config.scheduler.block_size
        self.block_bytes = block_bytes(self._layer_specs, block_size, self.cache_dtype)
        """Bytes of one KV block over the stage's layers, for the KV heads of this rank, and over
        those of a draft."""
        self.state_bytes = state_bytes(self._layer_specs)
        """Bytes of one state slot over the stage's recurrent layers, for this rank."""
        self._attention = self._choose_attention_backend(engine_config, gpu_capability)
        self.backend = self._attention.name
        speculation = engine_config.scheduler.speculative_config
        self._speculates = speculation is not None
        has_stage_drafts = speculation is not None and speculation.is_drafted_by_stage
        is_async = num_stages == 1 and engine_config.scheduler.async_scheduling
        self._has_one_window = speculation is not None and (
            (is_async and not has_stage_drafts) or speculation.max_windows_in_flight == 1
        )
        """True if no window consists of guesses alone, and continues another one in flight."""
        self.needs_all_prompts = self.needs_all_prompts or has_stage_drafts
        plan = plan_draft(speculation, model_config) if self.has_sampler else None
        if plan is not None:
            self.block_bytes += block_bytes(plan.layer_specs, block_size, self.cache_dtype)
            requirements = self._list_requirements(plan.layer_specs, block_size)
            choice = _choose_backend(engine_config, requirements)
            self._draft = StageDraft(plan, choice.name, self.dtype)
        self._mirror = BlockTableReplica()
        self._tables = BlockTables()
        self._states: dict[int, SamplingState] = {}
        """Sampling state by sequence, on the ranks of the last stage."""
        self._keeps_last_tokens = num_stages == 1
        """True if plans may have placeholders for tokens that the previous step samples."""
        self._eos_ids = model_config.eos_ids
        self._progress: LayerProgress | None = None
        self._counts_each_layer = engine_config.scheduler.kv_push == "layer"

    def load(
        self,
        folder: Path,
        on_progress: Callable[[int, int], None],
        previous: "Sequence[Executor]" = (),
        running: "Executor | None" = None,
        limit_bytes: float = math.inf,
    ) -> None:
        """Load the stage's weights; layers that this process already holds are reused.

        Args:
            folder: folder of the model.
            on_progress: called with the bytes read and the bytes in total.
            previous: executors of this process that are closed or never computed. Their layers
                that this stage has are taken over, the others freed.
            running: executor of this process that computes meanwhile, and shares its layers.
            limit_bytes: memory for layers that have to be read; with 0 a draft is left out.

        Raises:
            ModelError: the folder does not have the weights.
            WeightMemoryError: the layers that have to be read take more than `limit_bytes`.
            FieldError: weights that a GPU's stage leaves on the host do not fit there.
        """
        sources = _find_loaded(previous)
        same = [source for source in sources if source._weights_key == self._key_in(folder)]
        if whole := next((executor for executor in same if executor.layers == self.layers), None):
            self._stage = whole._stage
            on_progress(self._stage.weight_bytes, self._stage.weight_bytes)
        if self.has_sampler:
            self._take_grammars(same)
        if self._draft is not None:
            self._draft.take(_drafts_of(same))
        beside = _find_loaded([running])
        same += [executor for executor in beside if executor._weights_key == self._key_in(folder)]
        held = find_reusable_parts(
            [executor._stage for executor in same], self.layers, self.model.num_layers
        )
        # Before anything is read, because the memory may not suffice for both.
        for source in sources:
            source.release_weights()
        if whole is None:
            self._read_missing(folder, on_progress, held, limit_bytes)
        self.weight_bytes = self._stage.weight_bytes
        self._folder = folder
        # An executor that computes keeps its grammars until a successor takes them.
        has_grammars = any(executor._grammars is not None for executor in [self, *beside])
        if self.has_sampler and not has_grammars:
            self._create_grammars(folder)
        if limit_bytes:
            self._load_draft(folder, beside)

    def _load_draft(self, folder: Path, running: "Sequence[Executor]") -> None:
        """Load the weights of the draft, unless they are held.

        Args:
            folder: folder of the model.
            running: executors that compute; they keep their draft until a successor takes it.
        """
        draft = self._draft
        if draft is None:
            return
        if draft.model is None and all(other.model is None for other in _drafts_of(running)):
            # The ends of a stage of several ranks are divided among them.
            served = self._stage if self._num_ranks == 1 else None
            draft.load(folder, self._quantization, self._max_model_len, served)
        if draft.model is not None:
            self.weight_bytes += draft.model.weight_bytes

    def _create_grammars(self, folder: Path) -> None:
        tokenizer = require_tokenizer(self._tokenizer, folder)
        self._grammars = GuideFactory(tokenizer, self.model.vocab_size, self._eos_ids)

    def _read_missing(
        self,
        folder: Path,
        on_progress: Callable[[int, int], None],
        held: ReusableParts,
        limit_bytes: float,
    ) -> None:
        """Read the parts of the stage that are not held; see `load`."""
        if (cache := self._open_weight_cache(folder, held)) is not None:
            held.find_in(cache, self.model, self.layers)
        with Checkpoint(
            folder,
            self.dtype,
            self.model,
            self.layers,
            self.device,
            held_layers=held.layers,
            holds_ends=held.ends is not None,
        ) as checkpoint:
            if (needed := estimate_bytes(held, self.layers, checkpoint)) > limit_bytes:
                raise WeightMemoryError(
                    f"{needed / 2**20:.0f} MiB of weights are missing, and "
                    f"{limit_bytes / 2**20:.0f} MiB of memory are free for them"
                )
            self._check_host_memory(checkpoint)
            checkpoint.report_to(on_progress)
            weights = Weights(checkpoint, quantization=self._quantization, ranks=held.ranks)
            # Tensors created beside the weights (rotary frequencies) belong on the device too.
            with self.device:
                model, max_len = checkpoint.model, self._max_model_len
                self._stage = ModelStage(model, weights, self.layers, max_len, held, cache)
            checkpoint.check_all_read()
        if cache is not None:
            cache.log_use(len(self.layers) + has_ends(self.model, self.layers))
        if self.device.type == "cpu":
            # What was packed before it was mapped, and what packing has used meanwhile.
            trim_memory()
            self.has_packed_weights = True

    def _check_host_memory(self, checkpoint: Checkpoint) -> None:
        """Check that the weights of a GPU's stage that stay on the host fit there.

        Raises:
            FieldError: they certainly do not.
        """
        return

    def _open_weight_cache(self, folder: Path, held: ReusableParts) -> WeightCache | None:
        """Return the cache of packed weights that is configured; None without one."""
        if self._weight_cache is None or self.device.type != "cpu":
            return None
        held.ranks = held.ranks or Ranks(self._rank, self._num_ranks)
        settings = {
            "dtype": str(self.dtype),
            "quantization": self._quantization,
            "rank": [self._rank, self._num_ranks],
            # Rates of recurrent layers and some scales are computed by torch.
            "kernels": [describe_kernels(self.dtype), torch.backends.cpu.get_cpu_capability()],
            "overrides": self._overrides,
        }
        describe = partial(describe_stage_part, self.model, self.layers)
        place = parse_sized_folder(self._weight_cache)
        return WeightCache(place, folder, settings, describe, held.ranks)

    @property
    def stage(self) -> ModelStage:
        """Modules of the stage, once the weights are loaded."""
        return self._stage

    @property
    def _weights_key(self) -> tuple[Hashable, ...]:
        """Everything that the weights in memory depend on, but for the layers."""
        return self._key_in(self._folder)

    def _key_in(self, folder: Path | None) -> tuple[Hashable, ...]:
        """Return the key of weights that are loaded from a folder."""
        return (
            type(self).__name__,
            self.device,
            self._rank,
            self._num_ranks,
            self.dtype,
            self._quantization,
            self._max_model_len,
            folder,
        )

    def _take_grammars(self, sources: Sequence["Executor"]) -> None:
        """Take the compiled grammars of a closed executor."""
        for source in sources:
            if source._grammars is not None:
                self._grammars, source._grammars = source._grammars, None
                return

    def release_weights(self) -> None:
        """Free the weights and end the threads of grammars."""
        if self._draft is not None:
            self._draft.model = None
        if self._folder is not None:
            del self._stage
            self._folder = None
        if self._grammars is not None:
            self._grammars.close()
            self._grammars = None

    @property
    def numerics(self) -> str:
        """Text with everything that affects rounding: device, dtypes, kernels."""
        # Ranks add up parts of what one rank adds up at once.
        ranks = f"; {self._num_ranks} ranks" if self._num_ranks > 1 else ""
        if self.device.type != "cpu":
            return f"{self.kv_numerics}{ranks}"
        return f"{self._describe_numerics(describe_kernels(self.dtype), self.backend)}{ranks}"

    @property
    def kv_numerics(self) -> str:
        """Part of `numerics` that determines the values in the KV cache, apart from their rounding.

        Ranks and kernels chosen by measurement are left out: they only change the order of sums.
        """
        if self.device.type == "cpu":
            # Which kernels are faster than those of torch is measured: two engines may choose
            # others, which add up the same sums in another order.
            return self._describe_numerics(describe_build(self.dtype), self._supported_backend)
        kernels = f"compute capability {self._gpu_capability}, torch {torch.__version__}"
        return self._describe_numerics(kernels, self.backend)

    @property
    def draft_description(self) -> str:
        """Text with the layers whose keys and values a draft has; empty without a draft."""
        return "" if self._draft is None else self._draft.description

    def _describe_numerics(self, kernels: str, backend: str) -> str:
        dtypes = f"{self.dtype}, KV cache {self.cache_dtype}, quantization {self._quantization}"
        overrides = f"; {self._overrides}" if self._overrides else ""
        return f"{self.device.type}: {kernels}; {dtypes}; attention {backend}{overrides}"

    def _choose_attention_backend(
        self, config: EngineConfig, gpu_capability: tuple[int, int] | None
    ) -> BackendChoice:
        """Choose the attention backend.

        gpu_capability: compute capability of the GPU; None on a CPU.
        """
        requirements = self._list_requirements(self._layer_specs, config.scheduler.block_size)
        choice = _choose_backend(config, requirements)
        self._supported_backend = find_supported_backend(config.attention_backend, requirements)
        return choice

    def _list_requirements(
        self, layers: Sequence[LayerSpec], block_size: int
    ) -> AttentionRequirements:
        """Return what the attention of some layers requires of a backend."""
        return AttentionRequirements(
            "cpu" if self._gpu_capability is None else "cuda",
            self._gpu_capability or (0, 0),
            self.dtype,
            self.cache_dtype,
            block_size,
            frozenset(
                head_shape(layer.attention)
                for layer in layers
                if layer.attention.kv_entry.num_elements
            ),
        )

    def log_choices(self) -> None:
        """Log the attention backend, the dtypes and the kernels of the stage."""
        log.log(
            # The slowest backend on every device.
            logging.WARNING if self.backend == "torch" else logging.INFO,
            "attention by %s (%s); KV cache in %s, %d bytes a block",
            self.backend,
            self._attention.reason,
            self.cache_dtype,
            self.block_bytes,
        )

    @property
    def held_seqs(self) -> set[int]:
        """Sequences that are registered or scheduled, and not released yet."""
        return self._mirror.sequences.keys() | self._tables.seqs | self._states.keys()

    @property
    def activation_width(self) -> int:
        """Elements of a token's activations between stages."""
        return self.model.hidden_size

    @property
    def layer_caches(self) -> Sequence[LayerCache]:
        """KV cache of each layer, once it is allocated."""
        return self._cache.layers

    def join(self, groups: StageGroups) -> None:
        """Join the other ranks of the stage, until `close`.

        Called with the weights loaded, before `allocate`; not at all where a stage has one rank.
        """
        self._groups = groups
        self._stage.ranks.join(*groups)

    def close(self) -> None:
        """Free everything but the weights; only `load` of a successor may follow.

        The threads that computed and sampled have ended.
        """
        self._states = {}
        self._groups = None
        self._mirror, self._tables = BlockTableReplica(), BlockTables()
        if self._folder is not None:
            self._stage.release_workspace()
            self._stage.ranks.leave()
        if self._draft is not None:
            self._draft.close()
        self._progress = None
        if hasattr(self, "_cache"):
            del self._cache
        self.kv_file = None

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_memory: int | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """Allocate the KV cache and the states of recurrent layers.

        Args:
            num_blocks: usable blocks.
            block_size: tokens per block.
            kv_memory: descriptor of an empty file for it; None for own memory.
            num_state_slots: state slots; 0 for a model without recurrent layers.

        Raises:
            FieldError: the file cannot have that size, or the device has memory of its own.
            OSError: `kv_file` cannot have that size.
        """
        zeros = None if kv_memory is None else map_zeros(kv_memory)
        if self.kv_file is not None:
            zeros = self.kv_file.create
        sizes = num_blocks, block_size, self.cache_dtype
        self._cache = KVCache(self._cached_layers, *sizes, zeros, num_state_slots)
        self._batch_config = BatchConfig(
            num_blocks,
            block_size,
            self.dtype,
            self._windows,
            partial(plan_windows, backend=self.backend),
            has_states=self.state_bytes > 0,
        )
        if self._draft is not None:
            zeros = None if self.kv_file is None else self.kv_file.create_unchecked
            sizes = num_blocks, block_size, self.cache_dtype
            self._draft.allocate(*sizes, zeros, self.model.vocab_size)
        if self.kv_file is not None:
            self.kv_file.complete()

    def store_checksums(self, batch: Batch) -> None:
        """Store the checksums of the KV blocks that a computed step has filled, in `kv_file`."""
        if self.kv_file is not None:
            # All windows have the same slots.
            plan = next(iter(batch.inputs.attention.values()))
            self.kv_file.store_checksums(plan.slots)

    def describe_kv_cache(self, model: str) -> KvLayout:
        """Return the layout of the KV cache, which is allocated in a file.

        model: digest of the model, as in `KvLayout.model`.
        """
        layers = self._whole_model.layers
        return describe_layout(model, self.layers, layers, self._rank, self._num_ranks, self._cache)

    def share_layer_progress(self, kv_memory: int, layout: KvLayout) -> None:
        """Publish in shared memory how many layers of each step are computed (`LayerProgress`).

        The KV mover reads it to send the KV blocks of a prompt layer by layer.

        Args:
            kv_memory: descriptor of the file of the KV cache, as in `allocate`.
            layout: memory layout of the KV cache.

        Raises:
            OSError: the file cannot be larger by a page.
        """
        self._progress = LayerProgress(kv_memory, layout, is_writable=True)

    def copy_kv_blocks(self, command: CopyKvBlocks) -> None:
        """Copy KV blocks of a device to staging blocks or back; called on a thread of its own.

        Raises:
            NotImplementedError: the KV cache is in the memory of the host.
        """
        raise NotImplementedError

    @property
    def _cached_layers(self) -> Sequence[LayerSpec]:
        """Layers of the stage, with the shapes of their entries in the KV cache."""
        return self._layer_specs

    @property
    def _windows(self) -> frozenset[AttentionWindow]:
        """Windows of the stage's layers."""
        return frozenset(layer.attention.window for layer in self._layer_specs)

    def register(self, message: RegisterSequences) -> "Future[bytes] | None":
        """Register sequences that later plans name.

        Returns:
            A future that completes when the grammar is compiled; None without a grammar. It fails
            for a request that cannot be sampled: its rows are then sampled with default parameters,
            so that they disturb no others, and the driver has to end it.
        """
        for seq in range(message.seq, message.seq + message.n):
            self._mirror.register(seq, message.prompt_len, message.prompt)
        try:
            states = create_sampling_states(message, self._grammars)
        except Exception as error:
            log.exception("request %d could not be registered", message.seq)
            states = create_default_states(message)
            self._states.update(enumerate(states, start=message.seq))
            failed: Future[bytes] = Future()
            failed.set_exception(error)
            return failed
        self._states.update(enumerate(states, start=message.seq))
        guides = [state.guide for state in states if state.guide is not None]
        return guides[-1].first_mask if guides else None

    def prepare(self, plan: StepPlan) -> Batch:
        """Build the micro-batch of a plan and free the sequences that the plan releases.

        The sequences are freed even if this raises; `fail_plan` has to be called then.

        Raises:
            KeyError: a sequence is not registered.
        """
        try:
            return self._build_batch(plan)
        finally:
            self._release(plan.released_seqs)

    def _build_batch(self, plan: StepPlan) -> Batch:
        """Build the micro-batch of a plan."""
        sequences = self._mirror.apply(plan)
        inputs, placeholders = build_inputs(
            plan, sequences, self._tables, self._batch_config, self.reads_token_ids
        )
        logits_indices, sampling, chunks = self._build_sampling(plan, sequences)
        has_drafter = self._draft is not None and self._draft.drafter is not None
        draft_rows = self._build_draft_rows(plan, sequences) if has_drafter else None
        return Batch(
            plan.step,
            inputs,
            sum(row.num_tokens for row in plan.rows),
            logits_indices,
            sampling,
            chunks,
            placeholders,
            plan.lane,
            draft_rows=draft_rows,
        )

    def _build_draft_rows(self, plan: StepPlan, sequences: list[SequenceView]) -> DraftRows:
        """Return the rows of a plan as the draft computes them."""
        block_size, num_drafts = self._batch_config.block_size, plan.num_next_drafts
        return DraftRows(
            num_drafts,
            plan.rows,
            [self._states[row.seq] for row in plan.rows],
            [sequence.prompt_len for sequence in sequences],
            gather_token_ids(plan.rows, sequences),
            self._tables.gather(plan.rows, sequences, block_size, num_drafts + 1),
            [
                min(len(sequence.block_ids) * block_size, self._max_model_len)
                for sequence in sequences
            ],
        )

    def _release(self, seqs: list[int]) -> None:
        """Free the state of sequences that have ended.

        The driver releases a sequence when all its steps have committed: no thread samples it.
        """
        self._mirror.release(seqs)
        self._tables.release(seqs)
        if self._draft is not None and self._draft.drafter is not None:
            self._draft.drafter.release(seqs)
        for seq in seqs:
            self._states.pop(seq, None)

    def _build_sampling(
        self, plan: StepPlan, sequences: list[SequenceView]
    ) -> tuple[Tensor, SamplingMetadata, list[PromptChunk]]:
        """Collect the rows that are sampled and the prompt tokens that are scored.

        Returns:
            Token rows [samples] int64, the sampling rows and the prompt chunks; all are empty
            except on the last stage, where only rank 0 has sampling rows.
        """
        owners: list[tuple[int, int]] = []
        states: list[SamplingState] = []
        output_indices: list[int] = []
        token_rows: list[int] = []
        windows: list[SampledWindow] = []
        chunks: list[PromptChunk] = []
        # Rows without guesses that no window in flight continues are as without speculation.
        has_windows = self._speculates and (
            not self._has_one_window or any(row.num_draft_tokens for row in plan.rows)
        )
        end = 0
        for row, sequence in zip(plan.rows, sequences, strict=True):
            begin, end = end, end + row.num_tokens
            if not self.is_last:
                continue
            state = self._states[row.seq]
            if state.params.prompt_logprobs is not None:
                chunks += create_prompt_chunks(state, row, begin)
            if row.should_sample:
                num_samples = row.num_samples if has_windows else 1
                token_rows += range(end - num_samples, end)
                if not self.has_sampler:
                    continue
                if has_windows:
                    windows.append(create_window(row, len(owners)))
                owners += [(row.seq, row.num_preemptions)] * num_samples
                states += [state] * num_samples
                last_index = row.start + row.num_tokens - sequence.prompt_len
                output_indices += range(last_index - num_samples + 1, last_index + 1)
        sampling = build_sampling_metadata(owners, states, output_indices)
        if windows:
            sampling = replace(sampling, windows=windows)
        return torch.tensor(token_rows, dtype=torch.int64), sampling, chunks

    @abstractmethod
    def compute(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Compute a micro-batch.

        Args:
            batch: the next one in the order of steps.
            hidden: activations [tokens, hidden] of the previous stage; None on the first stage.

        Returns:
            Activations [tokens, hidden] for the next stage; on the last stage a tensor for
            `sample`, of which ranks other than 0 have no row.

        Raises:
            GroupClosedError: another rank of the stage has ended or cancelled the groups.
            EdgeClosedError: `cancel` was called.
        """

    def cancel(self) -> None:
        """End a `compute` that waits, and all later ones; called on any thread to close the stage.

        An executor that computes does nothing: its step ends soon.
        """
        return

    def span(self, batch: Batch, begin: float, end: float) -> tuple[float, float]:
        """Return the begin and end of a step of a synchronous executor, as time.monotonic().

        Args:
            batch: that was computed.
            begin: when the host called `compute`.
            end: when `compute` had returned.
        """
        return begin, end

    def wait(self, batch: Batch) -> DeviceTime:
        """Wait until the device has computed the micro-batch; for asynchronous executors only."""
        raise NotImplementedError("computing is over when `compute` returns")

    @abstractmethod
    def sample(
        self, batch: Batch, output: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        """Return the result of each sampling row, and details of the rows that request any.

        Has to be called for every batch of the executor that has the sampler.

        output: the tensor that `compute` returned; overwritten.
        """

    def fail_batch(self, batch: Batch, error: str) -> None:
        """Fail the grammars of a failed step, so that no later step waits for its tokens."""
        fail_guides(batch.sampling.states, error)

    def fail_plan(self, plan: StepPlan, error: str) -> None:
        """Fail the grammars of a plan that could not be prepared."""
        states = [self._states.get(row.seq) for row in plan.rows]
        fail_guides([state for state in states if state is not None], error)

    def fail_sequences(self, error: str) -> None:
        """Fail the grammars of all sequences, so that no thread waits for a mask."""
        for state in self._states.values():
            if state.guide is not None:
                # First, because a thread that waits for a mask may hold the guide's lock.
                state.guide.cancel()
        fail_guides(self._states.values(), error)

    def bind_thread(self) -> None:
        """Select the executor's device on the calling thread, before it uses the executor."""
        return


def _choose_backend(config: EngineConfig, requirements: AttentionRequirements) -> BackendChoice:
    """Choose the attention backend. Raises FieldError if the configured one is not possible."""
    try:
        return choose_backend(config.attention_backend, requirements)
    except ValueError as error:
        raise FieldError("attention_backend", str(error)) from error


def _drafts_of(executors: Sequence[Executor]) -> list[StageDraft]:
    """Return the drafts of the executors that have one."""
    return [executor._draft for executor in executors if executor._draft is not None]


def _find_loaded(executors: Sequence[Executor | None]) -> list[Executor]:
    """Return the executors that have weights."""
    return [executor for executor in executors if executor is not None and executor._folder]


class DeviceBackend:
    """Allocates memory and prepares a stage's executor for serving; this class is for the CPU.

    A worker calls `reserve`, opens its connections to other workers, and then calls
    `available_bytes`, `executor.allocate` and `prepare_steps`. `gllm.runtime.worker.cuda.backend`
    has the GPU's subclass.
    """

    transport = collectives = "shared-memory"
    """Default transport of edges (a name of gllm.transport.registry), and implementation of the
    groups of ranks (a name of gllm.transport.groups)."""
    streams: "tuple[DeviceRuntime, DeviceStream] | None" = None
    """The device and the compute stream, for transports; None on a CPU."""

    def __init__(self, assignment: "StageAssignment", executor: Executor) -> None:
        """Create the backend of a stage around its executor."""
        self._assignment = assignment
        self.executor = executor

    @property
    def host_seconds(self) -> float:
        """Seconds that the host took to build steps and to queue their work; 0 on a CPU."""
        return 0.0

    @property
    def num_compilations(self) -> int:
        """Kernels compiled since `prepare_steps`; 0 on a CPU."""
        return 0

    @property
    def late_seconds(self) -> float:
        """On an emulated device: seconds after the ends of steps until these were noticed."""
        return 0.0

    def reserve(self) -> SchedulerConfig:
        """Allocate the memory for steps; a CPU needs none in advance.

        Returns:
            The scheduler's configuration, resolved except for the number of KV blocks.
        """
        return self._assignment.resolve_scheduler()

    def available_bytes(self) -> int | None:
        """Return the bytes for KV blocks in the device's own memory; None for the host's memory.

        Has to be called with the weights loaded and the edges open, because both take memory.
        """
        return None

    def prepare_steps(self) -> None:
        """Compile kernels and record graphs, with the KV cache allocated; a CPU has none."""
