"""One stage's arithmetic on a device that runs behind the host.

Owns the order of a step's work: inputs there, layers as a graph or one by one, tokens drawn, tokens
back. Knows nothing of threads: `prepare`, `compute` and `sample` are called as those of
StageExecutor, but `compute` only puts work into streams, sampling included, and `sample` waits for
its tokens. So the device has its next step before it has ended the one at hand.

Rows whose drawing looks at what the host alone knows (penalties, bad words, log-probabilities) are
drawn on the host; a step with one of them waits for the device.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gllm.config import EngineConfig
from gllm.kernels.attention_backends import BACKENDS
from gllm.kernels.attention_plan import PagedRows
from gllm.kernels.sampling import SamplingPlan
from gllm.kernels.sampling import sample as draw_tokens
from gllm.messages import RowLogprobs
from gllm.models.config import ModelConfig
from gllm.models.stage import StageInputs
from gllm.runtime.batch import Batch, CacheShape, PlanAttention, plan_each
from gllm.runtime.cuda.graphs import DecodeGraphs, bucket_of, buckets, pad_decodes
from gllm.runtime.cuda.plans import plan_tables
from gllm.runtime.cuda.staging import Staging
from gllm.runtime.cuda.tokens import LastTokens, TokenReturn, Told
from gllm.runtime.executor import StageExecutor
from gllm.runtime.kv_cache import KVCache
from gllm.runtime.logprobs import NOT_FINITE
from gllm.runtime.sampler import Drawn, draw
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import Sampled, StepPlan
from gllm.streams import Event, Queues

NO_TOKEN = -1
"""Stands for the token of a row whose logits are not finite."""
INTS_PER_TOKEN = 8
"""Of a step's inputs, about: staging grows where they are more."""


class Inputs(NamedTuple):
    """All that a step takes to the device."""

    stage: StageInputs
    sample_rows: Tensor
    """[samples] int64"""
    plan: SamplingPlan
    unknown: Tensor
    """[placeholders] int64: token rows whose id is a last token."""
    places: Tensor
    """[placeholders] int64: of which place."""
    kept: Tensor
    """[samples] int64: places that the step's tokens are put to; empty where nobody looks."""


@dataclass(slots=True)
class OnDevice:
    """What a batch carries beside its own."""

    inputs: Inputs
    """On the host."""
    began: Event
    ended: Event
    told: Told | Drawn | None = None
    """On the last stage, once computed."""


