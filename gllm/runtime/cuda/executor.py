"""One stage's arithmetic on a device that runs behind the host.

Owns the order of a step's work: inputs there, layers as a graph or one by one, tokens drawn, tokens
back. Knows nothing of threads: `prepare`, `compute` and `sample` are called as those of
StageExecutor, but `compute` only puts work into streams, sampling included, and `sample` waits for
its tokens. So the device has its next step before it has ended the one at hand.

Beside the KV cache the last stage keeps a table with the token of each of its slots. There a row's
drawing finds what it looks back at, the last token too, which the host may not know yet.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gllm.config.engine import EngineConfig
from gllm.kernels.attention_backends import BACKENDS
from gllm.kernels.attention_plan import PagedBatch
from gllm.kernels.masking import num_bitmask_words
from gllm.kernels.triton.tiles import list_token_boundaries
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.models.config import ModelConfig
from gllm.models.stage import StageInputs
from gllm.runtime.batch import Batch, CacheShape, PlanAttention, plan_each, token_ids
from gllm.runtime.cuda.drawing import EVERYTHING, Drawing, DrawInputs, drawn_of
from gllm.runtime.cuda.graphs import DecodeGraphs, bucket_of, buckets, pad_decodes
from gllm.runtime.cuda.plans import block_table_of, plan_tables
from gllm.runtime.cuda.staging import Staging, copy_to_device
from gllm.runtime.cuda.step import Inputs, OnDevice
from gllm.runtime.cuda.tokens import LastTokens, TokenReturn
from gllm.runtime.cuda.warm_up import PLAIN, example_rows
from gllm.runtime.executor import DeviceTime, StageExecutor
from gllm.runtime.kv_cache import KVCache
from gllm.runtime.sampler import follow_grammars, results, take_forced, tell_embedded
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan
from gllm.transport.device_streams import DeviceEvent, DeviceRuntime

INTS_PER_TOKEN = 8
"""Of a step's inputs, about: staging grows where they are more."""


