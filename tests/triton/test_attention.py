"""Paged attention for GPUs against the torch reference, under Triton's interpreter."""

import dataclasses
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode

pytest.importorskip("triton")

from gllm.kernels import attention as reference
from gllm.kernels.alibi import compute_alibi_slopes
from gllm.kernels.attention_plan import (
    AttentionPlan,
    PagedBatch,
    allocate_device_tables,
    build_device_tables,
    plan_attention,
    write_device_tables,
)
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.attention_window import AttentionChunk, AttentionWindow
from gllm.kernels.triton import attention, attention_shapes, decode_attention, tiles
from gllm.kernels.triton.attention_shapes import SplitLimits
from tests.support.examples import num_examples
from tests.support.models.kernel_builds import using_build

CPU = torch.device("cpu")
SMALL = [
    tiles.TileRow(row.up_to, {"rows": 16, "keys": 16, "warps": 4, "stages": 2})
    for row in tiles.read_tile_file(tiles.DEFAULT).tables["decode"]
]
LIMITS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 0.03}
GUARD = 64
Rows = list[tuple[int, int]]
"""(cached tokens, new tokens), decodes first."""


@pytest.fixture(autouse=True, scope="module")
def plain_reference() -> Iterator[None]:
    """The reference by torch, also where kernels for CPUs are compiled."""
    with using_build("torch"):
        yield


class Poison(TorchFunctionMode):
    """Memory full of NaN, with more of it around, for outputs and results of parts."""

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.empty:
            return self.empty(*args, dtype=options["dtype"])
        # The interpreter itself makes empty ones, of one dimension.
        if func is Tensor.new_empty and len(args) > 2:
            return self.empty(*args[1:], dtype=args[0].dtype)
        return func(*args, **options)

    def empty(self, *size: int, dtype: torch.dtype) -> Tensor:
        around = torch.full((math.prod(size) + 2 * GUARD,), math.nan, dtype=dtype)
        self.given.append(around)
        return around[GUARD:-GUARD].view(size)

    def intact(self) -> bool:
        """Whether nobody wrote beyond what was asked for."""
        edges = [edge for around in self.given for edge in (around[:GUARD], around[-GUARD:])]
        return all(bool(edge.isnan().all()) for edge in edges)


def launched(
    query: Tensor,
    caches: tuple[Tensor, Tensor],
    plan: AttentionPlan,
    scores: AttentionScaling,
    processors: int = 1,
    small: bool = True,
) -> Tensor:
    """The kernels' output, written to poisoned memory; small: with tiles so small that tiny
    contexts have several."""
    poison, tables = Poison(), {}
    limits = SplitLimits(processors=processors)
    if small:
        limits = SplitLimits(16, 16, processors)
        tables = dict.fromkeys(("prefill", "decode"), SMALL)
    with tiles.override_tiles(tables), poison:
        output = attention.paged_attention(query, *caches, plan, scores, limits)
    assert poison.given
    assert poison.intact()
    return output


