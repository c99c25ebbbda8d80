"""Calls of flash-attn mean what the reference computes: held against it by a package of the same
name that computes what flash-attn's documentation says."""

import dataclasses
import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.kernels.alibi import compute_alibi_slopes
from gllm.kernels.attention import paged_attention
from gllm.kernels.attention_plan import PagedBatch, build_device_tables, plan_attention
from gllm.kernels.attention_scaling import AttentionScaling
from tests.support.examples import num_examples
from tests.support.gpu import fake_flash_attention

CPU = torch.device("cpu")
HEADS, KV_HEADS, DIM = 4, 2, 8


@pytest.fixture(autouse=True)
def flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", fake_flash_attention)
    # One step over, so that tests have small blocks too.
    monkeypatch.setattr(fake_flash_attention, "PAGE", 4)


def check(
    contexts: list[tuple[int, int]],
    scores: AttentionScaling,
    window: int | None = None,
    block_size: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> None:
    """Rows of (cached tokens, new tokens), decodes first; blocks that are nobody's are NaN."""
    generator = torch.Generator().manual_seed(seed)
    totals = np.array([cached + new for cached, new in contexts])
    counts = -(-totals // block_size)
    order = torch.randperm(int(counts.sum()), generator=generator).numpy() + 1
    table = np.zeros((len(contexts), counts.max() + 1), dtype=np.int64)
    caches = [torch.full((len(order) + 2, block_size, KV_HEADS, DIM), math.nan) for _ in "kv"]
    for row, count in enumerate(counts):
        table[row, :count], order = order[:count], order[count:]
    for cache in caches:
        for row, total in enumerate(totals):
            at = np.arange(total)
            slots = table[row, at // block_size] * block_size + at % block_size
            drawn = torch.randn(total, KV_HEADS, DIM, generator=generator)
            cache.flatten(0, 1)[torch.from_numpy(slots)] = drawn
        # Where gathers of padding go.
        cache[-1] = 0
    starts = np.cumsum([0] + [new for _, new in contexts])
    decodes = next((i for i, (_, new) in enumerate(contexts) if new > 1), len(contexts))
    rows = PagedBatch(table, starts, totals, decodes, block_size, len(caches[0]) - 1)
    query = torch.randn(int(starts[-1]), HEADS, DIM, generator=generator).to(dtype)
    keys, values = (cache.to(dtype) for cache in caches)
    plan = plan_attention(rows, torch.float32, window, backend="torch")
    requirements = paged_attention(query.float(), keys.float(), values.float(), plan, scores)
    plan = dataclasses.replace(
        plan, backend="flash-attn", gathers=None, tables=build_device_tables(rows, CPU)
    )
    for _ in range(2):  # Layers share a plan.
        actual = paged_attention(query, keys, values, plan, scores)
        assert actual.dtype == dtype
        limit = torch.finfo(dtype).eps
        torch.testing.assert_close(actual.float(), requirements, rtol=limit, atol=limit)


decode_rows = st.lists(st.tuples(st.integers(0, 30), st.just(1)), max_size=4)
chunk_rows = st.lists(st.tuples(st.integers(0, 20), st.integers(2, 15)), max_size=3)


@settings(max_examples=num_examples(50, 1500), deadline=None, derandomize=True)
@given(
    decode_rows,
    chunk_rows,
    st.sampled_from(["plain", "softcap", "alibi"]),
    st.none() | st.integers(1, 40),
    st.sampled_from([torch.bfloat16, torch.float16]),
)
def test_matches_the_reference(
    decodes: list[tuple[int, int]],
    chunks: list[tuple[int, int]],
    kind: str,
    window: int | None,
    dtype: torch.dtype,
) -> None:
    slopes = compute_alibi_slopes(HEADS) if kind == "alibi" else None
    scores = AttentionScaling(0.4, 2.0 if kind == "softcap" else None, slopes)
    if decodes or chunks:
        check(decodes + chunks, scores, window, dtype=dtype)


def test_a_one_token_chunk_behind_a_longer_one() -> None:
    check([(4, 1), (0, 5), (7, 1), (0, 1)], AttentionScaling(0.3), window=3)


@pytest.mark.parametrize("window", [None, 100])
def test_blocks_as_large_as_the_package_wants(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fake_flash_attention, "PAGE", 256)
    check([(300, 1), (255, 1), (256, 1), (250, 30)], AttentionScaling(0.3), window, 256)
