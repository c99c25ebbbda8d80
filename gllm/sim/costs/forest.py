"""Cost model made of operator profiles: one random forest per operator.

It adds the times of operators up to a stage's time; `operators.py` reads the measurements.

Source: "Vidur", MLSys'24, arXiv 2405.05465. Vidur's tables lack, so that predictions from them lack
too: the LM head (so does Vidur), the all-reduce after an embedding that is split by vocabulary, the
write of keys and values into the cache itself (its reshapes are in), and the way of a token back to
the driver. Profiles of `gllm profile --operators` have the LM head.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cache

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import BaseCostModel, TransferCost
from gllm.sim.costs.operator_grids import DecodeTable, HostLine, PrefillTable, TokenTable
from gllm.sim.costs.operators import (
    ATTENTION,
    NORM,
    collective_samples,
    decode_samples,
    host_rows,
    model_shape,
    prefill_samples,
    reshape_samples,
    token_samples,
)
from gllm.sim.costs.ranges import MeasuredRanges

BYTES_PER_ELEMENT = 2
MS = 1e-3
SUMS_PER_LAYER = 2
"""All-reduces of each layer: after attention and after the MLP."""
VIDUR_SOURCE = "Vidur's profile"
TOKENS, CHUNK, LENGTH = "num_tokens", "attn_prefill chunk", "attn_prefill kv + chunk"
DECODES, CONTEXT, ROWS = "attn_decode batch", "attn_decode mean kv", "host batch"


class ForestCostModel(BaseCostModel):
    """Cost of a pipeline whose stages are `tp` GPUs each; fp16.

    Vidur's tables hold for micro-batches of up to 4,096 tokens and 128 rows, of sequences of up to
    4,096 tokens. A call raises CostRangeError for more. A prefill chunk below 64 tokens costs as
    much as the last 64 tokens of its sequence, a decode with less than 32 cached tokens as one with
    32, and fewer than 8 rows cost the host as much as 8; `num_below_range` counts them.
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
        """Tabulate all forests; fitting them takes seconds, once per cache.

        Args:
            stages: Number of stages.
            device: Device of the profile.
            model: Model of the profile.
            tp: Tensor parallel size of every stage.
            node: The measured interconnect.
            across_nodes: True if stages are linked over the network.
            layers: Number of layers of each stage; default: as even as possible, the first stages
                larger.

        Raises:
            ValueError: Something was not profiled, or the layers do not add up.
            ModuleNotFoundError: A forest has to be fitted, and scikit-learn is missing.
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
            reduce = TokenTable.of(collective_samples(node, "all_reduce", tp, tp), token_bytes)
            self._layer = self._layer.plus(reduce, SUMS_PER_LAYER)
        per_node = 1 if across_nodes else 2
        self._send = TokenTable.of(collective_samples(node, "send_recv", 2, per_node), token_bytes)
        self._prefill, self._decode = _attention_tables()
        rows = host_rows(device, model)
        self._prepare = HostLine(rows, tp, ("prepare_inputs_ms",))
        self._sample = HostLine(rows, tp, ("sampler_ms",))
        self._finish = HostLine(rows, tp, ("sampler_ms", "process_outputs_ms"))
        high = min(self._layer.high, self._send.high)
        self._ranges = MeasuredRanges(
            {
                TOKENS: (max(self._layer.low, self._send.low), high),
                CHUNK: self._prefill.chunk_range,
                LENGTH: self._prefill.length_range,
                DECODES: self._decode.batch_range,
                CONTEXT: self._decode.kv_range,
                ROWS: self._prepare.range,
            },
            VIDUR_SOURCE,
        )

    @property
    def ranges(self) -> Mapping[str, tuple[float, float]]:
        """Return the measured range of each quantity, in tokens or rows."""
        return self._ranges.ranges

    @property
    def num_below_range(self) -> Mapping[str, int]:
        """Return the number of predictions below each range."""
        return self._ranges.num_below

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the stage's layers, of its inputs on the host and of the ends.

        Raises:
            CostRangeError: The micro-batch is above the measured range.
        """
        tokens = self._clamp_tokens(work)
        layer = self._layer.at(tokens) + self._attention_ms(work)
        total = self.layers[stage] * layer + self._prepare.at(self._clamp_rows(work))
        if stage == 0:
            total += self._embedding.at(tokens)
        if stage == len(self.layers) - 1:
            total += self._norms.at(tokens)
        return total * MS

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the time of one hidden state per token row; all links are equal."""
        return TransferCost(self._send.at(self._clamp_tokens(work)) * MS)

    def sample_seconds(self, work: StageWork) -> float:
        """Return the predicted time of sampling."""
        return self._sample.at(self._clamp_rows(work)) * MS

    def return_seconds(self, work: StageWork) -> float:
        """Return the predicted time of sampling and of handling its output.

        The transfer to the driver is not included: the profile contains a Ray call (6 ms and more),
        which gllm does not use.
        """
        return self._finish.at(self._clamp_rows(work)) * MS

    def _clamp_tokens(self, work: StageWork) -> int:
        return int(self._ranges.clamp(TOKENS, work.num_tokens))

    def _clamp_rows(self, work: StageWork) -> float:
        return self._ranges.clamp(ROWS, work.num_decodes + len(work.prefill_chunks))

    def _attention_ms(self, work: StageWork) -> float:
        """Return the milliseconds of one layer's attention."""
        total = 0.0
        if work.prefill_chunks:
            for kv, length in combine_chunks(work.prefill_chunks, self._prefill.length_range[1]):
                total += self._prefill_ms(kv, length)
        if work.num_decodes:
            batch = int(self._ranges.clamp(DECODES, work.num_decodes))
            # The profile's kv is what was cached before; a decode's context counts its own token.
            mean = work.num_decode_context_tokens / work.num_decodes - 1
            total += self._decode.at(batch, self._ranges.clamp(CONTEXT, mean))
        return total

    def _prefill_ms(self, kv: float, chunk: float) -> float:
        """Return the milliseconds of one chunk; a small one counts as the end of a larger one."""
        measured = self._ranges.clamp(CHUNK, chunk)
        length = kv + chunk
        if length > measured:
            length = self._ranges.clamp(LENGTH, length)
        return self._prefill.at(max(0.0, length - measured), measured)


