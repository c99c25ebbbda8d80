"""Sampling of one token per row of logits on GPUs, without sorting.

The rule is that of gllm/kernels/sampling.py. A program samples one row:

1. Find the largest logit, and the distance of every other logit from it (ascending distances are
   descending probabilities).
2. Collect the distances up to a cut-off that includes all tokens kept by top-k and top-p.
3. Among them find the largest kept distance by bisection over the bits of a distance: the smallest
   one up to which there are k tokens, then the smallest one up to which there is the share p.
4. Compute the kept weight of each tile of the row, find the tile of the random number, then the
   token.

Sums have a fixed order, so a row and a number always give the same token.

Source of the threshold search instead of a sort: Ye et al., "FlashInfer" (2025), there with random
pivots and rejection.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.random_numbers import GAMMA, MULTIPLIER_1, MULTIPLIER_2
from gllm.kernels.sampling_plan import SamplingPlan
from gllm.kernels.triton.kernel_specs import KernelSpec

TILE = 4096
"""Tokens per iteration of a program."""
WARPS = 8
"""Warps per program."""
LARGEST = tl.constexpr(3.4028234663852886e38)
"""Largest finite float32."""
LARGEST_BITS = tl.constexpr(0x7F7FFFFF)
"""Bits of LARGEST, the largest finite distance; a banned token has an infinite one."""
MARGIN = tl.constexpr(1.0 + 1e-5)
"""Factor that covers the rounding error of a float32 sum."""
_GAMMA = tl.constexpr(GAMMA)
_MULTIPLIER_1 = tl.constexpr(MULTIPLIER_1)
_MULTIPLIER_2 = tl.constexpr(MULTIPLIER_2)


@triton.jit
def _split_mix(state):
    """Return random_numbers.splitmix64 of int64."""
    mixed = state + _GAMMA
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * _MULTIPLIER_1
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * _MULTIPLIER_2
    return mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)


@triton.jit
def _uniform(seed, choice, index):
    """Return random_numbers.random_uniform of int64 counters."""
    mixed = _split_mix(_split_mix(_split_mix(seed) ^ choice) ^ index)
    return ((mixed >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _distances(row, start, size, largest, TILE: tl.constexpr):
    """Return how far the logits [TILE] of a tile are below the largest; infinity past the end."""
    columns = start + tl.arange(0, TILE)
    logits = tl.load(row + columns, mask=columns < size, other=float("-inf"))
    # 0 in place of -0, so that bits compare as numbers do.
    return tl.abs(logits - largest)


@triton.jit
def _weights(distances, temperature):
    """Return exp(-distance / temperature)."""
    return tl.exp(tl.div_rn(-distances, temperature))


@triton.jit
def _measure_up_to(held, count, bits, temperature, BY_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Return the count or the weight, float64, of held distances up to that of `bits`."""
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, count, TILE):
        columns = start + tl.arange(0, TILE)
        distances = tl.load(held + columns, mask=columns < count, other=float("inf"))
        inside = distances.to(tl.int32, bitcast=True) <= bits
        measure = inside.to(tl.float64)
        if not BY_COUNT:
            measure = tl.where(inside, _weights(distances, temperature), 0.0).to(tl.float64)
        total += tl.sum(measure, 0)
    return total


@triton.jit
def _least(held, count, highest, need, temperature, BY_COUNT: tl.constexpr, TILE: tl.constexpr):
    """Return the bits of the smallest distance whose measure is at least `need`, up to highest."""
    low = tl.full((), 0, tl.int32)
    high = highest
    while low < high:
        middle = low + (high - low) // 2
        if _measure_up_to(held, count, middle, temperature, BY_COUNT, TILE) >= need:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _cutoff(row, size, largest, temperature, top_k, top_p, TILE: tl.constexpr):
    """Return a distance that includes all tokens kept by top-k or, without it, top-p.

    Also return the weight [] float64 of the row in case of top-p.
    """
    # The nearer it is, the less there is to search; far ones are for flat distributions.
    unit = tl.maximum(temperature, 1.0)
    sum_0 = tl.zeros((TILE,), tl.float32)
    sum_1 = tl.zeros((TILE,), tl.float32)
    sum_2 = tl.zeros((TILE,), tl.float32)
    sum_3 = tl.zeros((TILE,), tl.float32)
    total = tl.full((), 0.0, tl.float64)
    for start in range(0, size, TILE):
        distances = _distances(row, start, size, largest, TILE)
        measure = tl.where(top_k > 0, 1.0, _weights(distances, temperature))
        sum_0 += tl.where(distances <= 3.0 * unit, measure, 0.0)
        sum_1 += tl.where(distances <= 6.0 * unit, measure, 0.0)
        sum_2 += tl.where(distances <= 9.0 * unit, measure, 0.0)
        sum_3 += tl.where(distances <= 13.0 * unit, measure, 0.0)
        total += tl.sum(measure, 0).to(tl.float64)
    need = tl.where(top_k > 0, top_k.to(tl.float64), top_p.to(tl.float64) * total * MARGIN)
    cut = tl.where(tl.sum(sum_3, 0).to(tl.float64) >= need, 13.0 * unit, LARGEST)
    cut = tl.where(tl.sum(sum_2, 0).to(tl.float64) >= need, 9.0 * unit, cut)
    cut = tl.where(tl.sum(sum_1, 0).to(tl.float64) >= need, 6.0 * unit, cut)
    cut = tl.where(tl.sum(sum_0, 0).to(tl.float64) >= need, 3.0 * unit, cut)
    return cut, total


