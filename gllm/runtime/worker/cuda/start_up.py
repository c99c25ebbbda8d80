"""Start-up of an executor on a device: memory for steps, KV cache, warm-up and graphs."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from gllm.config.engine import KV_TRANSFER_ON_GPU, EngineConfig
from gllm.kernels.attention_backends import BACKENDS
from gllm.kernels.attention_plan import PagedBatch
from gllm.kernels.masking import num_bitmask_words
from gllm.kernels.triton.tiles import list_token_boundaries
from gllm.messages.sampling import SequenceSamplingParams
from gllm.models.config import ModelConfig
from gllm.models.stage import StageInputs
from gllm.options.field_types import FieldError
from gllm.runtime.worker.batch import BatchConfig, PlanAttention, plan_windows
from gllm.runtime.worker.cuda.graphs import (
    DecodeGraphs,
    find_graph_size,
    get_block_table,
    graph_sizes,
    pad_decodes,
    plan_table_attention,
)
from gllm.runtime.worker.cuda.readback import LastTokenTable, OutputReadback
from gllm.runtime.worker.cuda.sampler import LARGEST_PARAMS, DeviceSampler
from gllm.runtime.worker.cuda.staging import InputStaging
from gllm.runtime.worker.executor import Executor
from gllm.runtime.worker.kv_cache import KVCache
from gllm.scheduler.config import SchedulerConfig
from gllm.transport.device_group import DeviceRankGroup
from gllm.transport.device_streams import DeviceRuntime
from gllm.transport.groups import StageGroups

START_UP_STEPS = 2**61
"""Smallest number under which ranks agree on work of the start-up; those of steps are smaller."""
INTS_PER_TOKEN = 8
"""Expected number of int64 inputs per token; staging grows for steps with more."""
PLAIN_PARAMS = SequenceSamplingParams(temperature=1.0)
"""Sampling parameters without filters and edits."""


class CudaStartUp(Executor):
    """Executor on a device up to its first step; CudaExecutor computes the steps."""

    is_asynchronous = True
    keeps_weights = False

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        num_stages: int,
        layers: range,
        queues: DeviceRuntime,
        plan_attention: PlanAttention | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Choose dtypes and the attention backend.

        Args:
            model_config: of the checkpoint.
            engine_config: of the engine.
            num_stages: stages of the pipeline.
            layers: of this stage.
            queues: of the device.
            plan_attention: builds attention plans on the host. The layout of decodes has to depend
                only on their padded number and on the width of block tables. Default: the plans
                of the attention backend; plans of gathers have no fixed layout, so decodes run
                without graphs.
            rank: of this worker among those of the stage.
            num_ranks: workers of the stage.
        """
        super().__init__(
            model_config,
            engine_config,
            num_stages,
            layers,
            queues.device,
            rank=rank,
            num_ranks=num_ranks,
            gpu_capability=queues.capability,
        )
        self.stream = queues.stream()
        """The compute stream; transports synchronize with it."""
        self._queues = queues
        reads_tables = BACKENDS[self.backend].reads == "tables"
        own = partial(plan_table_attention, requested_tiles=set()) if reads_tables else plan_windows
        self.plan_attention = plan_attention or partial(own, backend=self.backend)
        """Builds the attention plans of steps, on the host."""
        self.supports_graphs = plan_attention is not None or reads_tables
        """True if decodes can run as graphs."""
        self._graph_sizes: list[int] = []
        """Recorded numbers of rows."""
        self._group: DeviceRankGroup | None = None
        """Group of the stage's ranks; None for a stage of one rank."""

    def join(self, groups: StageGroups) -> None:
        """See Executor; both groups of a device are one, because one thread queues all work."""
        super().join(groups)
        assert isinstance(groups.layers, DeviceRankGroup), "groups are opened with the device"
        self._group = groups.layers
        self.supports_graphs = self.supports_graphs and groups.layers.can_capture

    def close(self) -> None:
        """See Executor."""
        super().close()
        self._group = None
        # Graphs refer to the communicator, which is closed next.
        if hasattr(self, "_graphs"):
            self._graphs = DecodeGraphs(self._queues, self.stream, get_block_table)
        self._graph_sizes = []

    def reserve(self, scheduler: SchedulerConfig) -> None:
        """Allocate the memory for steps of a resolved configuration."""
        max_tokens, max_in_flight = scheduler.max_num_batched_tokens, scheduler.max_in_flight
        assert max_tokens is not None
        assert max_in_flight is not None
        max_steps = max_in_flight * scheduler.num_lanes
        max_rows = min(max_tokens, scheduler.max_num_seqs)
        queues = self._queues
        self._max_tokens, self._max_rows = max_tokens, max_rows
        self._max_blocks = -(-self._max_model_len // scheduler.block_size)
        # Block tables are copied for attention and for edits that look back; and a mask per row.
        words_per_row = 2 * self._max_blocks + num_bitmask_words(self.model.vocab_size)
        num_bytes = INTS_PER_TOKEN * 8 * max_tokens + 4 * max_rows * words_per_row
        self._staging = InputStaging(queues, num_bytes)
        if self.has_sampler:
            # A sampling row scores its own token, a prompt token the next one.
            max_scores, hidden_size = max_rows + max_tokens, self.model.hidden_size
            self._readback = OutputReadback(queues, max_rows, max_scores, hidden_size, max_steps)
        self._last_tokens = LastTokenTable(queues, (max_steps + 1) * scheduler.max_num_seqs)
        self._graphs = DecodeGraphs(queues, self.stream, get_block_table)

    def allocate(self, num_blocks: int, block_size: int, kv_memory: int | None = None) -> None:
        """See Executor."""
        if kv_memory is not None:
            raise FieldError("kv_transfer", KV_TRANSFER_ON_GPU)
        # Two blocks that no sequence holds: one stays zero, padding is written to the other.
        zeros, specs = self._queues.zeros, self._layer_specs
        self._cache = KVCache(specs, num_blocks + 1, block_size, self.cache_dtype, zeros)
        num_slots = (num_blocks + 2) * block_size if self.has_sampler else 0
        self._cached_tokens = zeros((num_slots,), torch.int64)
        """[slots]: the token of each slot of the KV cache."""
        self._sampler = DeviceSampler(self.model.vocab_size, block_size)
        self._batch_config = BatchConfig(
            num_blocks, block_size, self.dtype, self._windows, self.plan_attention, self._pad
        )

    def available_bytes(self, utilization: float, block_size: int, graph_rows: int) -> int:
        """Return the bytes for KV blocks beside the largest step and the graphs.

        Has to be called after `reserve` and before `allocate`.

        Args:
            utilization: share of the device's memory to use.
            block_size: tokens per block.
            graph_rows: rows of the largest graph.
        """
        self.allocate(1, block_size)
        num_bytes = self._queues.measure_free_bytes(self._run_largest_step, utilization)
        return max(num_bytes - self._measure_graph_bytes(graph_rows), 0)

    def _measure_graph_bytes(self, max_rows: int) -> int:
        """Return the bytes that graphs will take, from a trial with the two largest.

        All graphs share the memory of the largest; each further one takes at most as much as the
        second largest.
        """
        sizes = graph_sizes(max_rows) if max_rows and self.supports_graphs else []
        measured = [
            self._queues.measure_used_bytes(partial(self._record_graph, size, sizes[-1]))
            for size in sizes[:-3:-1]
        ]
        self._graphs = DecodeGraphs(self._queues, self.stream, get_block_table)
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
        self._queues.synchronize()

    @torch.inference_mode()
    def _record_graph(self, size: int, largest: int) -> None:
        """Record decodes of `size` rows; the largest size has to be recorded first."""
        if size == largest:
            shape = (0 if self.is_first else size, self.model.hidden_size)
            self._graph_hidden = self._queues.zeros(shape, self.dtype)
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
            ids[: num_tokens if self.is_first else 0],
            ids,
            self.plan_attention(rows, self.dtype, self._batch_config.windows),
        )
        host_sampler = None
        if self.has_sampler:
            host_sampler = self._sampler.create_example(num_samples, params)
        (inputs, sampler), _ = self._staging.put((host_inputs, host_sampler), self.stream)
        with self.stream.current():
            shape = num_tokens, self.model.hidden_size
            hidden = torch.zeros(shape, dtype=self.dtype, device=self._queues.device)
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
            torch.zeros(size if self.is_first else 0, dtype=torch.int64),
            torch.zeros(size, dtype=torch.int64),
            {window: replace(plan, rows=longest) for window, plan in plans.items()},
        )

    def _run_all_rows(self, inputs: StageInputs, hidden: Tensor | None) -> Tensor:
        """Return activations or, on the last stage, logits of every row; none on ranks > 0."""
        hidden = self._stage.forward(inputs, hidden, self._cache.layers)
        return self._stage.compute_logits(hidden) if self.is_last else hidden


def example_rows(
    token_counts: Iterable[int], max_model_len: int, block_size: int, num_blocks: int
) -> Iterator[PagedBatch]:
    """Yield micro-batches of one row, whose blocks are all the one that padding is written to.

    They make a stage compile its kernels before it serves. Triton compiles a kernel at the first
    launch with new constants, which depend on the model and on three properties of a step: the
    number of tokens (tile sizes), whether contexts are split, and whether rows are sampled with
    filters and edits. Each number of tokens at which a kernel changes its tiles and the shortest
    and the longest context are therefore run once; the caller runs both kinds of sampling.

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
