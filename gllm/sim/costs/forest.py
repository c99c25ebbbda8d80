"""A cost model made of operator profiles: one random forest per operator.

Owns how operators add up to a stage's time, and the tables that make a call cheap. Knows no policy,
no clock, and nothing of how an operator was measured: see `operators.py`.

Source: "Vidur", MLSys'24, arXiv 2405.05465. Left out, because nobody measured it: the LM head (so
does Vidur), the all-reduce after an embedding that is split by vocabulary, the write of keys and
values into the cache itself (its reshapes are in), and the trip of a token back to the driver.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Self

import numpy as np

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import BaseCostModel, TransferCost
from gllm.sim.costs.operators import (
    ATTENTION,
    NORM,
    OperatorForest,
    OperatorSamples,
    collective_samples,
    decode_samples,
    host_rows,
    model_shape,
    out_of_range,
    prefill_samples,
    reshape_samples,
    token_samples,
)

STEP = 16
"""Grid of kv and chunk in tokens. The profiles' own grid is 16 to 64 wide, and a forest is constant
between neighbours of it, so a finer grid would hardly say more."""
BYTES_PER_ELEMENT = 2
MS = 1e-3


class ForestCostModel(BaseCostModel):
    """Cost of a pipeline whose stages are `tp` GPUs each; fp16.

    A call raises ValueError where the micro-batch lies outside of the profiles: 1 to 4,096 tokens,
    a prefill chunk (or what several come to) of 64 to 4,096 tokens with no more than 4,096 together
    with its kv, 1 to 128 decodes, a mean kv of 32 to 4,032.
    """

    def __init__(
        self,
        stages: int = 1,
        *,
        device: str = ATTENTION[0],
        model: str = ATTENTION[1],
        tp: int = ATTENTION[2],
        node: str = "a100_pairwise_nvlink",
        across_nodes: bool = False,
        layers: Sequence[int] | None = None,
    ) -> None:
        """Fit and tabulate all forests; takes seconds for the first pipeline of a process.

        node: the measured interconnect. across_nodes: stages are linked over the network.
        layers: layers of each stage; as even as can be, the first stages larger, by default.
        Raises ValueError for what was not profiled and for layers that do not add up,
        ModuleNotFoundError without scikit-learn.
        """
        if (device, model, tp) != ATTENTION:
            raise ValueError(
                f"attention was not profiled for {(device, model, tp)} (device, model, tp): "
                f"choose {ATTENTION}, the only one that was"
            )
        shape = model_shape(model)
        self.layers = _split(shape["num_layers"], stages, layers)
        self._norms, self._embedding, self._layer = _token_tables(device, model, tp)
        token_bytes = shape["embedding_dim"] * BYTES_PER_ELEMENT
        if tp > 1:
            reduce = _ByTokens.of(collective_samples(node, "all_reduce", tp, tp), token_bytes)
            self._layer = self._layer.plus(reduce, 2)
        per_node = 1 if across_nodes else 2
        self._send = _ByTokens.of(collective_samples(node, "send_recv", 2, per_node), token_bytes)
        self._prefill, self._decode = _attention_tables()
        self._prepare = _HostLine(device, model, tp, ("prepare_inputs_ms",))
        self._sample = _HostLine(device, model, tp, ("sampler_ms",))
        self._finish = _HostLine(device, model, tp, ("sampler_ms", "process_outputs_ms"))

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Layers of the stage, its inputs' preparation on the host, embedding and final norm."""
        tokens = work.num_tokens
        layer = self._layer.at(tokens)
        if work.prefill_chunks:
            layer += self._prefill.at(*aggregate(work.prefill_chunks))
        if work.num_decodes:
            # The profile's kv is what was cached before; a decode's context counts its own token.
            layer += self._decode.at(
                work.num_decodes, work.num_decode_context_tokens / work.num_decodes - 1
            )
        total = self.layers[stage] * layer + self._prepare.at(work)
        if stage == 0:
            total += self._embedding.at(tokens)
        if stage == len(self.layers) - 1:
            total += self._norms.at(tokens)
        return total * MS

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the time of one hidden state per token row; all links are equal."""
        return TransferCost(self._send.at(work.num_tokens) * MS)

    def sample_seconds(self, work: StageWork) -> float:
        """Return the predicted time of sampling."""
        return self._sample.at(work) * MS

    def return_seconds(self, work: StageWork) -> float:
        """Return the predicted time of sampling and of handling its output.

        The transfer to the driver is not included: the profile contains a Ray call (6 ms and more),
        which gllm does not use.
        """
        return self._finish.at(work) * MS


def aggregate(chunks: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return one equivalent chunk (kv, length) for several chunks of (kv, length).

    Its length is sqrt(sum length^2), as in Vidur. Its kv keeps the number of query-key pairs:
    length * (kv + length / 2) is equal on both sides. A single chunk is returned unchanged.
    """
    length = math.sqrt(sum(tokens * tokens for _, tokens in chunks))
    return sum(kv * tokens for kv, tokens in chunks) / length, length


