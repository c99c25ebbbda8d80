"""GPU kernels that apply penalties to the tokens of histories.

The rule is that of gllm/kernels/penalties.py. The first kernel counts the tokens of a history in a
buffer as wide as the vocabulary. The second one visits the history again: the program that takes
the count of a token out of the buffer lowers its logit, once for all occurrences. Apart from
zeroing the buffer, the cost depends on the histories.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.history import TokenHistories
from gllm.kernels.triton.common import load_history_tokens
from gllm.kernels.triton.kernel_specs import KernelSpec

TILE = 512
"""Tokens of a history per program."""
WARPS = 4
"""Warps per program."""
IN_PROMPT, ONCE = tl.constexpr(1), tl.constexpr(2)
"""Count format: bit 0 is set for a token of the prompt, the bits above count output tokens."""
LARGEST = tl.constexpr(3.4028234663852886e38)
"""Largest finite float32."""


@triton.jit
def _part_of(
    table, block_table, lengths, prompts, repetition, size, table_row,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Load a program's tokens [TILE] of its history; return them, validity and in-output flags."""
    history = tl.program_id(0)
    positions = tl.program_id(1) * TILE + tl.arange(0, TILE)
    prompt = tl.load(prompts + history)
    # Without a repetition penalty a prompt does not matter.
    first = tl.where(repetition != 1.0, 0, prompt)
    there = (positions >= first) & (positions < tl.load(lengths + history))
    blocks = block_table + history.to(tl.int64) * table_row
    tokens = load_history_tokens(table, blocks, positions, there, BLOCK_SIZE)
    return tokens, (tokens >= 0) & (tokens < size), positions >= prompt


@triton.jit(do_not_specialize=["size", "table_row"])
def _count_kernel(
    counts, table, block_table, lengths, prompts, settings, size, table_row,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Count TILE tokens of a history.

    Grid: (histories, tiles). counts [histories, size] int32, initially zero; table [slots] int64;
    block_table [histories, table_row] int32; lengths and prompts [histories] int64; settings [3,
    histories] float64.
    """
    tokens, there, in_output = _part_of(
        table, block_table, lengths, prompts, tl.load(settings + tl.program_id(0)), size, table_row,
        BLOCK_SIZE, TILE,
    )  # fmt: skip
    at = counts + tl.program_id(0).to(tl.int64) * size + tokens
    once = tl.full([TILE], ONCE, tl.int32)
    seen = tl.full([TILE], IN_PROMPT, tl.int32)
    tl.atomic_add(at, once, mask=there & in_output, sem="relaxed")
    tl.atomic_or(at, seen, mask=there & (in_output == 0), sem="relaxed")


@triton.jit(do_not_specialize=["size", "stride", "table_row"])
def _penalize_kernel(
    logits, counts, rows, table, block_table, lengths, prompts, settings, size, stride, table_row,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Penalize the logits of TILE tokens of a history and reset their counts to 0.

    Grid: (histories, tiles). logits [.., size] float32, `stride` elements between rows; rows
    [histories] int64: row of the logits; the others as in _count_kernel.
    """
    history = tl.program_id(0)
    repetition = tl.load(settings + history)
    tokens, there, _ = _part_of(
        table, block_table, lengths, prompts, repetition, size, table_row, BLOCK_SIZE, TILE
    )
    nothing = tl.zeros([TILE], dtype=tl.int32)
    taken = counts + history.to(tl.int64) * size + tokens
    count = tl.atomic_xchg(taken, nothing, mask=there, sem="relaxed")
    there = there & (count > 0)
    at = logits + tl.load(rows + history) * stride + tokens
    before = tl.load(at, mask=there, other=0.0)
    values = before.to(tl.float64)
    values = tl.where(values > 0, values / repetition, values * repetition)
    often = (count // ONCE).to(tl.float64)
    frequency = tl.load(settings + tl.num_programs(0) + history)
    presence = tl.load(settings + 2 * tl.num_programs(0) + history)
    values -= frequency * often + tl.where(often > 0, presence, 0.0)
    values = tl.minimum(tl.maximum(values, -LARGEST), LARGEST)
    after = tl.where(before == float("-inf"), before, values.to(tl.float32))
    tl.store(at, after, mask=there)


def apply_history_penalties(
    logits: Tensor,
    table: Tensor,
    histories: TokenHistories,
    settings: Tensor,
    tile: int = TILE,
) -> None:
    """Apply repetition, frequency and presence penalties with a Triton kernel, in place.

    Does not synchronize. logits [rows, vocabulary] float32; table [slots] int64: token per KV-cache
    slot; settings [3, histories] float64 (repetition, frequency, presence); tile: tokens of a
    sequence per program.
    """
    count, size = len(histories.rows), logits.shape[1]
    counts = torch.zeros(count, size, dtype=torch.int32, device=logits.device)
    blocks, places = histories.block_table, (histories.lengths, histories.prompts)
    grid = (count, triton.cdiv(histories.max_tokens, tile))
    constants = {"BLOCK_SIZE": histories.block_size, "TILE": tile, "num_warps": WARPS}
    where = (table, blocks, *places, settings)
    _count_kernel[grid](counts, *where, size, blocks.stride(0), **constants)
    _penalize_kernel[grid](
        logits,
        counts,
        histories.rows,
        *where,
        size,
        logits.stride(0),
        blocks.stride(0),
        **constants,
    )


_TYPES = {
    "counts": "*i32",
    "table": "*i64",
    "block_table": "*i32",
    "lengths": "*i64",
    "prompts": "*i64",
    "settings": "*fp64",
    "size": "i32",
    "table_row": "i32",
}
KERNEL_SPECS = [
    KernelSpec(
        label=f"penalties, {name}, blocks of 16",
        kernel=kernel,
        signature=_TYPES | more,
        constants={"BLOCK_SIZE": 16, "TILE": TILE},
        warps=WARPS,
        aligned=tuple(key for key, kind in (_TYPES | more).items() if kind.startswith("*")),
    )
    for name, kernel, more in (
        ("counted", _count_kernel, {}),
        (
            "applied",
            _penalize_kernel,
            {"logits": "*fp32", "rows": "*i64", "stride": "i32"},
        ),
    )
]
