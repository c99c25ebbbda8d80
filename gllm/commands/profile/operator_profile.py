"""Operator profile of a model: times of all operators at Vidur's points, as tables in a folder.

One device computes the shards of every tensor parallel size in turn. Columns and files are those of
the tables that ship with the simulator (gllm/sim/data/README.md), so `ForestCostModel` reads both.

Source of the points: "Vidur", MLSys'24, arXiv 2405.05465.
"""

import csv
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from gllm.commands.profile.operators import (
    MS_PER_SECOND,
    LayerOperators,
    time_embedding,
    time_lm_head,
    time_sampler,
)
from gllm.commands.profile.span import StepRows, TimedSpan
from gllm.config.engine import EngineConfig
from gllm.kernels.threads import using_num_threads
from gllm.models.config import ModelConfig, read_config
from gllm.models.feed_forward import MLP
from gllm.models.spec.feed_forward import MLPSpec
from gllm.runtime.worker.device import threads_per_worker
from gllm.sim.costs.operator_tables import VIDUR_FILES
from gllm.transport.base import EdgeLayout
from gllm.transport.edge import create_edge
from gllm.transport.groups import open_groups
from gllm.transport.region import RegionLayout, create_region
from gllm.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

SLOTS = 2
"""Number of messages in flight."""


def time_all_reduce(
    num_ranks: int, token_counts: Sequence[int], hidden_size: int, dtype: torch.dtype, repeats: int
) -> dict[int, list[float]]:
    """Time all-reduces of a [tokens, hidden] tensor over shared memory between threads as ranks.

    Returns:
        The milliseconds of each repeat on rank 0, by number of tokens.
    """
    layout = RegionLayout(max(token_counts), hidden_size, 0)
    region = create_region("profile-ranks", "shared-memory")
    groups = [open_groups(region, rank, num_ranks, layout).layers for rank in range(num_ranks)]
    region.close()
    times: dict[int, list[float]] = {tokens: [] for tokens in token_counts}

    def run(rank: int) -> None:
        group = groups[rank]
        for tokens in token_counts:
            partial = torch.ones(tokens, hidden_size)
            for _ in range(repeats):
                begin = time.perf_counter()
                group.sum(partial, None, dtype)
                if rank == 0:
                    times[tokens].append(MS_PER_SECOND * (time.perf_counter() - begin))

    _run_threads([lambda rank=rank: run(rank) for rank in range(num_ranks)])  # type: ignore[misc]
    for group in groups:
        group.close()
    return times


def time_send(
    token_counts: Sequence[int], hidden_size: int, dtype: torch.dtype, repeats: int
) -> dict[int, list[float]]:
    """Time transfers of a [tokens, hidden] tensor over shared memory from one stage to the next.

    Returns:
        The milliseconds of each repeat, by number of tokens.
    """
    layout = EdgeLayout(SLOTS, max(token_counts), hidden_size, dtype.itemsize)
    edge = create_edge("profile-edge", "shared-memory")
    sender = SharedMemorySender(edge.descriptors, layout, dtype)
    receiver = SharedMemoryReceiver(edge.descriptors, layout, dtype)
    steps = [tokens for tokens in token_counts for _ in range(repeats)]
    sent, received = [0.0] * len(steps), [0.0] * len(steps)
    arrived = [threading.Event() for _ in steps]

    def send() -> None:
        for step, tokens in enumerate(steps):
            hidden = torch.ones(tokens, hidden_size, dtype=dtype)
            sent[step] = time.perf_counter()
            sender.send(step, hidden)
            arrived[step].wait()

    def receive() -> None:
        for step, tokens in enumerate(steps):
            receiver.receive(step, tokens)
            received[step] = time.perf_counter()
            arrived[step].set()

    _run_threads([send, receive])
    sender.close()
    receiver.close()
    edge.close()
    times: dict[int, list[float]] = {tokens: [] for tokens in token_counts}
    for step, tokens in enumerate(steps):
        times[tokens].append(MS_PER_SECOND * (received[step] - sent[step]))
    return times


