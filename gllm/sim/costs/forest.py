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
from typing import NamedTuple

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, MeasuredRanges, TransferCost
from gllm.sim.costs.operator_grids import DecodeTable, HostTimeFit, PrefillTable, TokenTable
from gllm.sim.costs.operator_tables import VIDUR_TABLES, OperatorTables
from gllm.sim.costs.operators import (
    ATTENTION,
    HEAD,
    NORM,
    collective_samples,
    decode_samples,
    list_profiled_models,
    model_shape,
    prefill_samples,
    read_host_times,
    reshape_samples,
    token_samples,
)

BYTES_PER_ELEMENT = 2
MS = 1e-3
SUMS_PER_LAYER = 2
"""All-reduces of each layer: after attention and after the MLP."""
MATRICES = ("attn_pre_proj", "attn_post_proj", "mlp_up_proj", "mlp_down_proj")
"""Operators that multiply by weights."""
VIDUR_NODE = "a100_pairwise_nvlink"
VIDUR_KV_CELL = 64
"""Grid of long contexts in Vidur's table, in tokens: its last one, 4,032, stands for a cell, so
that all decodes of texts up to 4,096 tokens have a time."""
VIDUR_SOURCE = "Vidur's profile"
TOKENS, CHUNK, LENGTH = "num_tokens", "attn_prefill chunk", "attn_prefill kv + chunk"
DECODES, CONTEXT, ROWS = "attn_decode batch", "attn_decode mean kv", "host batch"


