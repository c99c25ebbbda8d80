"""Rows of paged attention: decodes, prefill chunks and both, against fp64, SDPA and flash-attn."""

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.operations import TOLERANCES, Operation, Rival, measure, relative_error
from benchmarks.gpu.place import Place
from benchmarks.gpu.rows import Measured, PendingRow, SkipRowError
from gllm.kernels.attention import paged_attention
from gllm.kernels.attention_plan import AttentionPlan, PagedBatch, plan_attention
from gllm.kernels.attention_scaling import AttentionScaling

FP8 = torch.float8_e4m3fn
BLOCK_SIZE = 16
NUM_CHECKED_ROWS = 4
"""Number of rows of a micro-batch that are compared with the reference."""


class Heads(NamedTuple):
    """Head counts and size of a model's attention."""

    model: str
    heads: int
    kv_heads: int
    dim: int


QWEN, LLAMA = Heads("Qwen2.5-7B", 28, 4, 128), Heads("Llama-3.1-8B", 32, 8, 128)
TINY = Heads("tiny", 4, 2, 16)


@dataclass(frozen=True)
class Case:
    """A micro-batch and its KV cache."""

    heads: Heads
    decodes: int
    context: int
    """Context length of each decode."""
    chunk: int = 0
    """Tokens of a prefill chunk; 0 for none."""
    cached: int = 0
    """Tokens of its prompt that are already in the cache."""
    fp8: bool = False
    """The cache is in FP8."""

    @property
    def name(self) -> str:
        """Name of the row."""
        parts = []
        if self.decodes:
            parts.append(f"batch {self.decodes}, context {self.context}")
        if self.chunk:
            parts.append(f"chunk {self.chunk} behind {self.cached}")
        kind = "mixed" if len(parts) == 2 else "decode" if self.decodes else "prefill"
        cache = ", fp8 cache" if self.fp8 else ""
        return f"{kind} attention, {self.heads.model}, {', '.join(parts)}{cache}"

    @property
    def pairs(self) -> int:
        """Number of query-key pairs within the causal mask."""
        chunk = self.chunk * self.cached + self.chunk * (self.chunk + 1) // 2
        return self.decodes * self.context + chunk

    @property
    def tokens(self) -> int:
        """Number of tokens in the micro-batch."""
        return self.decodes + self.chunk

    @property
    def flops(self) -> int:
        """FLOPs of both products; a multiplication and an addition count as two."""
        return 4 * self.heads.heads * self.heads.dim * self.pairs

    @property
    def num_bytes(self) -> int:
        """Bytes to move: the cache read once, queries read, results written."""
        _, heads, kv_heads, dim = self.heads
        cached = self.decodes * self.context + (self.cached + self.chunk if self.chunk else 0)
        cache = 2 * cached * kv_heads * dim * (1 if self.fp8 else 2)
        return cache + 2 * self.tokens * heads * dim * 2


class Inputs(NamedTuple):
    """Inputs of one call."""

    query: Tensor
    """Shape [tokens, heads, dim]."""
    keys: Tensor
    """Shape [blocks, block_size, kv_heads, dim]."""
    values: Tensor
    plan: AttentionPlan


def cases(is_dry: bool) -> list[Case]:
    """Return the cases; those with a target come first."""
    if is_dry:
        decodes = [Case(TINY, 2, 33), Case(TINY, 2, 20, fp8=True)]
        return [*decodes, Case(TINY, 0, 0, 24, 0), Case(TINY, 0, 0, 8, 24), Case(TINY, 2, 20, 8)]
    both = (QWEN, LLAMA)
    decodes = [
        Case(heads, batch, context)
        for batch in (64, 256, 8, 1)
        for context in (2048, 8192, 512)
        for heads in both
    ]
    prefill = [
        Case(heads, 0, 0, chunk, cached)
        for chunk in (2048, 512)
        for cached in (0, 6144)
        for heads in both
    ]
    mixed = [Case(heads, 64, 2048, 512) for heads in both]
    fp8 = [Case(heads, batch, 2048, fp8=True) for batch in (64, 256, 1) for heads in both]
    return [*prefill, *decodes[:4], *mixed, *fp8, *decodes[4:]]


def rows(place: Place) -> Iterator[PendingRow]:
    """Yield one row per case."""
    for case in cases(place.is_dry):
        yield PendingRow(case.name, partial(row, place, case))


def row(place: Place, case: Case) -> Measured:
    """Measure a case."""
    if case.fp8 and place.capability() < (8, 9):
        raise SkipRowError("8-bit floats need sm_89 or later")
    place.seed(case.name)
    aims = {}
    if not case.chunk and case.decodes >= 64 and case.context >= 2048:
        aims["copy_share"] = 0.85
    if not case.decodes and case.chunk == 2048:
        aims["matrix_share"] = 0.6
    operation = Operation(
        make=partial(inputs_of, place, case),
        run=partial(attend, place, case),
        error=partial(error_of, place, case),
        tolerance=TOLERANCES[place.dtype],
        num_bytes=case.num_bytes,
        flops=case.flops,
        rivals=rivals_of(place, case),
        aims=aims,
    )
    return measure(place, operation)