@dataclass
class Case:
    """A micro-batch with its cache, full of NaN where no row has tokens."""

    rows: Rows
    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    shared: bool = False
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cached: torch.dtype | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        totals = np.array([cached + new for cached, new in self.rows])
        counts = -(-totals // self.block_size)
        shuffled = torch.randperm(int(counts.sum()) + 1, generator=generator).numpy()
        unused, shuffled = shuffled[0], shuffled[1:]
        table = np.full((len(totals), counts.max() + 1), unused)
        size = (len(shuffled) + 2, self.block_size, self.kv_heads)
        dims = [self.key_dim] if self.shared else [self.key_dim, self.value_dim]
        caches = [torch.full((*size, dim), math.nan) for dim in dims]
        for row, (total, count) in enumerate(zip(totals, counts, strict=True)):
            table[row, :count], shuffled = shuffled[:count], shuffled[count:]
            at = np.arange(total)
            slots = table[row, at // self.block_size] * self.block_size + at % self.block_size
            for cache in caches:
                drawn = torch.randn(total, *cache.shape[2:], generator=generator)
                cache.flatten(0, 1)[torch.from_numpy(slots)] = drawn
        for cache in caches:
            cache[-1] = 0
        caches = [cache.to(self.cached or self.dtype) for cache in caches]
        values = caches[0][..., : self.value_dim] if self.shared else caches[1]
        self.caches = caches[0], values
        starts = np.cumsum([0] + [new for _, new in self.rows])
        decodes = next((i for i, (_, new) in enumerate(self.rows) if new > 1), len(totals))
        self.paged = PagedBatch(table, starts, totals, decodes, self.block_size, size[0] - 1)
        query = torch.randn(int(starts[-1]), self.heads, self.key_dim, generator=generator)
        self.query = query.to(self.dtype)

    def expected(self, scores: AttentionScaling, window: AttentionWindow = None) -> Tensor:
        plan = plan_attention(self.paged, torch.float32, window)
        assert plan.gathers is not None
        keys, values = (cache.to(torch.float32) for cache in self.caches)
        return reference.paged_attention(self.query.float(), keys, values, plan, scores)

    def plan(self, window: AttentionWindow = None) -> AttentionPlan:
        """As for a device."""
        planned = plan_attention(self.paged, torch.float32, window)
        tables = build_device_tables(self.paged, CPU)
        return dataclasses.replace(planned, backend="triton", gathers=None, tables=tables)

    def check(
        self,
        scores: AttentionScaling,
        window: AttentionWindow = None,
        processors: int = 1,
        small: bool = True,
    ) -> None:
        actual = launched(self.query, self.caches, self.plan(window), scores, processors, small)
        assert actual.dtype == self.dtype
        limit = LIMITS[self.dtype]
        expected = self.expected(scores, window)
        torch.testing.assert_close(actual.float(), expected, rtol=limit, atol=limit)


def scores_of(kind: str, heads: int) -> AttentionScaling:
    slopes = compute_alibi_slopes(heads) if kind == "alibi" else None
    sinks = 3 * torch.randn(heads) if kind == "sinks" else None
    return AttentionScaling(0.25, 2.0 if kind == "softcap" else None, slopes, sinks)


kinds = st.sampled_from(["plain", "softcap", "alibi", "sinks"])
dtypes = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
heads_of = st.tuples(st.integers(1, 2), st.sampled_from([1, 3, 7, 18]))
decode_rows = st.lists(st.tuples(st.integers(0, 45), st.just(1)), max_size=3)
chunk_rows = st.lists(st.tuples(st.integers(0, 25), st.integers(2, 12)), max_size=2)


@settings(max_examples=num_examples(5, 30), deadline=None, derandomize=True)
@given(
    decode_rows,
    chunk_rows,
    st.integers(1, 17),
    heads_of,
    st.sampled_from([16, 24]),
    st.none() | st.integers(1, 50) | st.integers(1, 50).map(AttentionChunk),
    kinds,
    dtypes,
    st.sampled_from([1, 12]),
)
def test_matches_the_reference(
    decodes: Rows,
    chunks: Rows,
    block_size: int,
    heads: tuple[int, int],
    dim: int,
    window: AttentionWindow,
    kind: str,
    dtype: torch.dtype,
    processors: int,
) -> None:
    if not decodes and not chunks:
        return
    kv_heads, group = heads
    count = kv_heads * group
    case = Case(decodes + chunks, count, kv_heads, dim, dim, False, block_size, dtype)
    case.check(scores_of(kind, count), window, processors)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim", "shared"),
    [
        (2, 1, 64, 64, False),
        (2, 2, 96, 96, False),
        (7, 1, 128, 128, False),
        (2, 1, 256, 256, False),
        (18, 1, 576, 512, True),
        (2, 1, 24, 40, False),
    ],
)
def test_real_heads_in_real_tiles(
    heads: int, kv_heads: int, key_dim: int, value_dim: int, shared: bool
) -> None:
    rows = [(40, 1), (30, 5)]
    case = Case(rows, heads, kv_heads, key_dim, value_dim, shared, 16, torch.bfloat16)
    case.check(AttentionScaling(key_dim**-0.5), small=False)


@pytest.mark.parametrize("processors", [pytest.param(1, marks=pytest.mark.full), 20])
def test_latents_are_read_once_as_keys_and_values(processors: int) -> None:
    case = Case([(40, 1), (3, 1), (20, 3)], 18, 1, 40, 24, True, dtype=torch.bfloat16)
    case.check(AttentionScaling(0.2), processors=processors)


@pytest.mark.parametrize(
    ("dtype", "shared"), [(torch.bfloat16, False), (torch.float16, True)], ids=str
)
def test_a_cache_of_float8(dtype: torch.dtype, shared: bool) -> None:
    rows = [(40, 1), (3, 1), (20, 4)]
    case = Case(rows, 6, 2, 24, 16, shared, dtype=dtype, cached=torch.float8_e4m3fn)
    case.check(AttentionScaling(0.2), processors=8)


@pytest.mark.parametrize(
    ("dtype", "cached"), [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16)]
)
def test_a_cache_of_another_16_bits(dtype: torch.dtype, cached: torch.dtype) -> None:
    Case([(20, 1), (9, 4)], 2, 1, 24, 16, dtype=dtype, cached=cached).check(AttentionScaling(0.2))


@pytest.mark.parametrize(
    "window", [pytest.param(None, marks=pytest.mark.full), 45, AttentionChunk(40)]
)
def test_long_contexts_are_split_and_short_ones_use_fewer_parts(window: AttentionWindow) -> None:
    rows = [(97, 1), (0, 1), (32, 1)]
    case = Case(rows, 3, 1, 16, 16)
    sinks = torch.tensor([-1.0, 0.5, 4.0])
    for processors in (3, 1000):
        case.check(AttentionScaling(0.2), window, processors)
    case.check(AttentionScaling(0.2, sinks=sinks), window, 1000)