class DeviceExecutor(StageExecutor):
    """One stage's model part and KV cache on a device."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        stage: int,
        stages: int,
        layers: range,
        queues: DeviceRuntime,
        plan: PlanAttention | None = None,
    ) -> None:
        """`plan`: makes attention plans on the host, always of one layout for decodes as many as
        a bucket has, but for the width of their block tables; default: what the attention backend
        reads, tables or gathers. Gathers vary in layout, so that decodes are no graphs."""
        super().__init__(model_config, engine_config, stage, stages, layers, queues.device)
        self.stream = queues.stream()
        """Computes; whoever brings activations or takes them waits for it and lets it wait."""
        self._prepared_seconds = self._computed_seconds = 0.0
        """Spent by the host, each on a thread of its own."""
        self._queues = queues
        tables = BACKENDS[self.backend].reads == "tables"
        own = partial(plan_tables, asked=set()) if tables else plan_each
        self._plan = plan or partial(own, backend=self.backend)
        self._can_record = plan is not None or tables
        self._sizes: list[int] = []
        """Rows of decodes that there is a graph for."""

    @property
    def host_seconds(self) -> float:
        """Seconds that the host took to build steps and to put their work into streams."""
        return self._prepared_seconds + self._computed_seconds

    def reserve(self, scheduler: SchedulerConfig) -> None:
        """Make room for the steps of a resolved configuration."""
        tokens, steps = scheduler.max_num_batched_tokens, scheduler.max_in_flight
        assert tokens is not None
        assert steps is not None
        rows, size = min(tokens, scheduler.max_num_seqs), scheduler.block_size
        queues = self._queues
        self._most = tokens, rows
        self._width = -(-self._longest // size)
        # Block tables go over for attention and for what looks back; a mask for each row.
        wide = 2 * self._width + num_bitmask_words(self.model.vocab_size)
        self._staging = Staging(queues, INTS_PER_TOKEN * 8 * tokens + 4 * rows * wide)
        if self.is_last:
            # A row tells its own token, and every token of a prompt the next one.
            self._returns = TokenReturn(queues, rows, rows + tokens, self.model.hidden_size, steps)
        self._last = LastTokens(queues, (steps + 1) * scheduler.max_num_seqs)
        self._graphs = DecodeGraphs(queues, self.stream, block_table_of)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """As in StageExecutor."""
        # Two blocks that no sequence holds: one that stays zero, one that padding is written to.
        blocks = num_blocks + 1, block_size
        self._cache = KVCache(self._described, *blocks, self.cache_dtype, self._queues.zeros)
        slots = (num_blocks + 2) * block_size if self.is_last else 0
        self._cached_tokens = self._queues.zeros((slots,), torch.int64)
        self._drawing = Drawing(self.model.vocab_size, block_size)
        windows = frozenset(layer.attention.window for layer in self._described)
        plans = self._plan, self._padded
        self._shape = CacheShape(num_blocks, block_size, self.dtype, windows, *plans)

    def room(self, share: float, block_size: int, graph_rows: int) -> int:
        """Bytes for KV blocks that a share of the device's memory leaves beside the largest step
        and graphs of up to `graph_rows` rows.

        To be called between `reserve` and `allocate`.
        """
        self.allocate(1, block_size)
        room = self._queues.room(self._largest_step, share)
        return max(room - self._graph_bytes(graph_rows), 0)

    def _graph_bytes(self, most: int) -> int:
        """Bytes that graphs of up to `most` rows will take, from a trial with the two largest.

        All share the memory of the largest; each more takes what the second takes, at most.
        """
        sizes = buckets(most) if most and self._can_record else []
        held = [
            self._queues.held(lambda size=size: self._record(size, sizes[-1]))  # type: ignore[misc]
            for size in sizes[:-3:-1]
        ]
        self._graphs = DecodeGraphs(self._queues, self.stream, block_table_of)
        return held[0] + (len(sizes) - 1) * held[-1] if held else 0

    @torch.inference_mode()
    def record_graphs(self, most: int, progress: Callable[[int, int], None]) -> None:
        """Record decodes of up to `most` rows; `progress` hears (graphs, graphs in all).

        To be called behind `reserve` and `allocate`, before the first step. Does nothing where
        plans are not of one layout.
        """
        if not self._can_record:
            return
        sizes = buckets(most)
        for done, size in enumerate(reversed(sizes)):
            progress(done, len(sizes))
            self._record(size, sizes[-1])
        progress(len(sizes), len(sizes))
        self._sizes = sizes

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run example steps, so that no kernel is left to be compiled by the first requests.

        To be called behind `reserve` and `allocate`, before the first step.
        """
        shape = self._shape
        sizes = self._longest, shape.block_size, shape.num_blocks
        for rows in example_rows(list_token_boundaries(), *sizes):
            samples = min(int(rows.query_start[-1]), self._most[1])
            for sampling in (PLAIN, EVERYTHING):
                self._run_example(rows, samples, sampling)
        self._queues.synchronize()

    @torch.inference_mode()
    def _record(self, size: int, largest: int) -> None:
        """Record decodes of `size` rows; the largest size comes first."""
        if size == largest:
            shape = (0 if self.is_first else size, self.model.hidden_size)
            self._graph_hidden = self._queues.zeros(shape, self.dtype)
        hidden = None if self.is_first else self._graph_hidden[:size]
        self._graphs.record(size, self._example(size), hidden, self._output)

    def _build(self, plan: StepPlan) -> Batch:
        """As in StageExecutor; on the host alone."""
        begin = time.perf_counter()
        batch = super()._build(plan)
        followed = [self._mirror.sequences[row.seq] for row in plan.rows]
        ids = np.zeros(0, dtype=np.int64)
        if self.is_last and not self.is_first:
            ids = token_ids(plan.rows, followed)
        unknown = places = kept = torch.empty(0, dtype=torch.int64)
        if self._keeps_tokens:
            unknown = torch.tensor([row for row, _ in batch.placeholders], dtype=torch.int64)
            places = self._last.find([seq for _, seq in batch.placeholders])
            kept = self._last.give([seq for seq, _ in batch.sampled.owners])
        drawing = torch.from_numpy(ids), self._plan_draw(plan, batch)
        inputs = Inputs(batch.inputs, batch.sample_rows, *drawing, unknown, places, kept)
        batch.device = OnDevice(inputs)
        self._prepared_seconds += time.perf_counter() - begin
        return batch

    def _free(self, seqs: list[int]) -> None:
        """As in StageExecutor."""
        super()._free(seqs)
        self._last.release(seqs)

    @torch.inference_mode()
    def compute(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Put the step into streams: activations [tokens, hidden] for the next stage, on the last
        one tokens [samples] int64. Both are there for what is put into `stream` behind it.

        hidden: on the device, for what is put into `stream`.
        """
        begin = time.perf_counter()
        there, flat = self._staging.put(batch.device.inputs, self.stream)
        try:
            output, scores, embeddings = self._forward(batch, there, flat, hidden)
            if self.is_last:
                output = self._draw(batch, there, output, scores, embeddings)
        finally:
            self._staging.release(self.stream)
        self._computed_seconds += time.perf_counter() - begin
        return output

    def finish(self, batch: Batch) -> DeviceTime:
        """Wait until the device has computed the step, and return the time that it took."""
        spans: list[tuple[DeviceEvent, DeviceEvent]] = batch.device.spans
        first, last = spans[0][0], spans[-1][1]
        last.synchronize()
        return DeviceTime(last.since(first), sum(end.since(begin) for begin, end in spans))

    @contextmanager
    def _timed(self, batch: Batch) -> Iterator[None]:
        """Measure, by the device's clock, what is put into `stream` within it."""
        begin, end = self._queues.event(timed=True), self._queues.event(timed=True)
        self.stream.record(begin)
        yield
        self.stream.record(end)
        batch.device.spans.append((begin, end))

    def sample(
        self, batch: Batch, logits: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        """As in StageExecutor, but all is drawn: the host waits for the tokens."""
        assert batch.device.told is not None, "a step is sampled once it is computed"
        tokens, scores, embeddings = batch.device.told.read()
        drawn = drawn_of(batch, tokens, scores)
        take_forced(batch.sampled, drawn)
        embedded = tell_embedded(batch.sampled, embeddings, drawn.errors)
        return results(batch.sampled, drawn), drawn.logprobs + embedded

    @torch.inference_mode()
    def _largest_step(self) -> None:
        """Prefill of as many tokens as a step may have, all in one block, and as many samples."""
        tokens, samples = self._most
        counts = [min(self._longest, tokens - at) for at in range(0, tokens, self._longest)]
        lengths, blocks = np.array(counts, dtype=np.int64), self._shape.num_blocks
        starts = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
        table = np.zeros((len(counts), self._width), dtype=np.int64)
        rows = PagedBatch(table, starts, lengths, 0, self._shape.block_size, blocks)
        self._run_example(rows, samples, EVERYTHING)

    def _run_example(self, rows: PagedBatch, count: int, sampling: SequenceSamplingParams) -> None:
        """Compute a micro-batch whose tokens are all 0, and sample from its first rows."""
        tokens = int(rows.query_start[-1])
        ids = torch.zeros(tokens, dtype=torch.int64)
        inputs = StageInputs(
            ids[: tokens if self.is_first else 0],
            ids,
            self._plan(rows, self.dtype, self._shape.windows),
        )
        drawing = self._drawing.example(count, sampling) if self.is_last else None
        (there, draw), _ = self._staging.put((inputs, drawing), self.stream)
        with self.stream.current():
            shape = tokens, self.model.hidden_size
            hidden = torch.zeros(shape, dtype=self.dtype, device=self._queues.device)
            previous = None if self.is_first else hidden
            hidden = self._stage.forward(there, previous, self._cache.layers)
            if draw is not None:
                # As embeddings are.
                self._stage.apply_final_norm(hidden[:1])
                logits = self._stage.compute_logits(hidden[:count])
                self._drawing.draw(logits, draw, self._cached_tokens)
        self._staging.release(self.stream)

    def _padded(self, rows: PagedBatch) -> PagedBatch:
        """Decodes as many as a bucket has, where one holds them."""
        size = bucket_of(len(rows.context_len), self._sizes)
        if size is None or rows.num_decodes < len(rows.context_len):
            return rows
        return pad_decodes(rows, size)

    def _example(self, size: int) -> StageInputs:
        """A bucket's inputs, all of padding. What the host reads of it has the longest contexts,
        so that whatever it decides by them is enough for all."""
        block_size, num_blocks = self._shape.block_size, self._shape.num_blocks
        none = np.zeros(0, dtype=np.int64)
        empty = PagedBatch(none.reshape(0, 1), none, none, 0, block_size, num_blocks)
        rows = pad_decodes(empty, size, self._width)
        longest = replace(rows, context_len=np.full(size, self._longest, dtype=np.int64))
        plans = self._plan(rows, self.dtype, self._shape.windows)
        return StageInputs(
            torch.zeros(size if self.is_first else 0, dtype=torch.int64),
            torch.zeros(size, dtype=torch.int64),
            {window: replace(plan, rows=longest) for window, plan in plans.items()},
        )

    def _output(self, inputs: StageInputs, hidden: Tensor | None) -> Tensor:
        """Activations or, on the last stage, logits of every row."""
        hidden = self._stage.forward(inputs, hidden, self._cache.layers)
        return self._stage.compute_logits(hidden) if self.is_last else hidden

    def _plan_draw(self, plan: StepPlan, batch: Batch) -> DrawInputs:
        """What drawing needs of the step; nothing but on the last stage."""
        at = [index for index, row in enumerate(plan.rows) if row.should_sample and self.is_last]
        lengths = [plan.rows[index].start + plan.rows[index].num_tokens for index in at]
        blocks = next(iter(batch.inputs.attention.values())).rows.block_table
        return self._drawing.plan(batch.sampled, batch.prompts, lengths, blocks[at])

    def _forward(
        self, batch: Batch, there: Inputs, flat: Tensor, hidden: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """Activations [tokens, hidden], on the last stage logits [samples, vocabulary]; the scores
        of prompts, packed; and embeddings [embedded, hidden] float32 where a row tells one."""
        count, rows = batch.num_tokens, len(batch.inputs.positions)
        attention = next(iter(batch.inputs.attention.values())).rows
        is_graph = attention.num_decodes == rows and rows in self._sizes
        is_graph = is_graph and not (batch.prompts or batch.sampled.embedded)
        inputs, samples = there.stage, len(batch.sample_rows)
        with self.stream.current():
            if is_graph:
                inputs = self._graphs.inputs(rows, inputs, flat, hidden)
            elif hidden is not None and count < rows:
                hidden = functional.pad(hidden, (0, 0, 0, rows - count))
            if len(there.unknown):
                known = self._last.table.index_select(0, there.places)
                inputs.token_ids.index_copy_(0, there.unknown, known)
            self._keep_beside_cache(inputs, there.ids, count)
            if is_graph:
                # The graph alone: the host puts what is before it into the stream piece by piece,
                # and a device that waits for the next piece does no work.
                with self._timed(batch):
                    output = self._graphs.replay(rows)[:count]
                chosen = self.is_last and samples < count
                return output.index_select(0, there.sample_rows) if chosen else output, [], None
            with self._timed(batch):
                return self._run_layers(batch, there, inputs, hidden)

    def _run_layers(
        self, batch: Batch, there: Inputs, inputs: StageInputs, hidden: Tensor | None
    ) -> tuple[Tensor, list[Tensor], Tensor | None]:
        """As `_forward`, without a graph. To be called within the stream."""
        hidden = self._stage.forward(inputs, hidden, self._cache.layers)[: batch.num_tokens]
        if not self.is_last:
            return hidden, [], None
        scores = self._drawing.score_prompts(hidden, there.draw, self._stage.compute_logits)
        # The rows that sample alone: a chunk's other tokens have no use for logits.
        hidden, embeddings = hidden.index_select(0, there.sample_rows), None
        if len(there.draw.embedded):
            embeddings = self._stage.apply_final_norm(hidden.index_select(0, there.draw.embedded))
        return self._stage.compute_logits(hidden), scores, embeddings

    def _keep_beside_cache(self, inputs: StageInputs, ids: Tensor, count: int) -> None:
        """On the last stage: put the step's `count` tokens where their keys and values go. ids
        [tokens] int64: theirs, where inputs have none."""
        if self.is_last:
            slots = next(iter(inputs.attention.values())).slots
            ids = inputs.token_ids if self.is_first else ids
            self._cached_tokens.index_copy_(0, slots[:count], ids[:count])

    def _draw(
        self,
        batch: Batch,
        there: Inputs,
        logits: Tensor,
        scores: list[Tensor],
        embeddings: Tensor | None,
    ) -> Tensor:
        """Tokens [samples] int64, negative where there is none, also on their way to the host with
        their scores and those of prompts, packed, and with embeddings [embedded, hidden]. Where
        rows have grammars, the host waits for their tokens of the steps before."""
        guided = self._what_grammars_allow(batch)
        with self.stream.current():
            # Kernels are not started for no rows at all.
            tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
            if len(logits):
                with self._timed(batch):
                    table = self._cached_tokens
                    tokens, told = self._drawing.draw(logits, there.draw, table, guided)
                scores = [*scores, *told]
            batch.device.told = self._returns.put(tokens, scores, self.stream, embeddings)
            if len(there.kept):
                # For the next step.
                self._last.table.index_copy_(0, there.kept, tokens.clamp(min=0))
        return tokens

    def _what_grammars_allow(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """On the device, rows with grammars [guided] int64 and masks [guided, words] int32."""
        rows = batch.sampled
        if not rows.guided:
            return None
        begin = time.perf_counter()
        masks, _ = follow_grammars(rows, self.model.vocab_size)
        # It is no work of the host's.
        self._computed_seconds -= time.perf_counter() - begin
        place = self._queues, self.stream
        return copy_to_device(torch.tensor(rows.guided), *place), copy_to_device(masks, *place)
