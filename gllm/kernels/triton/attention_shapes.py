"""Compile-time constants of the paged attention kernels: tile sizes, splits and model shapes.

Tile sizes come from tables (tiles.py). HEAD_CONFIGS lists the models that the kernels are compiled
for ahead of time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from gllm.kernels.attention_window import AttentionChunk, AttentionWindow, encode_window
from gllm.kernels.triton import common
from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.tiles import choose_tiles


@dataclass(frozen=True)
class TileSizes:
    """Tile sizes, number of warps and pipeline stages of one attention kernel."""

    rows: int
    """Queries of a tile: tokens times query heads that share a KV head; a power of two, 16 at
    least, which is what tensor cores take."""
    keys: int
    """Cached tokens of a tile, a power of two, 16 at least."""
    warps: int
    """Warps per Triton program."""
    stages: int
    """Stages of Triton's software pipeline."""


SPLITS = 128
"""Maximum number of splits of a context."""
MIN_DECODE_SPLIT_TOKENS = 128
"""Minimum tokens per split of a decode: below, the reduction costs more than it saves."""
MIN_PREFILL_SPLIT_TOKENS = 1024
"""Minimum tokens per split of a prefill chunk. A row of a tile writes and reads 1 KB per split (128
elements, float32); at 4.8 TB/s that takes as long as 166 keys do at 400 TFLOP/s."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs per processor that splitting of decodes aims at; prefill aims at one."""
MAX_DECODE_SPLIT_TOKENS = 8192
"""Maximum tokens per split of a decode, regardless of other programs: a single program reads
slowly, so one long context would delay the whole step. 64 KB in flight (two tiles of 64 keys and
values of 128 16-bit elements) and 0.8 us of latency are 80 GB/s, so 8192 tokens of a KV head take
about 50 us."""


@dataclass(frozen=True)
class SplitLimits:
    """Limits for splitting a context over several GPU programs (split-KV, as in Flash-Decoding)."""

    min_decode_tokens: int = MIN_DECODE_SPLIT_TOKENS
    """Minimum number of context tokens per split of a decode."""
    min_prefill_tokens: int = MIN_PREFILL_SPLIT_TOKENS
    """Minimum number of context tokens per split of a prefill chunk."""
    processors: int | None = None
    """Streaming multiprocessors to fill; None: those of the device."""

    def num_processors(self, device: torch.device) -> int:
        """Return the number of streaming multiprocessors that the splits should keep busy."""
        return common.count_processors(device) if self.processors is None else self.processors


DEFAULT_SPLIT_LIMITS = SplitLimits()
"""Limits outside of tests."""