class ForestCostModel(CostModel):
    """Cost model that predicts each operator's time by a random forest fitted to Vidur's profiles.

    Vidur's tables cover micro-batches of up to 4,096 tokens and 128 sequences, of up to 4,096
    tokens each; a larger one raises CostRangeError. A prefill chunk below 64 tokens takes as long
    as the last 64 tokens of its sequence, a decode with less than 32 cached tokens as one with 32,
    and fewer than 8 sequences cost the host as much as 8; `num_below_range` counts them.

    Args:
        stages: Number of pipeline stages.
        tp: Tensor parallel size of each stage.
        layers: Number of layers of each stage; default: equal numbers.
        tables: Measured operator times; default: those of Vidur.
    """

    def __init__(
        self,
        stages: int = 1,
        *,
        tp: int = ATTENTION[2],
        layers: Sequence[int] | None = None,
        tables: OperatorTables = VIDUR_TABLES,
    ) -> None:
        """Tabulate all forests; fitting them takes seconds, once per cache.

        Args:
            stages: Number of stages.
            tp: Tensor parallel size of every stage.
            layers: Number of layers of each stage; default: as even as possible, the first stages
                larger.
            tables: The measurements.

        Raises:
            ValueError: Something was not profiled, or the layers do not add up.
            ModuleNotFoundError: A forest has to be fitted, and scikit-learn is missing.
        """
        device, model = _find_profile(tables, tp)
        self.model = model
        """Name of the model in the profile."""
        node = VIDUR_NODE if tables.is_vidur else device
        shape = model_shape(model, tables)
        self.layers = _split(shape["num_layers"], stages, layers)
        self._operators = _tabulate_operators(tables, device, model, tp)
        token_bytes = shape["embedding_dim"] * BYTES_PER_ELEMENT
        self._reduce: TokenTable | None = None
        if tp > 1:
            reduce = collective_samples(node, "all_reduce", tp, tp, tables)
            self._reduce = TokenTable.of(reduce, token_bytes)
        send = collective_samples(node, "send_recv", 2, 2, tables)
        self._send = TokenTable.of(send, token_bytes)
        self._prefill, self._decode = _attention_tables(tables, tp)
        rows = read_host_times(device, model, tables)
        self._prepare = HostTimeFit(rows, tp, ("prepare_inputs_ms",))
        self._sample = HostTimeFit(rows, tp, ("sampler_ms",))
        self._finish = HostTimeFit(rows, tp, ("sampler_ms", "process_outputs_ms"))
        by_tokens = [self._operators.layer, self._send, *filter(None, [self._reduce])]
        self._ranges = MeasuredRanges(
            {
                TOKENS: (
                    max(table.low for table in by_tokens), min(table.high for table in by_tokens)
                ),
                CHUNK: self._prefill.chunk_range,
                LENGTH: self._prefill.length_range,
                DECODES: self._decode.batch_range,
                CONTEXT: self._decode.kv_range,
                ROWS: self._prepare.range,
            },
            VIDUR_SOURCE if tables.is_vidur else "the operator profile",
        )  # fmt: skip

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the layers, the input preparation, the embedding and the LM head.

        Raises:
            CostRangeError: The micro-batch is above the measured range.
        """
        tokens = self._clamp_tokens(work)
        layer = self._operators.layer.at(tokens) + sum(self._attention_ms(work))
        if self._reduce is not None:
            layer += SUMS_PER_LAYER * self._reduce.at(tokens)
        total = self.layers[stage] * layer + self._prepare.at(self._clamp_rows(work))
        return (total + self._ends_ms(stage, tokens, work)) * MS

    def operator_seconds(self, stage: int, work: StageWork) -> dict[str, float]:
        """Return the parts of `stage_seconds` by class of operators."""
        tokens, layers = self._clamp_tokens(work), self.layers[stage]
        prefill, decode = self._attention_ms(work)
        collectives = 0.0 if self._reduce is None else SUMS_PER_LAYER * self._reduce.at(tokens)
        milliseconds = {
            **{name: layers * klass.at(tokens) for name, klass in self._operators.classes.items()},
            "attention_prefill": layers * prefill,
            "attention_decode": layers * decode,
            "collectives": layers * collectives,
            "embedding and head": self._ends_ms(stage, tokens, work),
            "host": self._prepare.at(self._clamp_rows(work)),
        }
        return {name: value * MS for name, value in milliseconds.items()}

    def _ends_ms(self, stage: int, tokens: int, work: StageWork) -> float:
        """Return the milliseconds of the embedding, and of the final norm or the LM head."""
        operators, total = self._operators, 0.0
        if stage == 0:
            total += operators.embedding.at(tokens)
        if stage == len(self.layers) - 1:
            if operators.head is None:
                return total + operators.norm.at(tokens)
            if work.num_sampled_rows:
                total += operators.head.at(min(work.num_sampled_rows, operators.head.high))
        return total

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

    def _attention_ms(self, work: StageWork) -> tuple[float, float]:
        """Return the milliseconds of one layer's attention of prefill and of decode."""
        prefill = decode = 0.0
        if work.prefill_chunks:
            for kv, length in combine_chunks(work.prefill_chunks, self._prefill.length_range[1]):
                prefill += self._prefill_ms(kv, length)
        if work.num_decodes:
            batch = int(self._ranges.clamp(DECODES, work.num_decodes))
            # The profile's kv is what was cached before; a decode's context counts its own token.
            mean = work.num_decode_context_tokens / work.num_decodes - 1
            decode = self._decode.at(batch, self._ranges.clamp(CONTEXT, mean))
        return prefill, decode

    def _prefill_ms(self, kv: float, chunk: float) -> float:
        """Return the milliseconds of one chunk; a small one counts as the end of a larger one."""
        measured = self._ranges.clamp(CHUNK, chunk)
        length = kv + chunk
        if length > measured:
            length = self._ranges.clamp(LENGTH, length)
        return self._prefill.at(max(0.0, length - measured), measured)


