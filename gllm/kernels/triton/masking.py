"""What rows of logits must not and may only bring, by masks and by what histories end with.

Owns the kernels and their launch; the rule is that of gllm/kernels/masking.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.history import Histories
from gllm.kernels.phrases import Phrases
from gllm.kernels.triton.ahead import Compiled
from gllm.kernels.triton.common import tokens_of

TILE = 4096
"""Tokens of the vocabulary that a program looks at."""
PHRASE = 32
"""Tokens of a phrase compared at once."""
WARPS = 4


@triton.jit(do_not_specialize=["size", "stride", "words"])
def _mask_kernel(logits, rows, masks, size, stride, words, TILE: tl.constexpr):
    """logits [rows, size] float32; masks [masks, words] int32: grid (masks, tiles)."""
    mask = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = columns < size
    word = tl.load(masks + mask * words + columns // 32, mask=inside, other=-1)
    allowed = (word >> (columns % 32)) & 1
    at = logits + tl.load(rows + mask) * stride + columns
    tl.store(at, tl.full([TILE], float("-inf"), tl.float32), mask=inside & (allowed == 0))


@triton.jit(do_not_specialize=["stride", "table_row", "longest"])
def _phrases_kernel(
    logits, table, rows, block_table, ends, prompts, owners, lengths, before, last,
    stride, table_row, longest,
    BLOCK_SIZE: tl.constexpr, PHRASE: tl.constexpr,
):  # fmt: skip
    """logits [rows, ...] float32; before [phrases, longest]: a program a phrase."""
    phrase = tl.program_id(0)
    history = tl.load(owners + phrase)
    end = tl.load(ends + history)
    length = tl.load(lengths + phrase)
    if end - tl.load(prompts + history) >= length:
        blocks = block_table + history * table_row
        others = tl.zeros([PHRASE], dtype=tl.int32)
        for start in range(0, longest, PHRASE):
            # Counted from the end of both.
            back = start + tl.arange(0, PHRASE) + 1
            there = back <= length
            tokens = tokens_of(table, blocks, end - back, there, BLOCK_SIZE)
            wanted = before + phrase.to(tl.int64) * longest + longest - back
            others += (tokens != tl.load(wanted, mask=there, other=-1)).to(tl.int32)
        if tl.sum(others, 0) == 0:
            at = logits + tl.load(rows + history) * stride + tl.load(last + phrase)
            tl.store(at, float("-inf"))


def keep_masked(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """As gllm.kernels.masking.keep_masked: logits [rows, vocabulary], rows [masks], masks [masks,
    words]. Nobody waits for the GPU."""
    size = logits.shape[1]
    _mask_kernel[(len(rows), triton.cdiv(size, TILE))](
        *(logits, rows, masks, size, logits.stride(0), masks.shape[1]), TILE=TILE, num_warps=WARPS
    )


def ban_phrases(logits: Tensor, table: Tensor, histories: Histories, phrases: "Phrases") -> None:
    """As gllm.kernels.masking.ban_phrases: logits [rows, vocabulary], table [slots]. Nobody waits
    for the GPU."""
    blocks = histories.block_table
    _phrases_kernel[(len(phrases.owners),)](
        *(logits, table, histories.rows, blocks, histories.lengths, histories.prompts),
        *(phrases.owners, phrases.lengths, phrases.before, phrases.last),
        *(logits.stride(0), blocks.stride(0), phrases.before.shape[1]),
        BLOCK_SIZE=histories.block_size,
        PHRASE=PHRASE,
        num_warps=1,
    )


_LOGITS = {"logits": "*fp32", "rows": "*i64", "stride": "i32"}
_MASKS = {**_LOGITS, "masks": "*i32", "size": "i32", "words": "i32"}
_PHRASES = {
    **_LOGITS,
    **dict.fromkeys(("table", "ends", "prompts", "owners", "lengths", "before", "last"), "*i64"),
    "block_table": "*i32",
    "table_row": "i32",
    "longest": "i32",
}
COMPILED = [
    Compiled(
        label=label,
        kernel=kernel,
        signature=signature,
        constants=constants,
        warps=warps,
        aligned=tuple(name for name, kind in signature.items() if kind.startswith("*")),
    )
    for label, kernel, signature, constants, warps in (
        ("masks of bits", _mask_kernel, _MASKS, {"TILE": TILE}, WARPS),
        (
            "bad words, blocks of 16",
            _phrases_kernel,
            _PHRASES,
            {"BLOCK_SIZE": 16, "PHRASE": PHRASE},
            1,
        ),
    )
]