def _run_threads(runs: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=run) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


SPAN_LAYERS = 3
"""Consecutive layers in the longer of two timed steps; the other has one layer."""
DECIMALS = 5
"""Decimals of stored milliseconds."""
HOST_CONTEXT = 32
"""Cached tokens of the decodes that show the host's time."""

Row = Mapping[str, Any]
SeparateStep = Callable[[StepRows], tuple[float, float]]
"""Returns the milliseconds of a layer in a step, and those of the step without its layers."""


@dataclass(frozen=True)
class OperatorPoints:
    """Sizes at which operators are timed: those of Vidur's profiles, up to limits.

    Raises:
        ValueError: a limit is too small.
    """

    max_tokens: int = 4096
    """Maximum number of tokens of a micro-batch, and of a sequence."""
    max_batch: int = 128
    """Maximum number of sequences of a micro-batch of decodes."""
    stride: int = 1
    """Measure every n-th point only, and the largest one."""
    repeats: int = 20

    def __post_init__(self) -> None:
        if self.max_tokens < 64 or min(self.max_batch, self.stride, self.repeats) < 1:
            raise ValueError(
                f"max_tokens is {self.max_tokens}, max_batch {self.max_batch}, stride {self.stride}"
                f" and repeats {self.repeats}: the first has to be at least 64, the others 1"
            )

    @property
    def tokens(self) -> list[int]:
        """Numbers of tokens at which all operators but attention are timed."""
        sizes = [1, 2, 4, *range(8, 1024, 8), *range(1024, 2048, 16), *range(2048, 4096, 32)]
        return self._thin([*sizes, *_doublings(4096, self.max_tokens)], self.max_tokens)

    @property
    def rows(self) -> list[int]:
        """Numbers of sequences at which the LM head and the host's work are timed."""
        return self._thin([1, 2, 4, *range(8, self.max_batch, 8)], self.max_batch)

    @property
    def prefills(self) -> list[tuple[int, int]]:
        """(cached tokens, chunk) of prefill attention: cached tokens are multiples of the chunk."""
        sizes = [8, 16, 32, *range(64, 128, 16), *range(128, 1024, 32), *range(1024, 4096, 64)]
        pairs = []
        for chunk in self._thin([*sizes, *_doublings(4096, self.max_tokens)], self.max_tokens):
            most = self.max_tokens - chunk
            pairs += [(kv, chunk) for kv in self._thin([*range(0, most + 1, chunk)], most)]
        return pairs

    @property
    def decodes(self) -> list[tuple[int, int]]:
        """(batch, cached tokens of each) of decode attention."""
        contexts = [*range(32, 1024, 32), *range(1024, self.max_tokens, 64)]
        most = self.max_tokens - 1
        batches = self._thin([*range(1, self.max_batch)], self.max_batch)
        return [(batch, kv) for batch in batches for kv in self._thin(contexts, most)]

    def _thin(self, values: Sequence[int], most: int) -> list[int]:
        """Return each value of the stride up to `most`, and `most`."""
        kept = [value for value in values if value < most][:: self.stride]
        return [*kept, most]


def _doublings(start: int, end: int) -> list[int]:
    """Return start, 2 * start and so on below `end`."""
    sizes = []
    while start < end:
        sizes.append(start)
        start *= 2
    return sizes


