"""Fused head norms, rotary embedding and KV-cache write for GPUs.

A program processes a few heads of one token in registers. The order of operations, roundings
included, is that of the reference (gllm/kernels/qkv.py).

The cache may have another dtype than the heads. In FP8 (E4M3: Micikevicius et al., "FP8 Formats for
Deep Learning" (2022), section 3.1) values beyond its range are clamped.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rotary import RotaryAngles
from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.tiles import choose_tiles

LARGEST = tl.constexpr(448.0)
"""Largest finite value of FP8 E4M3."""


@triton.jit
def _put(to, value, there):
    """Store float32 values, already rounded to the dtype of the heads, in the dtype of `to`."""
    if to.dtype.element_ty == tl.float8e4nv:
        value = tl.clamp(value, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(to, value.to(to.dtype.element_ty), there)


@triton.jit
def _turn(
    source, to, norm, cosine, sine, block, heads, eps,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Normalize and rotate a block of GROUP heads of source and store them to `to`.

    source and to: [heads, 2 * HALF + REST]; norm [2 * HALF + REST]; cosine and sine [HALF] of the
    token. HALF: rotated pairs per head; REST: elements that are not rotated; *_BLOCK: next powers
    of two.
    """
    SIZE: tl.constexpr = 2 * HALF + REST
    head = (block * GROUP + tl.arange(0, GROUP))[:, None]
    kind = source.dtype.element_ty
    if NORM:
        squares = tl.zeros((GROUP, 1), tl.float32)
    if HALF > 0:
        pair = tl.arange(0, HALF_BLOCK)[None, :]
        in_pair = (head < heads) & (pair < HALF)
        one = 2 * pair if INTERLEAVED else pair
        other = one + (1 if INTERLEAVED else HALF)
        first = tl.load(source + head * SIZE + one, in_pair, 0.0).to(tl.float32)
        second = tl.load(source + head * SIZE + other, in_pair, 0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(first * first + second * second, axis=1, keep_dims=True)
    if REST > 0:
        beyond = tl.arange(0, REST_BLOCK)[None, :]
        in_rest = (head < heads) & (beyond < REST)
        last = 2 * HALF + beyond
        rest = tl.load(source + head * SIZE + last, in_rest, 0.0).to(tl.float32)
        if NORM:
            squares += tl.sum(rest * rest, axis=1, keep_dims=True)
    if NORM:
        factor = 1.0 / tl.sqrt(squares / SIZE + eps)
    if HALF > 0:
        if NORM:
            first *= factor * tl.load(norm + one, pair < HALF, 0.0).to(tl.float32)
            second *= factor * tl.load(norm + other, pair < HALF, 0.0).to(tl.float32)
            first = first.to(kind).to(tl.float32)
            second = second.to(kind).to(tl.float32)
        c = tl.load(cosine + pair, pair < HALF, 0.0)
        s = tl.load(sine + pair, pair < HALF, 0.0)
        turned = (first * c - second * s).to(kind).to(tl.float32)
        _put(to + head * SIZE + one, turned, in_pair)
        turned = (second * c + first * s).to(kind).to(tl.float32)
        _put(to + head * SIZE + other, turned, in_pair)
    if REST > 0:
        if NORM:
            rest *= factor * tl.load(norm + last, beyond < REST, 0.0).to(tl.float32)
            rest = rest.to(kind).to(tl.float32)
        _put(to + head * SIZE + last, rest, in_rest)


@triton.jit
def _rotate_and_store(
    fused, query_norm, key_norm, cosine, sine, keys, values, slots, queries, heads, kv_heads,
    fused_row, key_row, value_row, eps,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, HALF: tl.constexpr, REST: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, WHOLE_BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Process a block of GROUP heads of one token.

    Grid: (tokens, blocks of query heads, then of key heads, then of value heads). fused [tokens,
    heads + 2 * kv_heads, 2 * HALF + REST], fused_row elements between tokens; cosine and sine
    [tokens, HALF]; keys and values [slots, kv_heads, 2 * HALF + REST], key_row and value_row
    elements per slot; slots [tokens] int64; queries [tokens, heads, 2 * HALF + REST].
    """
    SIZE: tl.constexpr = 2 * HALF + REST
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    query_blocks = tl.cdiv(heads, GROUP)
    key_blocks = tl.cdiv(kv_heads, GROUP)
    source = fused + token * fused_row
    cosine += token * HALF
    sine += token * HALF
    if block < query_blocks:
        to = queries + token * heads * SIZE
        _turn(
            source, to, query_norm, cosine, sine, block, heads, eps,
            NORM, INTERLEAVED, HALF, REST, HALF_BLOCK, REST_BLOCK, GROUP,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token)
        block -= query_blocks
        source += heads * SIZE
        if slot >= 0:
            if block < key_blocks:
                to = keys + slot * key_row
                _turn(
                    source, to, key_norm, cosine, sine, block, kv_heads, eps,
                    NORM, INTERLEAVED, HALF, REST, HALF_BLOCK, REST_BLOCK, GROUP,
                )  # fmt: skip
            else:
                head = ((block - key_blocks) * GROUP + tl.arange(0, GROUP))[:, None]
                element = tl.arange(0, WHOLE_BLOCK)[None, :]
                at = head * SIZE + element
                there = (head < kv_heads) & (element < SIZE)
                value = tl.load(source + kv_heads * SIZE + at, there, 0.0).to(tl.float32)
                _put(values + slot * value_row + at, value, there)


def rotate_and_store(
    fused: Tensor,
    layout: "QKVLayout",
    angles: "RotaryAngles | None",
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """Apply QK norms and rotary embedding, and write keys and values to the KV cache, on a GPU.

    Tokens with a slot below 0 are not stored. The cache rows must be contiguous, so that the cache
    flattened to slots is a view.

    Args:
        fused: [tokens, heads + 2 * kv_heads, head_dim].
        layout: Numbers of heads and their norms.
        angles: cos and sin of the tokens, or None.
        cache: Keys and values, each [blocks, block_size, kv_heads, head_dim].
        slots: [tokens] int64.

    Returns:
        Queries [tokens, heads, head_dim].
    """
    tokens, _, head_dim = fused.shape
    if fused.stride(2) != 1 or fused.stride(1) != head_dim:
        fused = fused.contiguous()
    queries = fused.new_empty(tokens, layout.num_heads, head_dim)
    # What there is not is never read.
    cosine, sine = (fused, fused) if angles is None else angles
    norms = layout.query_norm, layout.key_norm
    query_norm, key_norm = (fused if norm is None else norm for norm in norms)
    dim = 0 if angles is None else 2 * cosine.shape[-1]
    use = choose_tiles("qkv")
    like = (layout.num_kv_heads, head_dim, dim, layout.interleaved, None not in norms)
    constants = _constants(*like, use["elements"])
    rows = (fused.stride(0), *(one.stride(1) for one in cache))
    if tokens:
        group = constants["GROUP"]
        blocks = triton.cdiv(layout.num_heads, group) + 2 * triton.cdiv(layout.num_kv_heads, group)
        _rotate_and_store[(tokens, blocks)](
            fused,
            query_norm,
            key_norm,
            cosine,
            sine,
            *cache,
            slots,
            queries,
            layout.num_heads,
            layout.num_kv_heads,
            *rows,
            layout.eps,
            **constants,
            num_warps=use["warps"],
        )
    return queries


def _constants(
    kv_heads: int, head_dim: int, dim: int, interleaved: bool, norm: bool, elements: int
) -> dict[str, Any]:
    """Return the constants; a program has at most `elements` elements, but at least one head."""
    half, rest, whole = dim // 2, head_dim - dim, triton.next_power_of_2(head_dim)
    return {
        "NORM": norm,
        "INTERLEAVED": interleaved,
        "HALF": half,
        "REST": rest,
        "HALF_BLOCK": triton.next_power_of_2(max(half, 1)),
        "REST_BLOCK": triton.next_power_of_2(max(rest, 1)),
        "WHOLE_BLOCK": whole,
        "GROUP": min(triton.next_power_of_2(kv_heads), max(elements // whole, 1)),
    }


def _compiled(
    label: str,
    kind: str,
    cached: str,
    like: tuple[int, int, int, bool, bool],
    min_arch: int = 80,
) -> KernelSpec:
    signature = {
        **dict.fromkeys(("fused", "query_norm", "key_norm"), f"*{kind}"),
        **dict.fromkeys(("cosine", "sine"), "*fp32"),
        **dict.fromkeys(("keys", "values"), f"*{cached}"),
        "slots": "*i64",
        "queries": f"*{kind}",
        "eps": "fp32",
        **dict.fromkeys(("heads", "kv_heads", "fused_row", "key_row", "value_row"), "i32"),
    }
    aligned = tuple(name for name, type_ in signature.items() if type_.startswith("*"))
    aligned += ("fused_row", "key_row", "value_row")
    return KernelSpec(
        label,
        _rotate_and_store,
        signature,
        {},
        min_arch=min_arch,
        stages=3,
        aligned=aligned,
        tuned=TunedConstants("qkv", {}, lambda use: _constants(*like, use["elements"])),
    )


KERNEL_SPECS = [
    _compiled("norms, heads of 128, bf16", "bf16", "bf16", (8, 128, 128, False, True)),
    _compiled("heads of 128, bf16", "bf16", "bf16", (4, 128, 128, False, False)),
    _compiled("heads of 128, fp16", "fp16", "fp16", (8, 128, 128, False, False)),
    _compiled("heads of 128, bf16 to fp8", "bf16", "fp8e4nv", (8, 128, 128, False, True), 89),
    _compiled("half rotated in pairs, bf16", "bf16", "bf16", (2, 128, 64, True, False)),
    _compiled("a quarter rotated, fp16", "fp16", "fp16", (32, 80, 20, False, False)),
    _compiled("not rotated, bf16", "bf16", "bf16", (8, 64, 0, False, False)),
    _compiled("heads of 256, bf16", "bf16", "bf16", (4, 256, 256, False, True)),
    _compiled("one KV head of 128, bf16", "bf16", "bf16", (1, 128, 128, False, True)),
]