class DeviceExecutor(StageExecutor):
    """One stage's model part and KV cache on a device."""

    def __init__(
        self,
        model_config: ModelConfig,
        engine_config: EngineConfig,
        stage: int,
        stages: int,
        layers: range,
        queues: Queues,
        plan: PlanAttention | None = None,
    ) -> None:
        """`plan`: makes attention plans on the host, always of one layout for decodes as many as
        a bucket has; default: what the attention backend reads, tables or gathers. The latter are
        not of one layout, so that decodes are no graphs."""
        super().__init__(model_config, engine_config, stage, stages, layers, queues.device)
        self.stream = queues.stream()
        """Computes; whoever brings activations or takes them waits for it and lets it wait."""
        self._prepared_seconds = self._computed_seconds = 0.0
        """Spent by the host, each on a thread of its own."""
        self._queues = queues
        tables = BACKENDS[self.backend].reads == "tables"
        self._plan = plan or partial(plan_tables if tables else plan_each, backend=self.backend)
        self._can_record = plan is not None or tables
        self._sizes: list[int] = []
        """Rows of decodes that there is a graph for."""
        self._waited = 0.0
        """Seconds of a step that the host waited for the device."""

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
        self._staging = Staging(queues, INTS_PER_TOKEN * 8 * tokens + 4 * rows * self._width)
        self._returns = TokenReturn(queues, rows, steps)
        self._last = LastTokens(queues, (steps + 1) * scheduler.max_num_seqs)
        self._graphs = DecodeGraphs(queues, self.stream)

    def allocate(self, num_blocks: int, block_size: int) -> None:
        """As in StageExecutor."""
        # Two blocks that no sequence holds: one that stays zero, one that padding is written to.
        blocks = num_blocks + 1, block_size
        self._cache = KVCache(self._described, *blocks, self.cache_dtype, self._queues.zeros)
        windows = frozenset(layer.attention.window for layer in self._described)
        plans = self._plan, self._padded
        self._shape = CacheShape(num_blocks, block_size, self.dtype, windows, *plans)

    def room(self, share: float, block_size: int) -> int:
        """Bytes for KV blocks that a share of the device's memory leaves beside the largest step.

        To be called between `reserve` and `allocate`.
        """
        self.allocate(1, block_size)
        return self._queues.room(self._largest_step, share)

    @torch.inference_mode()
    def record_graphs(self, most: int, progress: Callable[[int, int], None]) -> None:
        """Record decodes of up to `most` rows; `progress` hears (graphs, graphs in all).

        To be called behind `reserve` and `allocate`, before the first step. Does nothing where
        plans are not of one layout.
        """
        if not self._can_record:
            return
        sizes = buckets(most)
        hidden = self._queues.zeros((sizes[-1], self.model.hidden_size), self.dtype)
        for done, size in enumerate(reversed(sizes)):
            progress(done, len(sizes))
            given = None if self.is_first else hidden[:size]
            self._graphs.record(size, self._example(size), given, self._output)
        progress(len(sizes), len(sizes))
        self._sizes = sizes

    def prepare(self, plan: StepPlan) -> Batch:
        """As in StageExecutor; on the host alone."""
        begin = time.perf_counter()
        batch = super().prepare(plan)
        unknown = places = kept = torch.empty(0, dtype=torch.int64)
        if self._keeps_tokens:
            unknown = torch.tensor([row for row, _ in batch.placeholders], dtype=torch.int64)
            places = self._last.find([seq for _, seq in batch.placeholders])
            kept = self._last.give([seq for seq, _ in batch.sampled.owners])
            self._last.release(plan.released)
        rows = batch.sample_rows, batch.sampled.plan
        inputs = Inputs(batch.inputs, *rows, unknown, places, kept)
        events = self._queues.event(timed=True), self._queues.event(timed=True)
        batch.device = OnDevice(inputs, *events)
        self._prepared_seconds += time.perf_counter() - begin
        return batch

    @torch.inference_mode()
    def compute(self, batch: Batch, hidden: Tensor | None) -> Tensor:
        """Put the step into streams: activations [tokens, hidden] for the next stage, on the last
        one tokens [samples] int64. Both are there for what is put into `stream` behind it.

        hidden: on the device, for what is put into `stream`.
        """
        begin, self._waited = time.perf_counter(), 0.0
        there, flat = self._staging.put(batch.device.inputs, self.stream)
        self.stream.record(batch.device.began)
        try:
            output = self._forward(batch, there, flat, hidden)
            if self.is_last:
                output = self._draw(batch, there, output)
        finally:
            self._staging.release(self.stream)
        self.stream.record(batch.device.ended)
        self._computed_seconds += time.perf_counter() - begin - self._waited
        return output

    def finish(self, batch: Batch) -> float:
        """Wait until the device has computed the step; the seconds that it took."""
        batch.device.ended.synchronize()
        seconds: float = batch.device.ended.since(batch.device.began)
        return seconds

    def sample(self, batch: Batch, logits: Tensor) -> tuple[list[Sampled], list[RowLogprobs]]:
        """As in StageExecutor, but all is drawn: the host waits for the tokens."""
        told = batch.device.told
        assert told is not None, "a step is sampled once it is computed"
        if isinstance(told, Told):
            tokens = told.read()
            errors = [NOT_FINITE if token == NO_TOKEN else "" for token in tokens]
            told = Drawn([max(token, 0) for token in tokens], errors, [])
        rows = zip(batch.sampled.owners, told.tokens, told.errors, strict=True)
        return [Sampled(seq, epoch, token, error) for (seq, epoch), token, error in rows], (
            told.logprobs
        )

    @torch.inference_mode()
    def _largest_step(self) -> None:
        """Prefill of as many tokens as a step may have, all in one block, and as many samples."""
        tokens, samples = self._most
        counts = [min(self._longest, tokens - at) for at in range(0, tokens, self._longest)]
        lengths, blocks = np.array(counts, dtype=np.int64), self._shape.num_blocks
        starts = np.concatenate((np.zeros(1, dtype=np.int64), lengths.cumsum()))
        table = np.zeros((len(counts), self._width), dtype=np.int64)
        rows = PagedRows(table, starts, lengths, 0, self._shape.block_size, blocks)
        ids = torch.zeros(tokens, dtype=torch.int64)
        inputs = StageInputs(
            ids[: tokens if self.is_first else 0],
            ids,
            self._plan(rows, self.dtype, self._shape.windows),
        )
        there, _ = self._staging.put(inputs, self.stream)
        with self.stream.current():
            shape = tokens, self.model.hidden_size
            hidden = torch.zeros(shape, dtype=self.dtype, device=self._queues.device)
            hidden = self._stage.forward(
                there, None if self.is_first else hidden, self._cache.layers
            )
            if self.is_last:
                _finite(self._stage.logits(hidden[:samples]))
        self._staging.release(self.stream)

    def _padded(self, rows: PagedRows) -> PagedRows:
        """Decodes as many as a bucket has, where one holds them."""
        size = bucket_of(len(rows.context_len), self._sizes)
        if size is None or rows.num_decodes < len(rows.context_len):
            return rows
        return pad_decodes(rows, size, self._width)

    def _example(self, size: int) -> StageInputs:
        """A bucket's inputs, all of padding. What the host reads of it has the longest contexts,
        so that whatever it decides by them is enough for all."""
        block_size, num_blocks = self._shape.block_size, self._shape.num_blocks
        none = np.zeros(0, dtype=np.int64)
        empty = PagedRows(none.reshape(0, 1), none, none, 0, block_size, num_blocks)
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
        return self._stage.logits(hidden) if self.is_last else hidden

    def _forward(self, batch: Batch, there: Inputs, flat: Tensor, hidden: Tensor | None) -> Tensor:
        """Activations [tokens, hidden], on the last stage logits [samples, vocabulary]."""
        count, rows = batch.num_tokens, len(batch.inputs.positions)
        attention = next(iter(batch.inputs.attention.values())).rows
        is_graph = attention.num_decodes == rows and rows in self._sizes and not batch.prompts
        inputs, samples = there.stage, len(batch.sample_rows)
        with self.stream.current():
            if is_graph:
                inputs = self._graphs.inputs(rows, flat, hidden)
            elif hidden is not None and count < rows:
                hidden = functional.pad(hidden, (0, 0, 0, rows - count))
            if len(there.unknown):
                known = self._last.table.index_select(0, there.places)
                inputs.token_ids.index_copy_(0, there.unknown, known)
            if is_graph:
                output = self._graphs.replay(rows)[:count]
                chosen = self.is_last and samples < count
                return output.index_select(0, there.sample_rows) if chosen else output
            hidden = self._stage.forward(inputs, hidden, self._cache.layers)[:count]
            if not self.is_last:
                return hidden
            logits = self._stage.logits(hidden.index_select(0, there.sample_rows))
        for prompt in batch.prompts:
            prompt.compute(hidden, self._logits_on_host)
        return logits

    def _draw(self, batch: Batch, there: Inputs, logits: Tensor) -> Tensor:
        """Tokens [samples] int64, NO_TOKEN where there is none, also on their way to the host."""
        if batch.prompts or not all(state.is_plain for state in batch.sampled.states):
            return self._draw_on_host(batch, there, logits)
        if not len(logits):
            # Kernels are not started for no rows at all.
            batch.device.told = Drawn([], [], [])
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        with self.stream.current():
            finite = _finite(logits)
            tokens = draw_tokens(logits, there.plan).masked_fill_(~finite, NO_TOKEN)
            batch.device.told = self._returns.put(tokens, self.stream)
            self._keep(there, tokens)
        return tokens

    def _draw_on_host(self, batch: Batch, there: Inputs, logits: Tensor) -> Tensor:
        """The same, by what the host knows."""
        on_host = self._to_host(logits)
        for prompt in batch.prompts:
            prompt.record()
        drawn = draw(on_host, batch.sampled)
        batch.device.told = drawn
        drawn_tokens = self._queues.pinned((len(drawn.tokens),), torch.int64)
        drawn_tokens.copy_(torch.tensor(drawn.tokens, dtype=torch.int64))
        with self.stream.current():
            tokens = torch.empty_like(drawn_tokens, device=self._queues.device)
            tokens.copy_(drawn_tokens, non_blocking=True)
            self._keep(there, tokens)
        return tokens

    def _keep(self, there: Inputs, tokens: Tensor) -> None:
        """Leave tokens [samples] int64 for the next step."""
        if len(there.kept):
            self._last.table.index_copy_(0, there.kept, tokens.clamp(min=0))

    def _logits_on_host(self, hidden: Tensor) -> Tensor:
        """Logits [rows, vocabulary] of hidden [rows, hidden], where the host can read them."""
        with self.stream.current():
            logits = self._stage.logits(hidden)
        return self._to_host(logits)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """A tensor's numbers; the host waits for them."""
        begin = time.perf_counter()
        copy, arrived = self._queues.pinned(tensor.shape, tensor.dtype), self._queues.event()
        with self.stream.current():
            copy.copy_(tensor, non_blocking=True)
        self.stream.record(arrived)
        arrived.synchronize()
        self._waited += time.perf_counter() - begin
        return copy


def _finite(logits: Tensor) -> Tensor:
    """Whether all logits of each row of [rows, vocabulary] are finite, [rows] bool; those of other
    rows become 0."""
    finite = torch.isfinite(logits.amin(dim=-1)) & torch.isfinite(logits.amax(dim=-1))
    logits.masked_fill_(~finite[:, None], 0)
    return finite
