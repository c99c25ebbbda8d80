"""Kernels for GPUs on what one rank of a stage has, against those on the whole, interpreted.

A rank has some heads, some inner elements of experts, and columns of a weight up to a block's
border; what it computes is a part of the whole's result, or of its sum.
"""

import pytest
import torch

pytest.importorskip("triton")

from gllm.kernels.alibi import compute_alibi_slopes
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.triton import experts as gpu
from gllm.kernels.triton.linear_fp8 import linear_fp8
from gllm.kernels.triton.qkv import rotate_and_store
from tests.kernels.test_linear_fp8 import quantized
from tests.triton.test_attention import Case, launched, plain_reference
from tests.triton.test_experts import made

__all__ = ["plain_reference"]

ROWS = [(20, 1), (9, 1), (6, 5)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "alibi"),
    [pytest.param(8, 4, 2, False, marks=pytest.mark.full), (12, 2, 4, True)],
)
def test_heads_of_a_rank_are_those_of_all(
    heads: int, kv_heads: int, ranks: int, alibi: bool
) -> None:
    """Also where several ranks have the same KV head."""
    whole = Case(ROWS, heads, kv_heads, 16, 16)
    slopes = compute_alibi_slopes(heads) if alibi else None
    expected = launched(
        whole.query, whole.caches, whole.plan(), AttentionScaling(0.25, None, slopes)
    )
    own, shared = heads // ranks, max(ranks // kv_heads, 1)
    count = max(kv_heads // ranks, 1)
    for rank in range(ranks):
        head, kv_head = rank * own, rank // shared * count
        caches = tuple(
            cache[:, :, kv_head : kv_head + count].contiguous() for cache in whole.caches
        )
        scores = AttentionScaling(0.25, None, None if slopes is None else slopes[head : head + own])
        query = whole.query[:, head : head + own].contiguous()
        part = launched(query, (caches[0], caches[1]), whole.plan(), scores)
        # Contexts are split by the number of programs, and so by that of heads.
        torch.testing.assert_close(part, expected[:, head : head + own], rtol=1e-5, atol=1e-6)


def test_latent_heads_of_a_rank_share_the_whole_cache() -> None:
    whole = Case(ROWS, 6, 1, 24, 16, shared=True)
    scores = AttentionScaling(0.25)
    expected = launched(whole.query, whole.caches, whole.plan(), scores)
    for rank in range(3):
        heads = slice(2 * rank, 2 * rank + 2)
        part = launched(whole.query[:, heads].contiguous(), whole.caches, whole.plan(), scores)
        torch.testing.assert_close(part, expected[:, heads], rtol=1e-6, atol=1e-6)


def test_keys_of_a_rank_are_stored_as_those_of_all() -> None:
    """One KV head each, and queries of one."""
    tokens, heads, dim = 3, 4, 16
    generator = torch.Generator().manual_seed(2)
    fused = torch.randn(tokens, heads + 4, dim, generator=generator)
    angles = tuple(torch.randn(2, tokens, 1, dim // 2, generator=generator))
    slots = torch.tensor([5, 0, 9])

    def stored(rows: torch.Tensor, count: int) -> tuple[torch.Tensor, ...]:
        cache = tuple(torch.zeros(4, 4, rows.shape[1] - count >> 1, dim) for _ in range(2))
        layout = QKVLayout(count, (rows.shape[1] - count) // 2)
        queries = rotate_and_store(
            rows.clone(), layout, (angles[0], angles[1]), (cache[0], cache[1]), slots
        )
        return (queries, *cache)

    whole = stored(fused, heads)
    for rank in range(2):
        own = [2 * rank, 2 * rank + 1, heads + rank, heads + 2 + rank]
        queries, keys, values = stored(fused[:, own].contiguous(), 2)
        assert queries.equal(whole[0][:, 2 * rank : 2 * rank + 2])
        assert keys.equal(whole[1][:, :, rank : rank + 1])
        assert values.equal(whole[2][:, :, rank : rank + 1])


@pytest.mark.full
@pytest.mark.parametrize(("inner", "ranks"), [(48, 4)])
def test_experts_of_ranks_add_up(inner: int, ranks: int) -> None:
    """Each has some inner elements of every expert: gates, ups and columns of down."""
    x, picked, weights, up, down = made(3, 5, (4, 2, 20, inner))
    expected = gpu.run_experts(x, picked, weights, up, down, "silu")
    own, total = inner // ranks, torch.zeros_like(expected)
    for rank in range(ranks):
        part = slice(rank * own, rank * own + own)
        gate_up = torch.cat([up[:, :inner][:, part], up[:, inner:][:, part]], dim=1)
        down_part = down[:, :, part].contiguous()
        total += gpu.run_experts(x, picked, weights, gate_up, down_part, "silu")
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fp8", [False, True])
def test_columns_in_8_bits_add_up(fp8: bool) -> None:
    """Cut between blocks: activations have the same scales, so the sum is that of the whole."""
    matrix = quantized(24, 256, (8, 64))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(5))
    total = torch.zeros(3, 24)
    for rank in range(2):
        columns = slice(128 * rank, 128 * rank + 128)
        codes = matrix.codes[:, columns].contiguous()
        scales = matrix.scales[:, 2 * rank : 2 * rank + 2].contiguous()
        part = Fp8Matrix(codes, scales, matrix.rows, matrix.columns, matrix.dtype)
        total += linear_fp8(x[:, columns], part, None, fp8=fp8)
    expected = linear_fp8(x, matrix, None, fp8=fp8)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=1e-4)