def merge_chunks(chunks: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """Return one prefill chunk whose attention takes about as long as that of several chunks.

    Its length is sqrt(sum length^2), as in Vidur. Its number of cached tokens kv is chosen to keep
    the number of query-key pairs: length * (kv + length / 2) is equal on both sides. A single chunk
    is returned unchanged.

    Args:
        chunks: (tokens cached before the chunk, tokens of the chunk) of each chunk.
    """
    length = math.sqrt(sum(tokens * tokens for _, tokens in chunks))
    return sum(kv * tokens for kv, tokens in chunks) / length, length


def combine_chunks(
    chunks: Sequence[tuple[int, int]], longest: float
) -> Iterator[tuple[float, float]]:
    """Group prefill chunks and yield for each group one chunk of about equal attention time.

    Vidur combines all chunks of a micro-batch into one, which can be longer than any measured
    sequence. Here they are combined only as long as the result is within the measured length.

    Args:
        chunks: (tokens cached before the chunk, tokens of the chunk) of each chunk.
        longest: Longest measured sequence in tokens: limit of cached tokens plus chunk.
    """
    group: list[tuple[int, int]] = []
    for chunk in chunks:
        if group and sum(merge_chunks([*group, chunk])) > longest:
            yield merge_chunks(group)
            group = []
        group.append(chunk)
    yield merge_chunks(group)


class TabulatedOperators(NamedTuple):
    """Times of all operators but attention, as lookup tables by number of tokens."""

    layer: TokenTable
    """All operators of one layer together."""
    classes: Mapping[str, TokenTable]
    """Operators of one layer, summed by class: matrices and elementwise."""
    embedding: TokenTable
    norm: TokenTable
    head: TokenTable | None
    """Final norm and LM head by number of sampled rows; None if not measured."""


@cache
def _tabulate_operators(
    tables: OperatorTables, device: str, model: str, tp: int
) -> TabulatedOperators:
    """Return the token-level operators of one shard."""
    samples = token_samples(device, model, tp, tables)
    by_name = {name: TokenTable.of(sample) for name, sample in samples.items()}
    norm, embedding = by_name[NORM], by_name.pop("emb")
    head = by_name.pop(HEAD, None)
    by_name["attn_reshape"] = TokenTable.of(reshape_samples(tables, tp))
    classes: dict[str, TokenTable] = {}
    for name, table in by_name.items():
        kind = "matrices" if name in MATRICES else "elementwise"
        # Two residuals per layer; the profile has the time of one.
        table = table.plus(table) if name == "add" else table
        classes[kind] = classes[kind].plus(table) if kind in classes else table
    layer = classes["matrices"].plus(classes["elementwise"])
    return TabulatedOperators(layer, classes, embedding, norm, head)


@cache
def _attention_tables(tables: OperatorTables, tp: int) -> tuple[PrefillTable, DecodeTable]:
    """Return the tables of prefill and decode attention of one shard."""
    cell = VIDUR_KV_CELL if tables.is_vidur else 1
    decode = DecodeTable(decode_samples(tables, tp), cell)
    return PrefillTable(prefill_samples(tables, tp)), decode


def _find_profile(tables: OperatorTables, tp: int) -> tuple[str, str]:
    """Return the first device and model of the profile.

    Raises:
        ValueError: Attention was not profiled for them at this tensor parallel size.
    """
    known = [ATTENTION] if tables.is_vidur else list_profiled_models(tables)
    if not known:
        raise ValueError(f"{tables.file_name('token_ops')} has no rows: measure it again")
    device, model, _ = known[0]
    if (device, model, tp) not in known:
        raise ValueError(
            f"attention was not profiled for {(device, model, tp)} (device, model, tp): choose "
            f"from {', '.join(map(str, known))}"
        )
    return device, model


def _split(total: int, stages: int, layers: Sequence[int] | None) -> list[int]:
    """Layers of each stage. ValueError unless each has one and they add up."""
    if layers is None:
        if not 1 <= stages <= total:
            raise ValueError(
                f"{total} layers cannot be cut into {stages} stages: every stage needs a layer"
            )
        layers = [total // stages + (stage < total % stages) for stage in range(stages)]
    if len(layers) != stages or sum(layers) != total or min(layers) < 1:
        raise ValueError(
            f"layers {','.join(map(str, layers))} on {stages} stages: every stage needs a layer, "
            f"and they have to add up to the model's {total}"
        )
    return list(layers)