@dataclass
class OperatorProfile:
    """Measured times of a model's operators, as rows of Vidur's CSV tables by table name."""

    tables: dict[str, list[Row]] = field(default_factory=lambda: {name: [] for name in VIDUR_FILES})

    def write(self, folder: Path) -> None:
        """Write one CSV file per table.

        Raises:
            OSError: A file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in self.tables.items():
            columns = list(dict.fromkeys(column for row in rows for column in row))
            with open(folder / f"{name}.csv", "w", encoding="utf-8", newline="") as file:
                writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows)


class OperatorProfiler:
    """Times the operators of a model on one device, at the sizes of Vidur's profiles.

    Args:
        config: configuration of the engine.
        folder: folder with the model's weights.
        device: name of the device to write into the tables.
        points: sizes to measure.
        on_step: called after each row of a table.

    Raises:
        ModelError: the folder has no model that can be read.
        ValueError: the model has fewer than two layers.
    """

    def __init__(
        self,
        config: EngineConfig,
        folder: Path,
        device: str,
        points: OperatorPoints,
        on_step: Callable[[], object] = lambda: None,
    ) -> None:
        self._config, self._folder, self._device = config, folder, device
        self._model: ModelConfig = read_config(folder, config.hf_overrides)
        self._points, self._on_step = points, on_step
        self._profile = OperatorProfile()
        if self._model.model.num_layers < 2:
            raise ValueError("operators need a model of at least two layers")

    def run(self, degrees: Sequence[int]) -> OperatorProfile:
        """Measure the model's shards for each tensor parallel size and return the tables.

        Args:
            degrees: tensor parallel sizes.

        Raises:
            FieldError: the layers cannot be computed as configured.
            ValueError: the layers have another structure than the measured operators.
        """
        with using_num_threads(threads_per_worker(self._config.threads, max(degrees))):
            for tp in degrees:
                self._measure_shard(tp)
            self._measure_transfers([tp for tp in degrees if tp > 1])
        self._add("model_shapes", self._shape_row())
        return self._profile

    def _measure_shard(self, tp: int) -> None:
        """Measure what one of `tp` ranks computes."""
        num_layers = self._model.model.num_layers
        layers = range(1, min(1 + SPAN_LAYERS, num_layers))
        with self._load(range(1, 2), tp) as one, self._load(layers, tp) as several:
            operators = LayerOperators(one, self._points.repeats)
            separate = partial(self._separate, one, several, len(layers))
            end = range(num_layers - 1, num_layers)
            with self._load(range(1), tp) as first, self._load(end, tp) as last:
                self._measure_tokens(tp, operators, separate, first, last)
                self._measure_host(tp, separate, last)
            self._measure_attention(tp, operators)

    def _separate(
        self, one: TimedSpan, several: TimedSpan, num_layers: int, rows: StepRows
    ) -> tuple[float, float]:
        """Return the milliseconds of a layer, and those of a step without its layers.

        The difference between steps of `num_layers` layers and of one is the time of the others.
        """
        single, multiple = (
            MS_PER_SECOND * span.repeat_step(rows, self._points.repeats, should_sample=False)[1]
            for span in (one, several)
        )
        if num_layers == 1:
            return single, 0.0
        layer = (multiple - single) / (num_layers - 1)
        return layer, single - layer

    def _measure_tokens(
        self, tp: int, operators: LayerOperators, separate: SeparateStep, first: TimedSpan,
        last: TimedSpan,
    ) -> None:  # fmt: skip
        repeats = self._points.repeats
        for tokens in self._points.tokens:
            times = operators.time_tokens(tokens)
            rows = [(0, tokens)]
            attention = operators.time_attention(rows).median
            layer, _ = separate(rows)
            times["other"] = layer - sum(times.values()) - attention
            times["emb"] = time_embedding(first, tokens, repeats)
            if tokens <= self._points.max_batch:
                times["lm_head"] = time_lm_head(last, tokens, repeats)
            self._add("token_ops", self._key(tp, num_tokens=tokens) | _in_columns(times))

    def _measure_host(self, tp: int, separate: SeparateStep, last: TimedSpan) -> None:
        for batch in self._points.rows:
            _, step = separate([(HOST_CONTEXT, 1)] * batch)
            sampler = time_sampler(last, batch, self._points.repeats)
            times = _in_columns({"prepare_inputs": max(0.0, step), "sampler": sampler})
            self._add("cpu_overheads", self._key(tp, batch_size=batch) | times)

    def _measure_attention(self, tp: int, operators: LayerOperators) -> None:
        steps: list[tuple[str, tuple[int, int, int], StepRows]] = [
            ("attn_prefill", (1, chunk, kv), [(kv, chunk)]) for kv, chunk in self._points.prefills
        ]
        steps += [
            ("attn_decode", (batch, 0, kv), [(kv, 1)] * batch) for batch, kv in self._points.decodes
        ]
        for name, (batch, chunk, kv), rows in steps:
            taken = operators.time_attention(rows)
            key = self._key(tp, is_prefill=int(chunk > 0), batch_size=batch, prefill_chunk=chunk,
                            kv_cache=kv)  # fmt: skip
            # The cache is written by the rotary embedding: there is no reshape beside it.
            times = {"attn_prefill_ms": "", "attn_decode_ms": ""} | _in_columns(
                {name: taken.median, "attn_input_reshape": 0.0, "attn_output_reshape": 0.0}
            )
            self._add("attention", key | times | {"attn_ms_std": round(taken.deviation, DECIMALS)})

    def _measure_transfers(self, degrees: Sequence[int]) -> None:
        """Measure sums and transfers in host memory, where this host's ranks have their ends."""
        dtype = torch.float32
        hidden, tokens = self._model.model.hidden_size, self._points.tokens
        repeats = self._points.repeats
        for tp in degrees:
            times = time_all_reduce(tp, tokens, hidden, dtype, repeats)
            self._add_collective("all_reduce", tp, tp, times)
        self._add_collective("send_recv", 2, 2, time_send(tokens, hidden, dtype, repeats))

    def _add_collective(
        self, collective: str, num_workers: int, per_node: int, times: Mapping[int, list[float]]
    ) -> None:
        for tokens, repeats in times.items():
            # Two bytes per element, as in Vidur, whatever is transferred.
            size = 2 * self._model.model.hidden_size * tokens
            row = {
                "node": self._device,
                "collective": collective,
                "num_workers": num_workers,
                "devices_per_node": per_node,
                "bytes": size,
                "median_ms": round(median(repeats), DECIMALS),
                "mean_ms": round(fmean(repeats), DECIMALS),
            }
            self._add("collectives", row)

    def _shape_row(self) -> Row:
        spec = self._model.model
        layer = spec.layers[1]
        mlp = layer.mlp
        assert isinstance(mlp, MLPSpec), f"checked with {MLP.__name__}"
        return {
            "model": self._config.model,
            "num_layers": spec.num_layers,
            "num_q_heads": getattr(layer.attention, "num_heads", 0),
            "num_kv_heads": getattr(layer.attention, "num_kv_heads", 0),
            "embedding_dim": spec.hidden_size,
            "mlp_hidden_dim": mlp.intermediate_size,
            "vocab_size": spec.vocab_size,
            "use_gated_mlp": str(mlp.is_gated).lower(),
            "post_attn_norm": str(layer.mlp_norm is not None).lower(),
            "max_position_embeddings": self._points.max_tokens,
        }

    def _load(self, layers: range, tp: int) -> TimedSpan:
        points = self._points
        batch, longest = points.max_batch, points.max_tokens
        return TimedSpan(
            self._config, self._model, self._folder, layers, [[(longest - 1, 1)] * batch], tp
        )

    def _key(self, tp: int, **values: int) -> dict[str, Any]:
        return {"device": self._device, "model": self._config.model, "tp": tp, **values}

    def _add(self, name: str, row: Row) -> None:
        self._profile.tables[name].append(row)
        self._on_step()


def _in_columns(times: Mapping[str, float]) -> dict[str, Any]:
    """Return milliseconds by column."""
    return {f"{name}_ms": round(value, DECIMALS) for name, value in times.items()}


def count_table_rows(points: OperatorPoints, degrees: Sequence[int]) -> int:
    """Return the number of rows of all tables of a profile, for a progress bar.

    Args:
        points: sizes to measure.
        degrees: tensor parallel sizes.
    """
    per_shard = len(points.tokens) + len(points.rows) + len(points.prefills) + len(points.decodes)
    num_collectives = 1 + sum(tp > 1 for tp in degrees)
    return len(degrees) * per_shard + num_collectives * len(points.tokens) + 1
