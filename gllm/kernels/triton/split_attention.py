"""Split contexts: the range of each split, its partial results, and their reduction.

A split stores for each row its highest score, the total weight and the weighted sum of values. The
reduction adds the splits in order.

Source: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.triton import attention_shapes
from gllm.kernels.triton.attention_shapes import AttentionShape
from gllm.kernels.triton.attention_tiles import LOWEST
from gllm.kernels.triton.kernel_specs import KernelSpec

SPLITS_PER_STEP = 8
"""Parts of a context added up at once."""
SplitResults = tuple[Tensor, Tensor] | tuple[None, None]
"""Weighted sums [tokens, heads, splits, value_dim], highest scores and total weights together [2,
tokens, heads, splits], all float32; nothing where contexts are not split."""


def allocate_split_results(
    tokens: int, splits: int, shape: AttentionShape, device: torch.device
) -> SplitResults:
    """Allocate memory for the partial attention results of all splits of some tokens.

    Returns (None, None) for a single split, which needs none.
    """
    if splits == 1:
        return None, None
    size = (tokens, shape.heads, splits)
    sums = torch.empty(*size, shape.value_dim, dtype=torch.float32, device=device)
    return sums, torch.empty(2, *size, dtype=torch.float32, device=device)


def combine_splits(output: Tensor, parts: SplitResults, shape: AttentionShape) -> None:
    """Combine the partial attention results of all splits into output [tokens, heads, value_dim].

    Tokens without context become zero.
    """
    sums, statistics = parts
    if sums is None:
        return
    tokens, heads, splits, _ = sums.shape
    reduce_kernel[(heads, tokens)](output, sums, statistics, splits, **_reduced(shape), num_warps=4)


def _reduced(shape: AttentionShape) -> dict[str, int | bool]:
    """Return the constants of reduce_kernel."""
    return {
        "VALUE": shape.value_dim,
        "VALUE_PAD": int(triton.next_power_of_2(shape.value_dim)),
        "SPLITS": attention_shapes.SPLITS,
        "CHUNK": SPLITS_PER_STEP,
    }


@triton.jit
def split_range(begin, end, split, splits, KEYS: tl.constexpr, LEAST: tl.constexpr):
    """Return begin and end of the positions of one split of a context begin .. end - 1.

    A split has whole tiles of KEYS positions and at least LEAST positions. An empty split has an
    end that is not after its begin. Triton device function.
    """
    tiles = tl.cdiv(end - begin, KEYS)
    part = tl.maximum(tl.cdiv(tiles, splits), (LEAST + KEYS - 1) // KEYS) * KEYS
    return begin + split * part, tl.minimum(begin + (split + 1) * part, end)


@triton.jit
def store_split(
    partial, statistics, at, there, num_partials, highest, total, attended,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
):  # fmt: skip
    """Store the partial attention results of one split for the rows of a tile.

    highest and total [ROWS] and attended [ROWS, VALUE_PAD] go to index `at` [ROWS] of
    `num_partials` entries. Triton device function.
    """
    columns = tl.arange(0, VALUE_PAD)
    mask = there[:, None] & (columns < VALUE)[None, :]
    tl.store(partial + at[:, None] * VALUE + columns[None, :], attended, mask=mask)
    tl.store(statistics + at, highest, mask=there)
    tl.store(statistics + num_partials + at, total, mask=there)


@triton.jit(do_not_specialize=["splits"])
def reduce_kernel(
    output, partial, statistics, splits,
    VALUE: tl.constexpr, VALUE_PAD: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Combine the partial attention results of all splits for one head of one token (Triton).

    Grid: (heads, tokens). partial [tokens, heads, splits, VALUE] and statistics [2, tokens, heads,
    splits] float32 are SplitResults; sums of splits whose highest score is LOWEST are not read.
    """
    at = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    num_partials = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * splits
    own = statistics + at * splits
    every = tl.arange(0, SPLITS)
    highs = tl.load(own + every, mask=every < splits, other=LOWEST)
    highest = tl.max(highs, axis=0)
    totals = tl.load(
        own + num_partials + every, mask=(every < splits) & (highs > LOWEST), other=0.0
    )
    total = tl.sum(totals * tl.exp2(highs - highest), axis=0)

    columns = tl.arange(0, VALUE_PAD)
    added = tl.zeros([VALUE_PAD], dtype=tl.float32)
    for begin in range(0, splits, CHUNK):
        parts = begin + tl.arange(0, CHUNK)
        high = tl.load(own + parts, mask=parts < splits, other=LOWEST)
        part = tl.load(
            partial + (at * splits + parts)[:, None] * VALUE + columns[None, :],
            mask=(high > LOWEST)[:, None] & (columns < VALUE)[None, :],
            other=0.0,
        )
        added += tl.sum(part * tl.exp2(high - highest)[:, None], axis=0)
    # Without context there is no weight.
    added = added / tl.where(total > 0, total, 1)
    stored = added.to(output.dtype.element_ty)
    tl.store(output + at * VALUE + columns, stored, mask=columns < VALUE)


PARTIAL = {"partial": "*fp32", "statistics": "*fp32"}
KERNEL_SPECS = [
    KernelSpec(
        f"reduction of splits, {label}",
        reduce_kernel,
        {"output": "*bf16", **PARTIAL, "splits": "i32"},
        _reduced(shape),
        stages=3,
        aligned=("output", *PARTIAL),
    )
    for label, shape in attention_shapes.HEAD_CONFIGS.items()
]
