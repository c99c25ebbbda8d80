"""flash-attn as its docstrings describe it, by plain torch: what tests call in its place.

Owns the two functions that gllm calls, with the names and defaults of their arguments, and what the
package refuses. Computes in float32, each query against every place of its row's blocks, and never
looks at numbers on the host: so it can be recorded.

Source: docstrings of flash_attn_varlen_func and flash_attn_with_kvcache; checks of csrc/flash_attn/
flash_api.cpp (Dao-AILab/flash-attention, version 2.6).
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

__version__ = "2.6.3"
PAGE = 256
DTYPES: tuple[torch.dtype, ...] = (torch.float16, torch.bfloat16)


@contextmanager
def installed(page: int = PAGE, dtypes: Sequence[torch.dtype] = DTYPES) -> Iterator[None]:
    """Let gllm find the package; it takes multiples of `page` and these dtypes."""
    global PAGE, DTYPES
    before = PAGE, DTYPES
    PAGE, DTYPES = page, tuple(dtypes)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "flash_attn", sys.modules[__name__])
            yield
    finally:
        PAGE, DTYPES = before


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """q [all queries, heads, dim], k and v [blocks, page, kv_heads, dim], cu_seqlens [rows + 1]
    int32, block_table [rows, blocks of a row] int32; the result as q."""
    assert block_table is not None, "not paged: gllm does not call it so"
    assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
    assert cu_seqlens_q.is_contiguous()
    assert cu_seqlens_k.is_contiguous()
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    tokens = torch.arange(len(q))
    row = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True)
    counts_q, counts_k = cu_seqlens_q.diff(), cu_seqlens_k.diff()
    # Where a window reaches beyond all keys is decided by the longest.
    left = -1 if window_size[0] >= max_seqlen_k else window_size[0]
    right = -1 if window_size[1] >= max_seqlen_k else window_size[1]
    place = tokens - cu_seqlens_q.index_select(0, row)
    # Of a launch: queries behind the longest row's last are not computed.
    launched = place < max_seqlen_q
    spot = place + (counts_k - counts_q).index_select(0, row)
    out = attend(
        q,
        k,
        v,
        block_table.index_select(0, row),
        spot,
        counts_k.index_select(0, row),
        softmax_scale,
        causal,
        (left, right),
        softcap,
        alibi_slopes,
    )
    return out.masked_fill(~launched[:, None, None], math.nan)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """q [rows, queries of a row, heads, dim], caches [blocks, page, kv_heads, dim], cache_seqlens
    [rows] int32, block_table [rows, blocks of a row] int32; the result as q."""
    assert cache_seqlens is not None
    assert block_table is not None
    rows, count = q.shape[:2]
    assert cache_seqlens.shape == (rows,)
    assert cache_seqlens.dtype == torch.int32
    assert cache_seqlens.is_contiguous()
    assert len(block_table) == rows
    ends = cache_seqlens.repeat_interleave(count, output_size=rows * count)
    spot = ends - count + torch.arange(count).repeat(rows)
    tables = block_table.repeat_interleave(count, dim=0, output_size=rows * count)
    out = attend(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        tables,
        spot,
        ends,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
    )
    return out.unflatten(0, (rows, count))


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tables: Tensor,
    spot: Tensor,
    ends: Tensor,
    scale: float | None,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
    slopes: Tensor | None,
) -> Tensor:
    """q [queries, heads, dim]; for each query: tables [queries, blocks], spot [queries], where it
    is among its keys, ends [queries], how many those are."""
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in DTYPES
    assert tables.dtype == torch.int32
    assert {q.stride(-1), k.stride(-1), v.stride(-1), tables.stride(-1)} == {1}
    assert k.shape == v.shape
    assert k.shape[1] % PAGE == 0
    assert q.shape[-1] <= 256
    if slopes is not None:
        assert slopes.dtype == torch.float32
    heads, dim = q.shape[1:]
    # What is behind a row's last block may be anything; it is masked, but NaN would come through.
    at = torch.arange(tables.shape[1] * k.shape[1])
    hidden = at >= ends[:, None]
    if causal:
        hidden = hidden | (at > spot[:, None])
    if window[0] >= 0:
        hidden = hidden | (at < spot[:, None] - window[0])
    if window[1] >= 0:
        hidden = hidden | (at > spot[:, None] + window[1])
    slots = tables.to(torch.int64).clamp(0, len(k) - 1) * k.shape[1]
    slots = (slots[:, :, None] + torch.arange(k.shape[1])).flatten(1)
    group = heads // k.shape[2]

    def gathered(cache: Tensor) -> Tensor:
        found = cache.flatten(0, 1).index_select(0, slots.flatten()).unflatten(0, slots.shape)
        found = found.to(torch.float32).masked_fill(hidden[:, :, None, None], 0)
        return found.repeat_interleave(group, dim=2)

    scores = torch.einsum("qhd,qkhd->qhk", q.to(torch.float32), gathered(k))
    scores = scores * (dim**-0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    if slopes is not None:
        scores = scores - slopes[:, None] * (spot[:, None] - at).abs()[:, None]
    weights = scores.masked_fill(hidden[:, None], -math.inf).softmax(-1)
    # Queries that see nothing get nothing.
    weights = weights.masked_fill(hidden.all(-1)[:, None, None], 0)
    return torch.einsum("qhk,qkhd->qhd", weights, gathered(v)).to(q.dtype)