def paged_rows(case: Case) -> PagedBatch:
    """Return the rows of a case, with blocks scattered over the cache."""
    counts = [1] * case.decodes + [case.chunk] * bool(case.chunk)
    contexts = [case.context] * case.decodes + [case.cached + case.chunk] * bool(case.chunk)
    needed = [-(-context // BLOCK_SIZE) for context in contexts]
    scattered = np.random.default_rng(0).permutation(sum(needed))
    table = np.zeros((len(needed), max(needed)), dtype=np.int64)
    begin = 0
    for index, count in enumerate(needed):
        table[index, :count] = scattered[begin : begin + count]
        begin += count
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
    context_len = np.array(contexts, dtype=np.int64)
    return PagedBatch(table, starts, context_len, case.decodes, BLOCK_SIZE, sum(needed))


def inputs_of(place: Place, case: Case) -> Inputs:
    """Create queries and a cache of normal numbers."""
    _, heads, kv_heads, dim = case.heads
    paged = paged_rows(case)
    shape = paged.num_blocks + 1, BLOCK_SIZE, kv_heads, dim
    keys, values = (_normal(place, *shape) for _ in range(2))
    if case.fp8:
        keys, values = keys.to(FP8), values.to(FP8)
    plan = plan_attention(paged, place.dtype, None, place.device)
    return Inputs(_normal(place, case.tokens, heads, dim), keys, values, plan)


def attend(place: Place, case: Case, inputs: Inputs) -> Tensor:
    """Run gllm's attention; return a tensor of shape [tokens, heads, dim]."""
    query, keys, values, plan = inputs
    if place.is_dry and case.fp8:
        # torch cannot gather from 8-bit floats, which the reference needs.
        keys, values = keys.to(query.dtype), values.to(query.dtype)
    return paged_attention(query, keys, values, plan, AttentionScaling(case.heads.dim**-0.5))


def error_of(place: Place, case: Case, inputs: Inputs) -> float:
    """Return the largest error over some rows spread over the micro-batch, the last included."""
    got = attend(place, case, inputs)
    paged = inputs.plan.rows
    last = len(paged.context_len) - 1
    chosen = sorted({last * index // (NUM_CHECKED_ROWS - 1) for index in range(NUM_CHECKED_ROWS)})
    worst = 0.0
    for index in chosen:
        begin, end = (int(at) for at in paged.query_start[index : index + 2])
        expected = reference(inputs, index, case.heads)
        worst = max(worst, relative_error(got[begin:end], expected))
    return worst


def reference(inputs: Inputs, index: int, heads: Heads) -> Tensor:
    """Compute causal attention of one row of the micro-batch in float64.

    Returns:
        Shape [tokens, heads, dim].
    """
    query, keys, values, plan = inputs
    begin, end = (int(at) for at in plan.rows.query_start[index : index + 2])
    tokens, context = end - begin, int(plan.rows.context_len[index])
    slots = torch.from_numpy(plan.rows.slots(index, 0, int(plan.rows.context_len[index]))).to(
        query.device
    )
    key, value = _gather(keys, slots), _gather(values, slots)
    rows = query[begin:end].to(torch.float64).unflatten(1, (heads.kv_heads, -1))
    places = torch.arange(context, device=query.device)
    hidden = places > places[context - tokens :, None]
    output = torch.empty_like(rows)
    for head in range(heads.kv_heads):
        scores = torch.einsum("tgd,cd->gtc", rows[:, head], key[:, head]) * heads.dim**-0.5
        shares = scores.masked_fill_(hidden, float("-inf")).softmax(dim=-1)
        output[:, head] = torch.einsum("gtc,cd->tgd", shares, value[:, head])
    return output.flatten(1, 2)


def _gather(cache: Tensor, slots: Tensor) -> Tensor:
    """Return slots of the cache, of shape [slots, kv_heads, dim] and type float64."""
    flat = cache.flatten(0, 1)
    if cache.dtype == FP8:
        return flat.view(torch.uint8)[slots].view(FP8).to(torch.float64)
    return flat[slots].to(torch.float64)


def _normal(place: Place, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=place.dtype, device=place.device)


def rivals_of(place: Place, case: Case) -> dict[str, Rival]:
    """Return the rivals on contiguous keys and values in bfloat16; none for mixed cases."""
    if case.decodes and case.chunk:
        return {}
    rivals = {"sdpa_ms": Rival(partial(_dense, place, case, True), partial(_sdpa, case))}
    try:
        flash: Any = importlib.import_module("flash_attn")
    except ImportError:
        return rivals
    run = partial(_flash, flash)
    return rivals | {"flash_attn_ms": Rival(partial(_dense, place, case, False), run)}


def _dense(place: Place, case: Case, for_sdpa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Create inputs of shape [batch, heads, tokens, dim]; flash-attn has tokens before heads."""
    _, heads, kv_heads, dim = case.heads
    batch, tokens = (case.decodes, 1) if case.decodes else (1, case.chunk)
    context = case.context if case.decodes else case.cached + case.chunk
    order = (0, 1, 2, 3) if for_sdpa else (0, 2, 1, 3)

    def create(count: int, length: int) -> Tensor:
        shape = batch, count, length, dim
        return _normal(place, *(shape[axis] for axis in order))

    query, key, value = create(heads, tokens), create(kv_heads, context), create(kv_heads, context)
    if for_sdpa and case.cached:
        # SDPA does not group heads with this mask; repeating them here keeps it out of the timing.
        group = heads // kv_heads
        key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    return query, key, value


def _sdpa(case: Case, dense: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    if case.chunk and case.cached:
        from torch.nn.attention.bias import causal_lower_right

        mask: Any = causal_lower_right(case.chunk, case.cached + case.chunk)
        return scaled_dot_product_attention(*dense, attn_mask=mask)
    return scaled_dot_product_attention(*dense, is_causal=bool(case.chunk), enable_gqa=True)


def _flash(flash: Any, dense: tuple[Tensor, Tensor, Tensor]) -> Any:
    query, key, value = dense
    if query.shape[1] == 1:
        return flash.flash_attn_with_kvcache(query, key, value, causal=True)
    return flash.flash_attn_func(query, key, value, causal=True)