class _ByTokens:
    """Milliseconds for each number of tokens from `low`."""

    def __init__(self, operator: str, low: int, times: Sequence[float]) -> None:
        self.operator = operator
        self.low = low
        self.high = low + len(times) - 1
        self._times = list(times)

    @classmethod
    def of(cls, samples: OperatorSamples, unit: int = 1) -> Self:
        """Tabulated from a forest of one feature, of which a token has `unit`."""
        forest = OperatorForest(samples)
        ((low, high),) = forest.ranges.values()
        tokens = np.arange(math.ceil(low / unit), high // unit + 1)
        times = forest.predict(tokens[:, None] * unit)
        return cls(samples.operator, int(tokens[0]), times.tolist())

    def plus(self, other: "_ByTokens", times: int = 1) -> "_ByTokens":
        """Return the sum of this table and `times` another, for token counts in both."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        both = [self.at(n) + times * other.at(n) for n in range(low, high + 1)]
        limiting = self if self.high <= other.high else other
        return _ByTokens(limiting.operator, low, both)

    def at(self, tokens: int) -> float:
        """Milliseconds. ValueError out of range."""
        if not self.low <= tokens <= self.high:
            raise out_of_range(self.operator, "num_tokens", tokens, self.low, self.high)
        return self._times[tokens - self.low]


@cache
def _token_tables(device: str, model: str, tp: int) -> tuple[_ByTokens, _ByTokens, _ByTokens]:
    """Return the time of the norm, the embedding and the token-wise operations of a layer."""
    tables = {
        name: _ByTokens.of(samples) for name, samples in token_samples(device, model, tp).items()
    }
    norm, embedding = tables[NORM], tables.pop("emb")
    # Two residuals a layer; the profile has the time of one.
    layer = tables["add"]
    for table in tables.values():
        layer = layer.plus(table)
    return norm, embedding, layer.plus(_ByTokens.of(reshape_samples()))


class _PrefillTable:
    """Milliseconds of a layer's prefill attention by (kv, chunk), on a grid."""

    def __init__(self, forest: OperatorForest) -> None:
        self.operator = forest.operator
        self.ranges = forest.ranges
        self._low = int(self.ranges["chunk"][0])
        most = int(self.ranges["kv + chunk"][1])
        lengths = range(self._low, int(self.ranges["chunk"][1]) + 1, STEP)
        grid = [(kv, chunk**2) for chunk in lengths for kv in range(0, most - chunk + 1, STEP)]
        times = iter(forest.predict(np.array(grid, np.float64)).tolist())
        self._rows = [[next(times) for _ in range(0, most - c + 1, STEP)] for c in lengths]

    def at(self, kv: float, chunk: float) -> float:
        """Milliseconds of the nearest cell. ValueError out of range."""
        values = {"kv": kv, "chunk": chunk, "kv + chunk": kv + chunk}
        for name, value in values.items():
            low, high = self.ranges[name]
            if not low <= value <= high:
                raise out_of_range(self.operator, name, value, low, high)
        row = self._rows[round((chunk - self._low) / STEP)]
        # Rounding both up can step over the longest sequence, by one cell.
        return row[min(round(kv / STEP), len(row) - 1)]


class _DecodeTable:
    """Milliseconds of a layer's decode attention by (batch, mean kv), on a grid."""

    def __init__(self, forest: OperatorForest) -> None:
        self.operator = forest.operator
        self._batch = tuple(map(int, forest.ranges["batch"]))
        self._kv = tuple(map(int, forest.ranges["mean kv"]))
        contexts = range(self._kv[0], self._kv[1] + 1, STEP)
        batches = range(self._batch[0], self._batch[1] + 1)
        grid = np.array([(batch, kv) for batch in batches for kv in contexts], np.float64)
        self._rows = forest.predict(grid).reshape(len(batches), len(contexts)).tolist()

    def at(self, batch: int, kv: float) -> float:
        """Milliseconds of the nearest cell. ValueError out of range."""
        if not self._batch[0] <= batch <= self._batch[1]:
            raise out_of_range(self.operator, "batch", batch, *self._batch)
        if not self._kv[0] <= kv <= self._kv[1]:
            raise out_of_range(self.operator, "mean kv", kv, *self._kv)
        return self._rows[batch - self._batch[0]][round((kv - self._kv[0]) / STEP)]


@cache
def _attention_tables() -> tuple[_PrefillTable, _DecodeTable]:
    """Return the tables of prefill and decode attention, which were profiled for one model."""
    return _PrefillTable(OperatorForest(prefill_samples())), _DecodeTable(
        OperatorForest(decode_samples())
    )


class _HostLine:
    """Milliseconds of host work, a straight line in the rows of a micro-batch.

    Rows were measured in eights, so that a forest could say nothing of one to seven; host work is
    a constant plus so much a row. Where the tensor parallel size is missing the nearest one stands
    in, since every worker prepares all rows whatever its share of the model.
    """

    def __init__(self, device: str, model: str, tp: int, columns: Sequence[str]) -> None:
        rows = host_rows(device, model)
        nearest = min((row["tp"] for row in rows), key=lambda other: (abs(other - tp), other))
        rows = [row for row in rows if row["tp"] == nearest]
        batches = [row["batch_size"] for row in rows]
        times = [sum(row[column] for column in columns) for row in rows]
        slope, start = np.polyfit(batches, times, 1)
        self.operator = " + ".join(column.removesuffix("_ms") for column in columns)
        self._slope, self._start = float(slope), float(start)
        self._least, self._most = min(batches), max(batches)

    def at(self, work: StageWork) -> float:
        """Milliseconds. ValueError beyond the largest batch that was measured."""
        rows = work.num_decodes + len(work.prefill_chunks)
        if rows > self._most:
            raise out_of_range(self.operator, "batch", rows, self._least, self._most)
        return self._start + self._slope * rows


def _split(total: int, stages: int, layers: Sequence[int] | None) -> list[int]:
    """Layers of each stage. ValueError unless each has one and they add up."""
    if layers is None and 1 <= stages <= total:
        layers = [total // stages + (stage < total % stages) for stage in range(stages)]
    if layers is None or len(layers) != stages or sum(layers) != total or min(layers) < 1:
        raise ValueError(
            f"stages is {stages} and layers {layers}: every stage needs a layer, and they have to "
            f"add up to the model's {total}"
        )
    return list(layers)
