"""Sizes of the tiles of paged attention, and all else that is constant within one of its kernels.

Owns the names of the kernels' constants, the number of splits of a context, and the models that the
kernels are compiled for ahead of time. Sizes come from tables (tiles.py). Does not know what
kernels compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton
from torch import Tensor

from gllm.kernels.triton.kernel_specs import KernelSpec, TunedConstants
from gllm.kernels.triton.tiles import choose_tiles


@dataclass(frozen=True)
class TileSizes:
    """One choice of sizes."""

    rows: int
    """Queries of a tile: tokens times query heads that share a KV head; a power of two, 16 at
    least, which is what tensor cores take."""
    keys: int
    """Cached tokens of a tile, a power of two, 16 at least."""
    warps: int
    stages: int


SPLITS = 128
"""Most parts of a context."""
MIN_DECODE_SPLIT_TOKENS = 128
"""Fewest tokens of a decode's part: below, the reduction costs more than parallelism saves."""
MIN_PREFILL_SPLIT_TOKENS = 1024
"""The same for a prefill chunk. A row of a tile writes and reads 1 KB for each part of its context
(128 elements, float32); at 4.8 TB/s that takes as long as 166 keys do at 400 TFLOP/s."""
PROGRAMS_PER_PROCESSOR = 2
"""Programs for each processor that splitting of decodes aims at; a chunk's fill one each."""
MAX_DECODE_SPLIT_TOKENS = 8192
"""Most tokens of a decode's part, however many other programs there are: one program alone reads
slowly, so that a single long context would hold up a whole step. 64 KB under way (two tiles of 64
keys and values of 128 16-bit elements) and 0.8 us of latency are 80 GB/s, so 8192 tokens of a KV
head take about 50 us."""


@dataclass(frozen=True)
class AttentionShape:
    """What a stage's attention always looks like."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    block_size: int
    shared: bool = False
    """Whether values are the first elements of the keys."""
    softcap: bool = False
    alibi: bool = False
    window: int | None = None
    wide: bool = False
    """Whether queries are float32."""

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.heads // self.kv_heads

    @property
    def main(self) -> int:
        """Elements of the keys that one tile holds; the others are in a second one."""
        return self.value_dim if self.shared else self.key_dim


def describe_shape(
    query: Tensor, keys: Tensor, values: Tensor, features: tuple[bool, bool, int | None]
) -> AttentionShape:
    """The shape of query [tokens, heads, key_dim] against caches [blocks, block_size, kv_heads,
    key_dim and value_dim]; features: softcap, alibi, window."""
    shared = keys.data_ptr() == values.data_ptr() and keys.stride() == values.stride()
    return AttentionShape(
        *(query.shape[1], keys.shape[2], keys.shape[3], values.shape[3], keys.shape[1], shared),
        *features,
        query.dtype == torch.float32,
    )


def tile_lookup_sizes(shape: AttentionShape) -> dict[str, int]:
    """What tiles are looked up by: the padded dimensions of a head (512 stands for latent
    attention, which has 64 more of the keys alone), bytes of a query's element."""
    head = max(_padded(shape.main), _padded(shape.value_dim))
    return {"head": head, "bytes": 4 if shape.wide else 2}


def choose_attention_tiles(shape: AttentionShape, table: str) -> TileSizes:
    """The table's choice for heads of this size. Raises ValueError where there is none."""
    return TileSizes(**choose_tiles(table, **tile_lookup_sizes(shape)))


@dataclass(frozen=True)
class QueryPacking:
    """How the queries of a group of heads fill tiles."""

    heads: int
    """Of a group in one tile."""
    parts: int
    """Tiles that a group needs for a token, 1 unless the group is larger than a tile."""
    tokens: int
    """In one tile."""


