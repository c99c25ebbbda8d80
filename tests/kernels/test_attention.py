"""Paged attention against a dense reference; ALiBi slopes; numbers of a KV cache in FP8."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels import attention_plan
from gllm.kernels.alibi import compute_alibi_slopes
from gllm.kernels.attention import paged_attention, store_kv
from gllm.kernels.attention_plan import PagedBatch, plan_attention
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.attention_window import AttentionChunk, AttentionWindow
from gllm.kernels.fp8_cache import select_converted
from gllm.kernels.int8_cache import dequantize_entries, quantize_entries
from gllm.kernels.native.library import DTYPES
from tests.support.examples import num_examples
from tests.support.models.kernel_builds import covers_builds

PUBLISHED: dict[int, list[float]] = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    # The paper's example.
    8: [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256],
    # Those of 8 heads, then every other one of 16, whose first is the root of a half.
    12: [2.0**-k for k in range(1, 9)] + [2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}

PLAIN = AttentionScaling(0.25)


def dense(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    kind: AttentionScaling = PLAIN,
    window: AttentionWindow = None,
) -> Tensor:
    """The last rows of causal attention: query [n, heads, dim], keys and values [c, kv, dim]."""
    count, heads, _ = query.shape
    context, kv_heads, _ = keys.shape
    keys = keys.repeat_interleave(heads // kv_heads, dim=1)
    values = values.repeat_interleave(heads // kv_heads, dim=1)
    scores = torch.einsum("qhd,chd->hqc", query, keys) * kind.scale
    if kind.softcap is not None:
        scores = kind.softcap * (scores / kind.softcap).tanh()
    distance = torch.arange(context - count, context)[:, None] - torch.arange(context)
    if kind.alibi_slopes is not None:
        scores = scores - kind.alibi_slopes[:, None, None] * distance
    positions = torch.arange(context - count, context)
    if isinstance(window, AttentionChunk):
        oldest = positions // window.size * window.size
    else:
        assert window is None or isinstance(window, int)
        oldest = positions + 1 - (window or context)
    hidden = (distance < 0) | (torch.arange(context) < oldest[:, None])
    scores = scores.masked_fill(hidden, -math.inf)
    if kind.sinks is not None:
        sinks = kind.sinks[:, None, None].expand(-1, count, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.einsum("hqc,chd->qhd", weights, values)


def stored(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Numbers as a cache of a dtype has them."""
    return quantize_entries(numbers) if dtype == torch.int8 else numbers.to(dtype)


def read(cache: Tensor) -> Tensor:
    """The numbers of a cache."""
    if cache.dtype == torch.int8:
        return dequantize_entries(cache, torch.float32)
    return cache.float()


