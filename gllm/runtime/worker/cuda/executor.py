"""Executor of a stage on a device that runs asynchronously to the host.

`compute` only queues a step's work on streams (input copies, layers or a graph, sampling, output
copies) and `sample` waits for the tokens, so the device has its next step before it has finished
the current one.

The last stage stores the token of each slot of the KV cache in a table on the device. Sampling that
looks back at the output reads it from there, including the last token, which the host may not know.
"""

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gllm.config.engine import (
    BIDIRECTIONAL_ON_GPU,
    INDEXER_ON_GPU,
    STAGE_DRAFTS_ON_GPU,
    EngineConfig,
)
from gllm.kernels.attention_backends import BACKENDS
from gllm.kernels.attention_plan import PagedBatch
from gllm.kernels.masking import num_bitmask_words
from gllm.kernels.native.library import describe_build
from gllm.kernels.state_plan import NO_SLOT, StatePlan
from gllm.kernels.triton.tiles import list_token_boundaries
from gllm.messages.kv_layout import KvLayout
from gllm.messages.kv_transfer import COPY_LANE, CopyKvBlocks
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.models.config import ModelConfig
from gllm.models.expert_placement import count_cache_slots, host_experts, host_share
from gllm.models.host_experts import HostExperts
from gllm.models.loader import Checkpoint
from gllm.models.stage import StageInputs
from gllm.options.field_types import FieldError
from gllm.runtime.worker.batch import (
    Batch,
    BatchConfig,
    PlanAttention,
    gather_token_ids,
    plan_windows,
)
from gllm.runtime.worker.cuda.graphs import (
    DecodeGraphs,
    find_graph_size,
    get_block_table,
    graph_sizes,
    pad_decodes,
    plan_table_attention,
)
from gllm.runtime.worker.cuda.host_expert_runner import HostExpertRunner
from gllm.runtime.worker.cuda.kv_staging import KvStager
from gllm.runtime.worker.cuda.readback import LastTokenTable, OutputReadback, PendingTokens
from gllm.runtime.worker.cuda.sampler import (
    LARGEST_PARAMS,
    DeviceSampler,
    SamplerInputs,
    to_sample_output,
)
from gllm.runtime.worker.cuda.staging import InputStaging, copy_to_device
from gllm.runtime.worker.device import available_memory_bytes
from gllm.runtime.worker.executor import DeviceTime, Executor
from gllm.runtime.worker.kv_cache import KVCache, describe_layout, map_zeros
from gllm.runtime.worker.sampling import (
    advance_guides,
    build_embedding_details,
    collect_grammar_masks,
    to_sampled_tokens,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan
from gllm.transport.device_group import DeviceRankGroup
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime
from gllm.transport.groups import StageGroups

START_UP_STEPS = 2**61
"""Smallest number under which ranks agree on work of the start-up; those of steps are smaller."""
INTS_PER_TOKEN = 8
"""Expected number of int64 inputs per token; staging grows for steps with more."""
PLAIN_PARAMS = SequenceSamplingParams(temperature=1.0)
"""Sampling parameters without filters and edits."""


class StepInputs(NamedTuple):
    """Host tensors of one step that are copied to the GPU: model inputs and sampler inputs."""

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
    """GPU-side state of a batch: inputs, timing events, and the outputs being copied back."""

    inputs: StepInputs
    """On the host."""
    uses_graph: bool = False
    """True if a graph computes the layers."""
    spans: list[tuple[DeviceEvent, DeviceEvent]] = field(default_factory=list)
    """Timed events around each part of the step that the device computes, in order."""
    tokens: PendingTokens | None = None
    """With the sampler, once computed."""


class CudaExecutor(Executor):
    """Runs the layers and the sampler of one stage on a GPU, asynchronously to the host."""

    is_asynchronous = True
    needs_all_prompts = True
    verifies_grammars = False
    keeps_weights = False
    _prepare_seconds = _compute_seconds = 0.0
    """Host time, each on a thread of its own."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        num_stages: int,
        layers: range,
        runtime: DeviceRuntime,
        plan_attention: PlanAttention | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Choose dtypes and the attention backend.

        Args:
            model_config: configuration of the checkpoint.
            engine_config: configuration of the engine.
            num_stages: stages of the pipeline.
            layers: layers of this stage.
            runtime: device and its streams.
            plan_attention: builds attention plans on the host. The layout of decodes has to depend
                only on their padded number and on the width of block tables. Default: the plans
                of the attention backend; plans of gathers have no fixed layout, so decodes run
                without graphs.
            rank: index of this worker among those of the stage.
            num_ranks: workers of the stage.

        Raises:
            FieldError: a GPU cannot compute the model or its drafts, the cache of experts is too
                small, or as Executor does.
        """
        speculation = engine_config.scheduler.speculative_config
        if speculation is not None and speculation.is_drafted_by_stage:
            raise FieldError("speculative_config", STAGE_DRAFTS_ON_GPU.format(speculation.method))
        super().__init__(
            model_config,
            engine_config,
            num_stages,
            layers,
            runtime.device,
            rank=rank,
            num_ranks=num_ranks,
            gpu_capability=runtime.capability,
        )
        if self.model.is_bidirectional:
            raise FieldError("device", BIDIRECTIONAL_ON_GPU)
        if (limit := self.model.num_selected) is not None:
            raise FieldError("max_model_len", INDEXER_ON_GPU.format(limit))
        self.stream = runtime.stream()
        """The compute stream; transports synchronize with it."""
        self._runtime = runtime
        reads_tables = BACKENDS[self.backend].reads == "tables"
        own = partial(plan_table_attention, requested_tiles=set()) if reads_tables else plan_windows
        self.plan_attention = plan_attention or partial(own, backend=self.backend)
        """Builds the attention plans of steps, on the host."""
        self._host_experts = list(host_experts(self._layer_specs))
        """Experts of the stage that the host computes."""
        self._expert_runner: HostExpertRunner | None = None
        """Computes them, once the memory for steps is allocated."""
        self._expert_cache = engine_config.expert_cache or 0
        self._memory_share = engine_config.gpu_memory_utilization
        self._num_expert_slots = 0
        """Experts of each layer in the cache of the device."""
        if self._expert_cache and self._host_experts:
            self._num_expert_slots = count_cache_slots(
                self._host_experts, self.model.hidden_size, self.dtype.itemsize, self._expert_cache
            )
        self.supports_graphs = (plan_attention is not None or reads_tables) and not (
            self.state_bytes or self._host_experts
        )
        """True if decodes can run as graphs, which have no slots of states and no host that
        computes experts."""
        self._graph_sizes: list[int] = []
        """Recorded numbers of rows."""
        self._group: DeviceRankGroup | None = None
        """Group of the stage's ranks; None for a stage of one rank."""
        self._staging_tokens = engine_config.kv_staging_tokens
        self._stager: KvStager | None = None
        """Copies KV blocks to and from the memory of the host; None without --kv-transfer."""
        self._staged: KVCache | None = None
        """Staging blocks of `_stager`."""

    def join(self, groups: StageGroups) -> None:
        """Join the other ranks of the stage, until `close`.

        Both groups of a device are one, because one thread queues all work.
        """
        super().join(groups)
        assert isinstance(groups.layers, DeviceRankGroup), "groups are opened with the device"
        self._group = groups.layers
        self.supports_graphs = self.supports_graphs and groups.layers.can_capture

    def close(self) -> None:
        """Free everything but the weights; only `load` of a successor may follow."""
        super().close()
        self._group = None
        self._expert_runner = None
        if self._folder is not None:
            for experts in self._loaded_host_experts():
                experts.runner = None
        if self._stager is not None:
            self._stager.close()
        self._stager = self._staged = None
        # Graphs refer to the communicator, which is closed next.
        if hasattr(self, "_graphs"):
            self._graphs = DecodeGraphs(self._runtime, self.stream, get_block_table)
        self._graph_sizes = []

    def reserve(self, scheduler: SchedulerConfig) -> None:
        """Allocate the memory for steps of a resolved configuration."""
        max_tokens, max_in_flight = scheduler.max_num_batched_tokens, scheduler.max_in_flight
        assert max_tokens is not None
        assert max_in_flight is not None
        max_steps = max_in_flight * scheduler.num_lanes
        speculation = scheduler.speculative_config
        row_samples = 1 if speculation is None else 1 + speculation.num_speculative_tokens
        max_rows = min(max_tokens, row_samples * scheduler.max_num_seqs)
        runtime = self._runtime
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._max_blocks = -(-self._max_model_len // scheduler.block_size)
        # Block tables are copied for attention and for edits that look back; and a mask per row.
        words_per_row = 2 * self._max_blocks + num_bitmask_words(self.model.vocab_size)
        num_bytes = INTS_PER_TOKEN * 8 * max_tokens + 4 * max_rows * words_per_row
        self._staging = InputStaging(runtime, num_bytes)
        if self.has_sampler:
            # A sampling row scores its own token, a prompt token the next one.
            max_scores, hidden_size = max_rows + max_tokens, self.model.hidden_size
            self._readback = OutputReadback(runtime, max_rows, max_scores, hidden_size, max_steps)
        self._last_tokens = LastTokenTable(runtime, (max_steps + 1) * scheduler.max_num_seqs)
        self._graphs = DecodeGraphs(runtime, self.stream, get_block_table)
        if self._host_experts:
            self._expert_runner = self._create_expert_runner(max_tokens)
            for experts in self._loaded_host_experts():
                experts.runner = self._expert_runner

    def _create_expert_runner(self, max_tokens: int) -> HostExpertRunner:
        """Return the runner of the experts that are on the host, with its cache.

        Raises:
            FieldError: the cache does not fit, or the weights have no exact floats.
        """
        loaded = self._loaded_host_experts()
        if self._num_expert_slots:
            if not all(experts.has_exact_weights for experts in loaded):
                raise FieldError(
                    "expert_cache",
                    "expert_cache has copies of weights in floats or few bits, but the experts of "
                    "this checkpoint are int8 for CPUs: leave expert_cache out",
                )
            free_bytes = self._runtime.measure_free_bytes(lambda: None, self._memory_share)
            if self._expert_cache > free_bytes:
                raise FieldError(
                    "expert_cache",
                    f"expert_cache is {self._expert_cache} bytes, but the weights leave "
                    f"{free_bytes} of the GPU's memory for it and the KV cache: lower it, or raise "
                    "gpu_memory_utilization",
                )
        return HostExpertRunner(
            self._runtime,
            self.stream,
            loaded,
            max(spec.top_k for spec in self._host_experts),
            self.model.hidden_size,
            self.dtype,
            max_tokens,
            self._num_expert_slots,
        )

    def _check_host_memory(self, checkpoint: Checkpoint) -> None:
        share = host_share(self.model, self._layer_specs)
        # The files may have 32 bits per weight.
        packed = 0.125 if self._quantization == "int4" else 0.5
        needed, available = int(checkpoint.total_bytes * share * packed), available_memory_bytes()
        if needed > available:
            raise FieldError(
                "cpu_experts",
                f"cpu_experts: the experts on the host take {needed / 1e9:.1f} GB of memory at "
                f"least, but {available / 1e9:.1f} GB are free: free memory, lower it, or set "
                "quantization",
            )

    def _describe_numerics(self, kernels: str, backend: str) -> str:
        text = super()._describe_numerics(kernels, backend)
        if not self._host_experts:
            return text
        return f"{text}; experts of {len(self._host_experts)} layers: {describe_build(self.dtype)}"

    def _loaded_host_experts(self) -> list[HostExperts]:
        """Return the experts of each layer that has them on the host, in order."""
        layers = [layer.host_experts for layer in self._stage.layers.layers]
        return [experts for experts in layers if experts is not None]

    def measure_expert_costs(self) -> None:
        """Measure the times of experts, once kernels are compiled; only for a cache of experts."""
        if self._expert_runner is not None:
            self._expert_runner.measure_costs()

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        kv_memory: int | None = None,
        num_state_slots: int = 0,
    ) -> None:
        """Allocate the KV cache, the states of recurrent layers and the staging blocks of KV."""
        # Two blocks that no sequence holds: one stays zero, padding is written to the other.
        sizes = num_blocks + 1, block_size, self.cache_dtype
        zeros = self._runtime.zeros
        self._cache = KVCache(self._layer_specs, *sizes, zeros, num_state_slots)
        num_slots = (num_blocks + 2) * block_size if self.has_sampler else 0
        self._cached_tokens = zeros((num_slots,), torch.int64)
        """[slots]: the token of each slot of the KV cache."""
        self._sampler = DeviceSampler(self.model.vocab_size, block_size)
        self._batch_config = BatchConfig(
            num_blocks,
            block_size,
            self.dtype,
            self._windows,
            self.plan_attention,
            self._pad,
            self.state_bytes > 0,
        )
        if kv_memory is not None:
            self.num_staging_blocks = min(num_blocks, -(-self._staging_tokens // block_size))
            sizes = self.num_staging_blocks, block_size, self.cache_dtype
            self._staged = KVCache(self._layer_specs, *sizes, map_zeros(kv_memory))

    def describe_kv_cache(self, model: str) -> KvLayout:
        """Return the layout of the staging blocks, which are allocated in a file."""
        assert self._staged is not None, "the engine transfers KV blocks"
        layers, ranks = self._whole_model.layers, (self._rank, self._num_ranks)
        layout = describe_layout(model, self.layers, layers, *ranks, self._staged)
        return msgspec.structs.replace(layout, is_staged=True)

    def share_layer_progress(self, kv_memory: int, layout: KvLayout) -> None:
        """Publish in shared memory how many layers of each copy to staging blocks are done.

        Prepares `copy_kv_blocks`. The arguments are those of `Executor.share_layer_progress`.

        Raises:
            FieldError: the staging blocks cannot be pinned.
        """
        super().share_layer_progress(kv_memory, layout)
        progress, staged, first = self._progress, self._staged, self.layers.start
        assert progress is not None
        assert staged is not None, "the staging blocks are allocated before"

        def view(cache: KVCache) -> list[list[Tensor]]:
            layers = [(cache.layers[each.layer - first], each) for each in layout.layers]
            return [
                [tensor.view(torch.uint8) for tensor in parts[: 1 + bool(each.value_bytes)]]
                for parts, each in layers
            ]

        record = partial(progress.record, COPY_LANE)
        try:
            self._stager = KvStager(self._runtime, view(self._cache), view(staged), record)
        except RuntimeError as error:
            raise FieldError(
                "kv_staging_tokens", f"the staging blocks of kv_transfer: {error}: lower it"
            ) from error

    def copy_kv_blocks(self, command: CopyKvBlocks) -> None:
        """Copy KV blocks to staging blocks or back, and wait for that."""
        assert self._stager is not None, "the engine transfers KV blocks"
        self._stager.copy(command)

    def available_bytes(self, utilization: float, block_size: int, graph_rows: int) -> int:
        """Return the bytes of memory for KV blocks, less those of the largest step and CUDA graphs.

        Has to be called after `reserve` and before `allocate`.

        Args:
            utilization: share of the device's memory to use.
            block_size: tokens per block.
            graph_rows: rows of the largest graph.
        """
        self.allocate(1, block_size, num_state_slots=1)
        num_bytes = self._runtime.measure_free_bytes(self._run_largest_step, utilization)
        return max(num_bytes - self._measure_graph_bytes(graph_rows), 0)

    def _measure_graph_bytes(self, max_rows: int) -> int:
        """Return the bytes that graphs will take, from a trial with the two largest.

        All graphs share the memory of the largest; each further one takes at most as much as the
        second largest.
        """
        sizes = graph_sizes(max_rows) if max_rows and self.supports_graphs else []
        measured = [
            self._runtime.measure_used_bytes(partial(self._record_graph, size, sizes[-1]))
            for size in sizes[:-3:-1]
        ]
        self._graphs = DecodeGraphs(self._runtime, self.stream, get_block_table)
        return measured[0] + (len(sizes) - 1) * measured[-1] if measured else 0

    @torch.inference_mode()
    def record_graphs(self, max_rows: int, on_progress: Callable[[int, int], None]) -> None:
        """Record decodes of up to `max_rows` rows; do nothing if plans have no fixed layout.

        Has to be called after `reserve` and `allocate`, before the first step.

        on_progress: called with the number of recorded graphs and of all graphs.
        """
        if not self.supports_graphs:
            return
        sizes = graph_sizes(max_rows)
        for num_done, size in enumerate(reversed(sizes)):
            on_progress(num_done, len(sizes))
            self._record_graph(size, sizes[-1])
        on_progress(len(sizes), len(sizes))
        self._graph_sizes = sizes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run example steps, so that the first requests do not wait for compilations.

        Has to be called after `reserve` and `allocate`, before the first step.
        """
        config = self._batch_config
        limits = self._max_model_len, config.block_size, config.num_blocks
        for rows in example_rows(list_token_boundaries(), *limits):
            num_samples = min(int(rows.query_start[-1]), self._max_rows)
            for params in (PLAIN_PARAMS, LARGEST_PARAMS):
                self._run_example(rows, num_samples, params)
        self._runtime.synchronize()

    @torch.inference_mode()
    def _record_graph(self, size: int, largest: int) -> None:
        """Record decodes of `size` rows; the largest size has to be recorded first."""
        if size == largest:
            shape = (0 if self.is_first else size, self.model.hidden_size)
            self._graph_hidden = self._runtime.zeros(shape, self.dtype)
        self._agree(f"graph of {size} rows")
        hidden = None if self.is_first else self._graph_hidden[:size]
        self._graphs.record(size, self._create_graph_inputs(size), hidden, self._run_all_rows)

    @torch.inference_mode()
    def _run_largest_step(self) -> None:
        """Run a prefill with the most tokens and samples; all its tokens are in one block."""
        max_tokens, length = self._max_tokens, self._max_model_len
        counts = [min(length, max_tokens - begin) for begin in range(0, max_tokens, length)]
        lengths, num_blocks = np.array(counts, dtype=np.int64), self._batch_config.num_blocks
        starts = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
        table = np.zeros((len(counts), self._max_blocks), dtype=np.int64)
        rows = PagedBatch(table, starts, lengths, 0, self._batch_config.block_size, num_blocks)
        self._run_example(rows, self._max_rows, LARGEST_PARAMS)

    def _run_example(
        self, rows: PagedBatch, num_samples: int, params: SequenceSamplingParams
    ) -> None:
        """Compute a micro-batch whose tokens are all 0, and sample from its first rows."""
        num_tokens = int(rows.query_start[-1])
        self._agree(f"example of {num_tokens} tokens, {num_samples} samples")
        ids = torch.zeros(num_tokens, dtype=torch.int64)
        host_inputs = StageInputs(
            ids[: num_tokens if self.reads_token_ids else 0],
            ids,
            self.plan_attention(rows, self.dtype, self._batch_config.windows),
            create_example_states(rows) if self.state_bytes else None,
        )
        host_sampler = None
        if self.has_sampler:
            host_sampler = self._sampler.create_example(num_samples, params)
        (inputs, sampler), _ = self._staging.put((host_inputs, host_sampler), self.stream)
        with self.stream.current():
            shape = num_tokens, self.model.hidden_size
            hidden = torch.zeros(shape, dtype=self.dtype, device=self._runtime.device)
            hidden = self._stage.forward(
                inputs, None if self.is_first else hidden, self._cache.layers
            )
            if self.is_last:
                # As for embeddings.
                self._stage.apply_final_norm(hidden[:1])
                logits = self._stage.compute_logits(hidden[:num_samples])
                if sampler is not None:
                    self._sampler.sample(logits, sampler, self._cached_tokens)
        self._staging.release(self.stream)

    def _agree(self, work: str) -> None:
        """Wait until all ranks begin the same work of the start-up.

        Raises:
            GroupMismatchError: they do not, because their GPUs or tuned tiles differ.
            GroupClosedError: a rank has failed.
        """
        if self._group is not None:
            self._group.agree_on_step(START_UP_STEPS + zlib.crc32(work.encode()), "")

    def _pad(self, rows: PagedBatch) -> PagedBatch:
        """Pad decodes to a recorded size, if one holds them."""
        size = find_graph_size(len(rows.context_len), self._graph_sizes)
        if size is None or rows.num_decodes < len(rows.context_len):
            return rows
        return pad_decodes(rows, size)

    def _create_graph_inputs(self, size: int) -> StageInputs:
        """Create inputs of padding rows only.

        The rows that the host reads have the longest contexts, so that every decision by them is
        sufficient for all later steps.
        """
        block_size, num_blocks = self._batch_config.block_size, self._batch_config.num_blocks
        none = np.zeros(0, dtype=np.int64)
        empty = PagedBatch(none.reshape(0, 1), none, none, 0, block_size, num_blocks)
        rows = pad_decodes(empty, size, self._max_blocks)
        longest = replace(rows, context_len=np.full(size, self._max_model_len, dtype=np.int64))
        plans = self.plan_attention(rows, self.dtype, self._batch_config.windows)
        return StageInputs(
            torch.zeros(size if self.reads_token_ids else 0, dtype=torch.int64),
            torch.zeros(size, dtype=torch.int64),
            {window: replace(plan, rows=longest) for window, plan in plans.items()},
        )

    def _run_all_rows(self, inputs: StageInputs, hidden: Tensor | None) -> Tensor:
        """Return activations or, on the last stage, logits of every row; none on ranks > 0."""
        hidden = self._stage.forward(inputs, hidden, self._cache.layers)
        return self._stage.compute_logits(hidden) if self.is_last else hidden

    @property
    def host_seconds(self) -> float:
        """Seconds that the host took to build steps and to queue their work."""
        return self._prepare_seconds + self._compute_seconds

    def bind_thread(self) -> None:
        """Select the executor's device on the calling thread, before it uses the executor."""
        self._runtime.bind_thread()

    def _build_batch(self, plan: StepPlan) -> Batch:
        begin = time.perf_counter()
        batch = super()._build_batch(plan)
        ids = np.zeros(0, dtype=np.int64)
        if self.has_sampler and not self.reads_token_ids:
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
            batch: batch of the step.
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
        """Wait until the device has computed the micro-batch; for asynchronous executors only."""
        spans: list[tuple[DeviceEvent, DeviceEvent]] = batch.device_state.spans
        first, last = spans[0][0], spans[-1][1]
        last.synchronize()
        return DeviceTime(
            last.seconds_since(first), sum(end.seconds_since(begin) for begin, end in spans)
        )

    @contextmanager
    def _timed(self, batch: Batch) -> Iterator[None]:
        """Measure, by the device's clock, the work queued on `stream` in this context."""
        begin, end = self._runtime.event(timed=True), self._runtime.event(timed=True)
        self.stream.record(begin)
        yield
        self.stream.record(end)
        batch.device_state.spans.append((begin, end))

    def sample(
        self, batch: Batch, output: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        """Return the result of each sampling row, and details of the rows that request any.

        The tokens are sampled already, the host waits for their copy.
        """
        pending = batch.device_state.tokens
        assert pending is not None, "a step is sampled once it is computed"
        tokens, scores, embeddings = pending.read()
        samples = to_sample_output(batch, tokens, scores)
        advance_guides(batch.sampling, samples)
        embedded = build_embedding_details(batch.sampling, embeddings, samples.errors)
        return to_sampled_tokens(batch.sampling, samples), samples.details + embedded

    def _plan_sampling(self, plan: StepPlan, batch: Batch) -> SamplerInputs:
        """Build the sampler's inputs of a step; they are empty without the sampler."""
        sampling, places = batch.sampling, {row.seq: i for i, row in enumerate(plan.rows)}
        sampled = [places[seq] for seq, _ in sampling.sequences]
        num_tokens = [
            self._mirror.sequences[seq].prompt_len + index
            for (seq, _), index in zip(sampling.sequences, sampling.output_indices, strict=True)
        ]
        block_table = next(iter(batch.inputs.attention.values())).rows.block_table
        return self._sampler.plan(sampling, batch.prompt_chunks, num_tokens, block_table[sampled])

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
            ids = inputs.token_ids if self.reads_token_ids else ids
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
            copy_to_device(rows, self._runtime, self.stream),
            copy_to_device(masks, self._runtime, self.stream),
        )


def example_rows(
    token_counts: Iterable[int], max_model_len: int, block_size: int, num_blocks: int
) -> Iterator[PagedBatch]:
    """Yield one-row micro-batches that make the stage compile its kernels before it serves.

    Triton compiles a kernel at the first launch with new constants, which depend on the model and
    on three properties of a step: the number of tokens (tile sizes), whether contexts are split,
    and whether rows are sampled with filters and edits. Each number of tokens at which a kernel
    changes its tiles and the shortest and the longest context are therefore run once; the caller
    runs both kinds of sampling. All rows use the one KV block that padding is written to.

    Args:
        token_counts: numbers of tokens at which kernels change their tiles.
        max_model_len: most tokens of a context.
        block_size: tokens per KV block.
        num_blocks: usable KV blocks, as in PagedBatch.
    """
    counts = sorted({1, 2, *token_counts})
    for num_tokens in (count for count in counts if count <= max_model_len):
        # The shortest decode and chunk depend most on whether a context is split.
        contexts = {num_tokens, max_model_len} if num_tokens <= 2 else {num_tokens}
        for context in sorted(contexts):
            table = np.full((1, -(-context // block_size)), num_blocks + 1, dtype=np.int64)
            start = np.array([0, num_tokens], dtype=np.int64)
            length = np.array([context], dtype=np.int64)
            yield PagedBatch(table, start, length, int(num_tokens == 1), block_size, num_blocks)


def create_example_states(rows: PagedBatch) -> StatePlan:
    """Return the state plan of an example: every sequence begins, and all write to slot 0."""
    starts, ends = rows.query_start[:-1], rows.query_start[1:]
    none = np.full(len(starts), NO_SLOT)
    columns = np.stack((starts, ends - starts, none, np.zeros_like(starts)), axis=1)
    groups = np.arange(len(starts) + 1, dtype=np.int32)
    return StatePlan(torch.from_numpy(columns.astype(np.int32)), torch.from_numpy(groups))