@triton.jit
def _hold(row, held, size, largest, cut, TILE: tl.constexpr):
    """Write the distances up to `cut` to `held` and return their number."""
    count = 0
    for start in range(0, size, TILE):
        distances = _distances(row, start, size, largest, TILE)
        near = distances <= cut
        places = count + tl.cumsum(near.to(tl.int32), 0) - 1
        tl.store(held + places, distances, mask=near)
        count += tl.sum(near.to(tl.int32), 0)
    # The threads of a program read what others wrote.
    tl.debug_barrier()
    return count


@triton.jit
def _last_kept(row, held, size, largest, temperature, top_k, top_p, TILE: tl.constexpr):
    """Return the bits of the largest kept distance, and the number of kept tokens at it."""
    cut, total = _cutoff(row, size, largest, temperature, top_k, top_p, TILE)
    count = _hold(row, held, size, largest, cut, TILE)
    last = cut.to(tl.int32, bitcast=True)
    equals = tl.full((), 0, tl.int32) + size
    if top_k > 0:
        last = _least(held, count, last, top_k.to(tl.float64), temperature, True, TILE)
        closer = _measure_up_to(held, count, last - 1, temperature, True, TILE)
        equals = top_k - closer.to(tl.int32)
        weight = _weights(last.to(tl.float32, bitcast=True), temperature).to(tl.float64)
        total = _measure_up_to(held, count, last - 1, temperature, False, TILE)
        total += weight * equals
    if top_p <= 1.0:
        need = top_p.to(tl.float64) * total
        nearer = _least(held, count, last, need, temperature, False, TILE)
        equals = tl.where(nearer < last, size, equals)
        last = nearer
        before = _measure_up_to(held, count, last - 1, temperature, False, TILE)
        weight = _weights(last.to(tl.float32, bitcast=True), temperature).to(tl.float64)
        # Those before which there is less than the share; all where they weigh nothing.
        fitting = tl.ceil((need - before) / tl.maximum(weight, 1e-300))
        fitting = tl.minimum(tl.maximum(fitting, 1.0), size.to(tl.float64))
        equals = tl.minimum(equals, fitting.to(tl.int32))
    return last, equals


@triton.jit
def _kept(distances, temperature, min_p, last, equals, seen):
    """Return the kept weights [TILE] of a tile, and its number of tokens at distance `last`.

    seen: number of tokens at this distance in earlier tiles.
    """
    bits = distances.to(tl.int32, bitcast=True)
    level = (bits == last).to(tl.int32)
    rank = seen + tl.cumsum(level, 0)
    weights = _weights(distances, temperature)
    kept = (bits < last) | ((bits == last) & (rank <= equals))
    return tl.where(kept & (weights >= min_p), weights, 0.0), tl.sum(level, 0)


@triton.jit
def _passing(sums, number, places):
    """Return the first of places [n] where the running sum exceeds `number`, and the sum before.

    The place is at most the last one with a positive sum; sums [n] float64.
    """
    running = tl.cumsum(sums, 0)
    above = tl.min(tl.where((running > number) & (sums > 0), places, 1 << 30), 0)
    final = tl.max(tl.where(sums > 0, places, 0), 0)
    place = tl.minimum(above, final)
    return place, tl.sum(tl.where(places < place, sums, 0.0), 0)