def check(
    contexts: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int, int],
    seed: int,
    kind: AttentionScaling = PLAIN,
    window: AttentionWindow = None,
    dtype: torch.dtype = torch.float32,
    cached: torch.dtype | None = None,
) -> None:
    """Rows of (cached tokens, new tokens), decodes first, through a cache full of NaN elsewhere;
    `cached`: its type, where it is not dtype."""
    kept = cached or dtype
    kv_heads, group, head_dim = shape
    generator = torch.Generator().manual_seed(seed)
    totals = [before + new for before, new in contexts]
    counts = [-(-total // block_size) for total in totals]
    num_blocks = sum(counts) + 1
    shuffled = torch.randperm(num_blocks, generator=generator).tolist()
    caches = [torch.full((num_blocks + 1, block_size, kv_heads, head_dim), math.nan) for _ in "kv"]
    table = np.zeros((len(contexts), max(counts)), dtype=np.int64)
    keys, values, queries, wanted = [], [], [], []
    for row, ((_, new), total) in enumerate(zip(contexts, totals, strict=True)):
        blocks = [shuffled.pop() for _ in range(counts[row])]
        table[row, : len(blocks)] = blocks
        pair = [torch.randn(total, kv_heads, head_dim, generator=generator) for _ in "kv"]
        if cached is not None:
            pair = [read(stored(tokens, cached)) for tokens in pair]
        before = torch.arange(total - new)
        slots = torch.tensor(blocks)[before // block_size] * block_size + before % block_size
        for cache, tokens in zip(caches, pair, strict=True):
            cache[-1] = 0
            cache.flatten(0, 1)[slots] = tokens[: total - new]
        query = torch.randn(new, kv_heads * group, head_dim, generator=generator)
        keys.append(pair[0][-new:])
        values.append(pair[1][-new:])
        queries.append(query)
        wanted.append(dense(query, pair[0], pair[1], kind, window))
    starts = np.cumsum([0] + [new for _, new in contexts])
    decodes = next((i for i, (_, new) in enumerate(contexts) if new > 1), len(contexts))
    lengths = np.array(totals)
    rows = PagedBatch(table, starts, lengths, decodes, block_size, num_blocks)
    plan = plan_attention(rows, dtype, window)
    key_cache, value_cache = (stored(cache, kept) for cache in caches)
    key, value = torch.cat(keys).to(dtype), torch.cat(values).to(dtype)
    store_kv(key, value, key_cache, value_cache, plan.slots)
    actual = paged_attention(torch.cat(queries).to(dtype), key_cache, value_cache, plan, kind)
    limit = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(actual.float(), torch.cat(wanted), rtol=limit, atol=limit)


kinds = st.sampled_from(["plain", "softcap", "alibi", "sinks"])
shapes = st.tuples(st.integers(1, 3), st.integers(1, 4), st.sampled_from([2, 6, 16, 80]))
decode_rows = st.lists(st.tuples(st.integers(0, 40), st.just(1)), max_size=6)
chunk_rows = st.lists(st.tuples(st.integers(0, 30), st.integers(2, 25)), max_size=3)


@settings(max_examples=num_examples(35, 1000), deadline=None)
@given(
    decode_rows,
    chunk_rows,
    st.integers(1, 9),
    shapes,
    st.integers(0, 2**31),
    kinds,
    st.none() | st.integers(1, 50) | st.integers(1, 50).map(AttentionChunk),
    st.sampled_from([*DTYPES]),
)
def test_matches_dense_attention(
    way: str,
    decodes: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    block_size: int,
    shape: tuple[int, int, int],
    seed: int,
    kind: str,
    window: AttentionWindow,
    dtype: torch.dtype,
) -> None:
    slopes = torch.rand(shape[0] * shape[1]) if kind == "alibi" else None
    sinks = 3 * torch.randn(shape[0] * shape[1]) if kind == "sinks" else None
    scores = AttentionScaling(0.3, 2.0 if kind == "softcap" else None, slopes, sinks)
    if decodes or chunks:
        check(decodes + chunks, block_size, shape, seed, scores, window, dtype)


@pytest.mark.parametrize("cached", [0, 1, 100])
def test_chunks_longer_than_a_slice(way: str, cached: int) -> None:
    beyond = 2 * attention_plan.QUERY_SLICE + 3
    rows = [(5, 1), (cached, beyond), (0, attention_plan.QUERY_SLICE)]
    check(rows, 16, (2, 2, 8), seed=1)
    check(rows, 16, (2, 2, 8), seed=1, window=90)
    check(rows, 16, (2, 2, 8), seed=1, window=AttentionChunk(90))
    check(rows, 16, (2, 2, 8), seed=1, kind=AttentionScaling(0.2, alibi_slopes=torch.rand(4)))
    check(rows, 16, (2, 2, 8), seed=1, kind=AttentionScaling(0.2, sinks=torch.randn(4)), window=90)


def test_a_one_token_chunk_behind_a_longer_one(way: str) -> None:
    check([(4, 1), (0, 5), (7, 1), (0, 1)], 4, (1, 2, 8), seed=2)


@covers_builds(
    dtype=[*DTYPES],
    window=[None, 70, 200, AttentionChunk(100)],
    dim=[24, 80],
    cached=["as computed", "int8"],
)
def test_a_token_does_not_depend_on_its_chunk(
    way: str, dtype: torch.dtype, window: AttentionWindow, dim: int, cached: str
) -> None:
    if way == "torch":
        pytest.skip("torch rounds differently for other numbers of rows")
    tokens, heads, kv_heads, block_size = 300, 4, 2, 16
    generator = torch.Generator().manual_seed(5)
    query, key, value = (
        torch.randn(tokens, count, dim, generator=generator).to(dtype)
        for count in (heads, kv_heads, kv_heads)
    )
    table = np.arange(-(-tokens // block_size))[None]
    empty = torch.zeros(table.size + 1, block_size, kv_heads, dim)
    caches = [stored(empty, torch.int8 if cached == "int8" else dtype) for _ in "kv"]

    def run(*chunks: int) -> Tensor:
        results, begin = [], 0
        for chunk in chunks:
            end = begin + chunk
            starts, seen = np.array([0, chunk]), np.array([end])
            rows = PagedBatch(table, starts, seen, int(chunk == 1), block_size, table.size)
            plan = plan_attention(rows, dtype, window)
            part = slice(begin, end)
            store_kv(key[part], value[part], caches[0], caches[1], plan.slots)
            several = query[part].contiguous()
            results.append(paged_attention(several, caches[0], caches[1], plan, PLAIN))
            begin = end
        return torch.cat(results)

    whole = run(tokens)
    assert torch.equal(run(1, 39, 1, 129, 130), whole)
    assert torch.equal(run(*[1] * 5, 290, *[1] * 5), whole)


def test_decodes_are_grouped_by_length() -> None:
    unit = attention_plan.GATHERED_TOKENS // 64
    lengths = np.array([3, 70, 1, 30, 31, 29, 2, 24, 70]) * unit
    blocks = -(-lengths.max() // 16)
    table = np.zeros((len(lengths), blocks), dtype=np.int64)
    rows = PagedBatch(table, np.arange(len(lengths) + 1), lengths, len(lengths), 16, blocks)
    plan = plan_attention(rows, torch.float32, backend="torch")
    assert plan.gathers is not None
    groups = [group.rows.tolist() for group in plan.gathers.decodes]
    assert groups == [[1], [8], [4, 3], [5, 7], [0], [6], [2]]


@pytest.mark.parametrize("window", [None, 9, 5000, AttentionChunk(5000)])
@pytest.mark.parametrize("cached", [torch.float32, torch.float8_e4m3fn])
def test_more_cached_tokens_than_are_gathered_at_once(
    way: str, cached: torch.dtype, window: AttentionWindow
) -> None:
    most = attention_plan.GATHERED_TOKENS
    rows = [(most + 70, 1), (3, 1), (most // 2, 1), (most // 2 - 90, 1), (most - 40, 7), (9, 5)]
    check(rows, 16, (1, 2, 4), 3, window=window, cached=cached)


@covers_builds(
    dtype=[*DTYPES], cached=[torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.int8]
)
def test_caches_of_another_type(way: str, cached: torch.dtype, dtype: torch.dtype) -> None:
    """Also with windows that skip whole blocks."""
    rows = [(30, 1), (2, 1), (0, 1), (300, 1), (9, 7), (0, 5), (270, 3)]
    check(rows, 4, (2, 3, 16), 4, dtype=dtype, cached=cached)
    check(rows, 4, (2, 3, 16), 5, AttentionScaling(0.3, 2.0), 9, dtype, cached)
    check(
        rows,
        4,
        (2, 3, 16),
        6,
        AttentionScaling(0.3, alibi_slopes=torch.rand(6)),
        None,
        dtype,
        cached,
    )


def test_a_cache_in_fp8_keeps_numbers_within_its_range() -> None:
    numbers = torch.tensor([1.06, -300.0, 448.0, 500.0, -1e5, math.inf, math.nan, 2.0**-9])
    wanted = torch.tensor([1.0, -288.0, 448.0, 448.0, -448.0, 448.0, math.nan, 2.0**-9])
    caches = [torch.zeros(2, 2, 1, 8).to(torch.float8_e4m3fn) for _ in "kv"]
    rows = numbers.to(torch.bfloat16).expand(1, 1, 8)
    store_kv(rows, rows, caches[0], caches[1], torch.tensor([2]))
    for cache in caches:
        found = cache.to(torch.float32)[:, :, 0]
        torch.testing.assert_close(found[1, 0], wanted, equal_nan=True, rtol=0, atol=0)
        assert not found[0].any()
        assert not found[1, 1].any()


@pytest.mark.parametrize("heads", PUBLISHED)
def test_published_slopes(heads: int) -> None:
    torch.testing.assert_close(compute_alibi_slopes(heads), torch.tensor(PUBLISHED[heads]))


@pytest.mark.parametrize("heads", [16, 32, 40, 64, 71, 112])
def test_slopes_of_other_numbers(heads: int) -> None:
    """One factor from head to head; what is beyond a power of two lies halfway between."""
    slopes = [math.log2(slope) for slope in compute_alibi_slopes(heads).tolist()]
    assert len(slopes) == heads
    lower = 1 << heads.bit_length() - 1
    step = 8 / lower
    wanted = [-step * (head + 1) for head in range(lower)]
    wanted += [-step * (head + 0.5) for head in range(heads - lower)]
    assert slopes == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("heads", [6, 8, 12, 40, 71])
def test_as_transformers_has_them(heads: int) -> None:
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, 2, dtype=torch.int64)
    biases = build_alibi_tensor(mask, heads, torch.float32)
    torch.testing.assert_close(compute_alibi_slopes(heads), biases[:, 0, 1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_code_is_the_number_that_torch_reads(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(32, 4, 2).view(torch.float8_e4m3fn)
    rows = torch.tensor([31, 0, 15, 16, *range(32)])
    wanted = codes.to(dtype)[rows]
    actual = select_converted(codes, rows, dtype)
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(actual.signbit(), wanted.signbit())
    assert actual.isnan().sum() == 4  # codes 127 and 255, each in a row that is read twice


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_other_caches_are_converted_as_they_are(kept: torch.dtype) -> None:
    cached = torch.randn(5, 3).to(kept)
    rows = torch.tensor([4, 4, 0])
    assert torch.equal(select_converted(cached, rows, torch.float32), cached.float()[rows])