@pytest.mark.parametrize(
    ("window", "processors"),
    [
        (None, 11),
        (45, 1000),
        (AttentionChunk(98), 1000),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in ((None, 4), (None, 1000), (45, 4), (45, 11))
        ),
    ],
)
def test_chunks_of_long_contexts_are_split(window: AttentionWindow, processors: int) -> None:
    """Also beside decodes, and where a part of a short one's context is empty."""
    case = Case([(9, 1), (97, 5), (0, 3), (64, 6)], 6, 2, 16, 16, dtype=torch.bfloat16)
    case.check(AttentionScaling(0.2, sinks=torch.randn(6)), window, processors)


def test_a_launch_is_replayed_for_other_contexts() -> None:
    """The plan's rows choose the grid; the tables say what is there, fewer rows too."""
    case = Case([(40, 1), (10, 1)], 2, 1, 16, 16)
    longest = np.full(4, 100)
    rows = PagedBatch(np.zeros((4, 25), dtype=np.int64), np.arange(5), longest, 4, 4, 1)
    tables = allocate_device_tables(4, 25, CPU)
    write_device_tables(case.paged, tables)
    tables.block_table[:, case.paged.block_table.shape[1] :] = 10**6
    plan = AttentionPlan(rows, torch.empty(0), None, "triton", tables=tables)
    query = torch.cat((case.query, torch.full_like(case.query, math.nan)))
    for processors in (1, 40):
        actual = launched(query, case.caches, plan, AttentionScaling(0.2), processors)
        torch.testing.assert_close(
            actual[:2], case.expected(AttentionScaling(0.2)), rtol=1e-5, atol=1e-5
        )
        assert not actual[2:].any()


def test_queries_of_a_fused_projection() -> None:
    case = Case([(9, 1), (20, 9)], 4, 2, 16, 16)
    fused = torch.full((10, 8, 16), math.nan)
    fused[:, :4] = case.query
    case.query = fused[:, :4]
    case.check(AttentionScaling(0.2))


@pytest.mark.parametrize(
    ("contexts", "programs", "processors", "splits"),
    [
        # A small batch: two programs for each processor.
        ([100_000], 4, 132, 66),
        ([100_000], 1, 132, 128),
        ([4096] * 16, 4, 108, 4),
        # A share of the work, but LEAST tokens.
        ([300], 4, 132, 3),
        ([1], 4, 132, 1),
        ([0, 0], 4, 132, 1),
        # A large batch of contexts alike: as they are, up to LONGEST_PART.
        ([512] * 256, 8, 132, 1),
        ([8192] * 256, 8, 132, 1),
        ([131_072] * 256, 8, 132, 16),
        # One long context among short ones, as many parts as keep the processors alike.
        ([32_768] + [512] * 255, 8, 132, 7),
        ([131_072] + [512] * 63, 8, 132, 27),
        # Of so many heads that a batch fills the GPU without splits.
        ([8192] * 8, 32, 132, 2),
        ([8192] * 16, 32, 132, 1),
        ([8192] * 16, 32, 264, 2),
    ],
)
def test_decodes_are_split_by_batch_heads_contexts_and_processors(
    contexts: list[int], programs: int, processors: int, splits: int
) -> None:
    assert attention_shapes.decode_splits(np.array(contexts), programs, processors) == splits


@pytest.mark.parametrize(
    ("programs", "longest", "processors", "splits"),
    [
        (4, 100_000, 132, 33),
        (1, 100_000, 132, 98),
        (1, 1_000_000, 132, 128),
        (2048, 100_000, 132, 1),
        (4, 300, 132, 1),
        (4, 1, 132, 1),
        (64, 4096, 108, 1),
        (16, 32_768, 132, 8),
        (100, 32_768, 132, 1),
    ],
)
def test_chunks_are_split_where_processors_would_be_idle(
    programs: int, longest: int, processors: int, splits: int
) -> None:
    assert attention_shapes.prefill_splits(programs, longest, processors) == splits


def test_a_long_context_among_short_ones_is_split() -> None:
    """As are the short ones, whose last parts are empty."""
    case = Case([(97, 1), *[(3, 1)] * 9], 2, 1, 16, 16)
    case.check(AttentionScaling(0.2), processors=2)


def test_what_is_compiled_ahead_has_all_arguments() -> None:
    for entry in attention.KERNEL_SPECS + decode_attention.KERNEL_SPECS:
        given = [*entry.signature, *entry.launch()[0]]
        assert sorted(given) == sorted(inspect.signature(entry.kernel.fn).parameters), entry.label
        assert set(entry.aligned) <= set(entry.signature), entry.label