def aggregate(chunks: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return one equivalent chunk (kv, length) for several chunks of (kv, length).

    Its length is sqrt(sum length^2), as in Vidur. Its kv keeps the number of query-key pairs:
    length * (kv + length / 2) is equal on both sides. A single chunk is returned unchanged.
    """
    length = math.sqrt(sum(tokens * tokens for _, tokens in chunks))
    return sum(kv * tokens for kv, tokens in chunks) / length, length


def combine_chunks(
    chunks: Sequence[tuple[int, int]], longest: float
) -> Iterator[tuple[float, float]]:
    """Return equivalent chunks (kv, length) of several chunks, each no longer than measured.

    Vidur combines all chunks of a micro-batch into one. Several chunks late in their sequences
    would be equivalent to a chunk of a longer sequence than any of them: they are combined only as
    far as kv + length stays within `longest` tokens.
    """
    group: list[tuple[int, int]] = []
    for chunk in chunks:
        if group and sum(aggregate([*group, chunk])) > longest:
            yield aggregate(group)
            group = []
        group.append(chunk)
    yield aggregate(group)


@cache
def _token_tables(device: str, model: str, tp: int) -> tuple[TokenTable, TokenTable, TokenTable]:
    """Return the time of the norm, the embedding and the token-wise operations of a layer."""
    tables = {
        name: TokenTable.of(samples) for name, samples in token_samples(device, model, tp).items()
    }
    norm, embedding = tables[NORM], tables.pop("emb")
    # Two residuals a layer; the profile has the time of one.
    layer = tables["add"]
    for table in tables.values():
        layer = layer.plus(table)
    return norm, embedding, layer.plus(TokenTable.of(reshape_samples()))


@cache
def _attention_tables() -> tuple[PrefillTable, DecodeTable]:
    """Return the tables of prefill and decode attention, which were profiled for one model."""
    return PrefillTable(prefill_samples()), DecodeTable(decode_samples())


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