@dataclass(frozen=True)
class AttentionShape:
    """Head counts, head sizes, block size and features that an attention kernel is compiled for."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    shared: bool = False
    """True if values are the first elements of the keys (latent attention)."""
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    window: AttentionWindow = None
    """Tokens visible to a token."""
    wide: bool = False
    """True if queries are float32."""

    @property
    def group(self) -> int:
        """Return the number of query heads per KV head (the GQA group size)."""
        return self.heads // self.kv_heads

    @property
    def main(self) -> int:
        """Return the number of key elements in the first key tile; a second tile has the rest."""
        return self.value_dim if self.shared else self.key_dim


def describe_shape(
    query: Tensor, keys: Tensor, values: Tensor, features: tuple[bool, bool, bool, AttentionWindow]
) -> AttentionShape:
    """Derive the `AttentionShape` from the query and the paged key and value caches.

    Args:
        query: [tokens, heads, key_dim].
        keys: [blocks, block_size, kv_heads, key_dim].
        values: [blocks, block_size, kv_heads, value_dim].
        features: True with softcap, with ALiBi and with sinks, and the window.
    """
    shared = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
    return AttentionShape(
        query.shape[1],
        keys.shape[2],
        keys.shape[3],
        values.shape[3],
        keys.shape[1],
        shared,
        *features,
        query.dtype == torch.float32,
    )


def tile_lookup_sizes(shape: AttentionShape) -> dict[str, int]:
    """Return the problem sizes by which `choose_tiles` selects attention tile sizes.

    These are the padded dimension of a head (512 also stands for latent attention, whose keys have
    64 more elements) and the bytes of a query element.
    """
    head = max(_padded(shape.main), _padded(shape.value_dim))
    return {"head": head, "bytes": 4 if shape.wide else 2}


def choose_attention_tiles(shape: AttentionShape, table: str) -> TileSizes:
    """Return the tile sizes of an attention kernel for heads of this shape.

    Args:
        shape: head sizes and dtype of the queries.
        table: "prefill" or "decode".

    Raises:
        ValueError: the table has no tile sizes for such heads.
    """
    return TileSizes(**choose_tiles(table, **tile_lookup_sizes(shape)))


@dataclass(frozen=True)
class QueryPacking:
    """Division of the query heads that share a KV head, and of tokens, into query tiles."""

    heads: int
    """Query heads per tile."""
    parts: int
    """Tiles for the query heads of one KV head, 1 unless a tile has fewer rows than heads."""
    tokens: int
    """Tokens per tile."""


def pack_queries(tiles: TileSizes, shape: AttentionShape) -> QueryPacking:
    """Divide query heads and tokens into tiles of the given number of rows."""
    heads = min(shape.group, tiles.rows)
    return QueryPacking(heads, -(-shape.group // heads), tiles.rows // heads)


def attention_constants(tiles: TileSizes, shape: AttentionShape) -> dict[str, int | bool]:
    """Return the compile-time constants that the prefill and decode attention kernels share."""
    packed = pack_queries(tiles, shape)
    rest = shape.key_dim - shape.main
    return {
        "ROWS": tiles.rows,
        "KEYS": tiles.keys,
        "GROUP": shape.group,
        "HEADS": packed.heads,
        "PARTS": packed.parts,
        "BLOCK_SIZE": shape.block_size,
        "MAIN": shape.main,
        "MAIN_PAD": _padded(shape.main),
        "REST": rest,
        "REST_PAD": _padded(rest),
        "VALUE": shape.value_dim,
        "VALUE_PAD": _padded(shape.value_dim),
        # In float32 a tile for both products takes more shared memory than sm_86 and 89 have; read
        # again it comes from the second cache.
        "SHARED": shape.shared and not shape.wide,
        "SOFTCAP": shape.softcap,
        "ALIBI": shape.alibi,
        "SINKS": shape.sinks,
        "WINDOW": encode_window(shape.window),
    }


def decode_splits(
    contexts: npt.NDArray[np.int64],
    programs: int,
    processors: int,
    min_tokens: int = MIN_DECODE_SPLIT_TOKENS,
) -> int:
    """Return the number of splits of each decode's context, as in Flash-Decoding.

    A split of the longest context is at most an equal share of all work for each of
    PROGRAMS_PER_PROCESSOR programs per processor, and at most MAX_DECODE_SPLIT_TOKENS tokens, so
    that neither a small batch nor one long context among short ones leaves processors idle.

    Args:
        contexts: [decodes] visible tokens of each decode. For a launch that is captured in a graph:
            the longest contexts of any replay.
        programs: GPU programs per decode without splits.
        processors: streaming multiprocessors of the device.
        min_tokens: minimum tokens per split.
    """
    longest = int(contexts.max())
    share = -(-int(contexts.sum()) * programs // (PROGRAMS_PER_PROCESSOR * processors))
    return _splits(-(-longest // min(max(share, 1), MAX_DECODE_SPLIT_TOKENS)), longest, min_tokens)


def prefill_splits(
    programs: int, longest: int, processors: int, min_tokens: int = MIN_PREFILL_SPLIT_TOKENS
) -> int:
    """Return the number of splits of a prefill chunk's context, which only fill idle processors.

    Args:
        programs: GPU programs of the launch without splits.
        longest: longest context, in tokens.
        processors: streaming multiprocessors of the device.
        min_tokens: minimum tokens per split.
    """
    return _splits(processors // programs, longest, min_tokens)


def _splits(wanted: int, longest: int, min_tokens: int) -> int:
    return max(1, min(wanted, -(-longest // min_tokens), SPLITS))


def _padded(size: int) -> int:
    """Return the next power of two that tensor cores support, at least 16."""
    return max(int(triton.next_power_of_2(size)), 16)


def with_float32_queries(shape: AttentionShape) -> AttentionShape:
    """Return a copy of the shape for float32 queries."""
    return replace(shape, wide=True)


HEAD_CONFIGS = {
    "groups of 7 heads of 128": AttentionShape(28, 4, 128, 128, 16),
    "groups of 4 heads of 128": AttentionShape(32, 8, 128, 128, 16),
    "groups of 7 heads of 64": AttentionShape(14, 2, 64, 64, 16),
    "32 heads of 96": AttentionShape(32, 32, 96, 96, 16),
    "groups of 2 heads of 256": AttentionShape(16, 8, 256, 256, 16),
    "16 latent heads": AttentionShape(16, 1, 576, 512, 16, shared=True),
    "4 latent heads": AttentionShape(4, 1, 576, 512, 16, shared=True),
    "a group of 8 heads of 128": AttentionShape(8, 1, 128, 128, 16),
}
"""Heads of Qwen2.5-7B, Llama-3.1-8B, Qwen2.5-0.5B, Phi-3-mini, Gemma-2-9B, DeepSeek-V2-Lite; of
one of four ranks of DeepSeek-V2-Lite, and of one of eight of Llama-3.1-70B."""
CASES = [
    *(
        (f"{label}, {query} on {cached}", shape, query, cached, min_arch)
        for label, shape in HEAD_CONFIGS.items()
        for query, cached, min_arch in (
            ("bf16", "bf16", 80),
            ("fp16", "fp16", 80),
            ("bf16", "fp8e4nv", 89),
        )
    ),
    *(
        (label, replace(HEAD_CONFIGS[heads], **features), "bf16", "bf16", 80)
        for label, heads, features in (
            ("softcap, heads of 256", "groups of 2 heads of 256", {"softcap": True}),
            ("window, heads of 128", "groups of 4 heads of 128", {"window": 4096}),
            ("chunks, heads of 128", "groups of 4 heads of 128", {"window": AttentionChunk(8192)}),
            ("ALiBi, heads of 128", "groups of 4 heads of 128", {"alibi": True}),
            ("sinks, heads of 64", "groups of 7 heads of 64", {"sinks": True, "window": 128}),
        )
    ),
    *(
        (f"{label}, fp32 on fp32", with_float32_queries(shape), "fp32", "fp32", 80)
        for label, shape in HEAD_CONFIGS.items()
    ),
]
"""Compiled variants: label, shape, types of queries and cache, oldest architecture."""


def list_specs(
    name: str,
    kernel: Any,
    table: str,
    types: Mapping[str, str],
    more: Mapping[str, Any],
) -> list[KernelSpec]:
    """List the variants of an attention kernel to compile ahead of time, one per entry of CASES.

    Args:
        name: prefix of the variants' labels.
        kernel: function decorated with triton.jit.
        table: table of tile sizes, "prefill" or "decode".
        types: types of the arguments that only this kernel has.
        more: constants that only this kernel has.
    """
    return [
        KernelSpec(
            f"{name}, {label}",
            kernel,
            {**_types(query, cached, shape), **types},
            {**_absent(shape), **more},
            tuned=tuned_constants(table, shape),
            tensor_cores=True,
            min_arch=min_arch,
            aligned=tuple(name for name in _types(query, cached, shape) if name in ALIGNED),
        )
        for label, shape, query, cached, min_arch in CASES
    ]


def tuned_constants(table: str, shape: AttentionShape) -> TunedConstants:
    """Return the kernel constants of an attention shape, with tile sizes looked up in a table."""
    return TunedConstants(
        table, tile_lookup_sizes(shape), lambda use: attention_constants(TileSizes(**use), shape)
    )


STRIDES = ("query_token", "query_head", "key_row", "key_head", "value_row", "value_head")
"""Elements between the tokens and heads of queries, keys and values."""
ALIGNED = ("output", "query", "keys", "values", "slopes", "sinks", *STRIDES)
"""Arguments of the kernels that are multiples of 16."""


def _absent(shape: AttentionShape) -> dict[str, None]:
    """Return the tensors that the kernels do not get for this shape."""
    given = {"slopes": shape.alibi, "sinks": shape.sinks}
    return {name: None for name, is_given in given.items() if not is_given}


def _types(query: str, cached: str, shape: AttentionShape) -> dict[str, str]:
    pointers = {"output": query, "query": query, "keys": cached, "values": cached}
    if shape.alibi:
        pointers["slopes"] = "fp32"
    if shape.sinks:
        pointers["sinks"] = "fp32"
    tables = dict.fromkeys(("block_table", "context_len"), "i32")
    return {
        **{name: f"*{kind}" for name, kind in (pointers | tables).items()},
        **dict.fromkeys(("table_row", *STRIDES), "i32"),
        **dict.fromkeys(("inner", "outer"), "fp32"),
    }