def pack_queries(tiles: TileSizes, shape: AttentionShape) -> QueryPacking:
    """Tokens are packed where the heads of a group leave room."""
    heads = min(shape.group, tiles.rows)
    return QueryPacking(heads, -(-shape.group // heads), tiles.rows // heads)


def constants(tiles: TileSizes, shape: AttentionShape) -> dict[str, int | bool]:
    """The constants that the kernels of decodes and of prefill chunks have in common."""
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
        "WINDOW": shape.window or 0,
    }


def decode_splits(contexts: npt.NDArray[np.int64], programs: int, processors: int) -> int:
    """Return the number of parts that the context of each decode is split into.

    A part of the longest context is at most an equal share of all work for each of WAVES programs
    per processor, and at most LONGEST_PART tokens, so that neither a small batch nor one long
    context among short ones leaves processors idle.

    Args:
        contexts: [decodes] visible tokens of each decode. Where a launch is recorded, for replays
            with other contexts: the longest that there may be.
        programs: per decode, without splits.
        processors: streaming multiprocessors of the device.
    """
    longest = int(contexts.max())
    share = -(-int(contexts.sum()) * programs // (PROGRAMS_PER_PROCESSOR * processors))
    return _splits(
        -(-longest // min(max(share, 1), MAX_DECODE_SPLIT_TOKENS)), longest, MIN_DECODE_SPLIT_TOKENS
    )


def prefill_splits(programs: int, longest: int, processors: int) -> int:
    """The same for tiles of prefill chunks, which are split where processors would be idle."""
    return _splits(processors // programs, longest, MIN_PREFILL_SPLIT_TOKENS)


def _splits(wanted: int, longest: int, min_arch: int) -> int:
    return max(1, min(wanted, -(-longest // min_arch), SPLITS))


def _padded(size: int) -> int:
    """The next power of two that tensor cores take."""
    return max(int(triton.next_power_of_2(size)), 16)


def with_float32_queries(shape: AttentionShape) -> AttentionShape:
    """The same in float32."""
    return replace(shape, wide=True)


HEAD_CONFIGS = {
    "groups of 7 heads of 128": AttentionShape(28, 4, 128, 128, 16),
    "groups of 4 heads of 128": AttentionShape(32, 8, 128, 128, 16),
    "groups of 7 heads of 64": AttentionShape(14, 2, 64, 64, 16),
    "32 heads of 96": AttentionShape(32, 32, 96, 96, 16),
    "groups of 2 heads of 256": AttentionShape(16, 8, 256, 256, 16),
    "16 latent heads": AttentionShape(16, 1, 576, 512, 16, shared=True),
}
"""As of Qwen2.5-7B, Llama-3.1-8B, Qwen2.5-0.5B, Phi-3-mini, Gemma-2-9B and DeepSeek-V2-Lite."""
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
            ("ALiBi, heads of 128", "groups of 4 heads of 128", {"alibi": True}),
        )
    ),
    *(
        (f"{label}, fp32 on fp32", with_float32_queries(shape), "fp32", "fp32", 80)
        for label, shape in HEAD_CONFIGS.items()
    ),
]
"""Label, shape, types of queries and cache, oldest architecture."""


def compiled(
    name: str,
    kernel: Any,
    table: str,
    types: Mapping[str, str],
    more: Mapping[str, Any],
) -> list[KernelSpec]:
    """A kernel with the arguments that those of decodes and prefill share, for all of CASES; types
    and constants of its others."""
    return [
        KernelSpec(
            f"{name}, {label}",
            kernel,
            {**_types(query, cached, shape), **types},
            {**({} if shape.alibi else {"slopes": None}), **more},
            tuned=tiled(table, shape),
            tensor_cores=True,
            min_arch=min_arch,
            aligned=tuple(name for name in _types(query, cached, shape) if name in ALIGNED),
        )
        for label, shape, query, cached, min_arch in CASES
    ]


def tiled(table: str, shape: AttentionShape) -> TunedConstants:
    """The constants of a shape by its row of a table."""
    return TunedConstants(
        table, tile_lookup_sizes(shape), lambda use: constants(TileSizes(**use), shape)
    )


ALIGNED = (
    *("output", "query", "keys", "values", "slopes"),
    *("query_token", "query_head", "key_row", "key_head", "value_row", "value_head"),
)


def _types(query: str, cached: str, shape: AttentionShape) -> dict[str, str]:
    pointers = {"output": query, "query": query, "keys": cached, "values": cached}
    if shape.alibi:
        pointers["slopes"] = "fp32"
    tables = dict.fromkeys(("block_table", "context_len"), "i32")
    strides = ("query_token", "query_head", "key_row", "key_head", "value_row", "value_head")
    return {
        **{name: f"*{kind}" for name, kind in (pointers | tables).items()},
        **dict.fromkeys(("table_row", *strides), "i32"),
        **dict.fromkeys(("inner", "outer"), "fp32"),
    }