@triton.jit
def _draw(
    row, size, largest, temperature, min_p, last, equals, number,
    TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Return the token at which the cumulative share of the kept weights exceeds `number`."""
    tiles = tl.arange(0, TILES)
    sums = tl.zeros((TILES,), tl.float64)
    earlier = tl.zeros((TILES,), tl.int32)
    seen = 0
    for start in range(0, size, TILE):
        distances = _distances(row, start, size, largest, TILE)
        weights, level = _kept(distances, temperature, min_p, last, equals, seen)
        here = tiles == start // TILE
        sums = tl.where(here, tl.sum(weights, 0).to(tl.float64), sums)
        earlier = tl.where(here, seen, earlier)
        seen += level
    target = number * tl.sum(sums, 0)
    tile, before = _passing(sums, target, tiles)
    seen = tl.sum(tl.where(tiles == tile, earlier, 0), 0)
    distances = _distances(row, tile * TILE, size, largest, TILE)
    weights, level = _kept(distances, temperature, min_p, last, equals, seen)
    column, _ = _passing(weights.to(tl.float64), target - before, tl.arange(0, TILE))
    return tile * TILE + column


@triton.jit(do_not_specialize=["rows"])
def _sample_kernel(
    tokens, logits, settings, counters, scratch, rows, size, stride,
    FILTERS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Sample the token of one row.

    Grid: (rows,). tokens [rows] int64; logits [rows, size] float32, `stride` elements between rows;
    settings [3, rows] float32 and counters [4, rows] int64: see SamplingPlan; scratch [rows, size]
    float32, used if a row has top-k or top-p.
    """
    program = tl.program_id(0)
    row = logits + program.to(tl.int64) * stride
    best = tl.full((TILE,), float("-inf"), tl.float32)
    where = tl.zeros((TILE,), tl.int32)
    for start in range(0, size, TILE):
        columns = start + tl.arange(0, TILE)
        values = tl.load(row + columns, mask=columns < size, other=float("-inf"))
        # Strictly above: the first of equals stays.
        where = tl.where(values > best, columns, where)
        best = tl.maximum(best, values)
    largest = tl.max(best, 0)
    token = tl.min(tl.where(best == largest, where, size - 1), 0)
    temperature = tl.load(settings + program)
    if temperature > 0:
        top_k = tl.load(counters + program)
        top_p = tl.load(settings + rows + program)
        min_p = tl.load(settings + 2 * rows + program)
        number = _uniform(
            tl.load(counters + rows + program),
            tl.load(counters + 2 * rows + program),
            tl.load(counters + 3 * rows + program),
        )
        last = tl.full((), LARGEST_BITS, tl.int32)
        equals = tl.full((), 0, tl.int32) + size
        # Two conditions: only the first is known when the kernel is compiled.
        if FILTERS:  # noqa: SIM102
            if (top_k > 0) | (top_p <= 1.0):
                held = scratch + program.to(tl.int64) * size
                limit = tl.minimum(top_k, size).to(tl.int32)
                last, equals = _last_kept(row, held, size, largest, temperature, limit, top_p, TILE)
        token = _draw(row, size, largest, temperature, min_p, last, equals, number, TILE, TILES)
        token = tl.minimum(token, size - 1)
    tl.store(tokens + program, token.to(tl.int64))


def sample(logits: Tensor, plan: "SamplingPlan", tile: int = TILE) -> Tensor:
    """Sample one token id per row of logits, [rows] int64, with a Triton kernel.

    Does not synchronize. logits are [rows, vocabulary] float32. The settings and counters of the
    plan are on the GPU of the logits. tile: tokens per iteration.
    """
    rows, size = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    scratch = torch.empty_like(logits) if plan.has_filters else logits
    if not rows:
        return tokens
    _sample_kernel[(rows,)](
        tokens,
        logits,
        plan.settings,
        plan.counters,
        scratch,
        rows,
        size,
        logits.stride(0),
        FILTERS=plan.has_filters,
        TILE=tile,
        TILES=triton.next_power_of_2(triton.cdiv(size, tile)),
        num_warps=WARPS,
    )
    return tokens


KERNEL_SPECS = [
    KernelSpec(
        label=f"sampling, vocabulary of {size}{', top-k and top-p' * has_filters}",
        kernel=_sample_kernel,
        signature={
            "tokens": "*i64",
            "logits": "*fp32",
            "settings": "*fp32",
            "counters": "*i64",
            "scratch": "*fp32",
            "rows": "i32",
            "size": "i32",
            "stride": "i32",
        },
        constants={
            "FILTERS": has_filters,
            "TILE": TILE,
            "TILES": triton.next_power_of_2(triton.cdiv(size, TILE)),
        },
        warps=WARPS,
        aligned=("tokens", "logits", "settings", "counters", "scratch", "stride"),
    )
    for size, has_filters in ((152_064, False), (152_064, True), (262_144, True))
]
