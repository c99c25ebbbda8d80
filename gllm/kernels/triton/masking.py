"""GPU kernels that apply token bitmasks and bad words to logits.

The rules are those of gllm/kernels/masking.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.bad_words import BadWords
from gllm.kernels.history import TokenHistories
from gllm.kernels.triton.common import load_history_tokens
from gllm.kernels.triton.kernel_specs import KernelSpec

TILE = 4096
"""Tokens of the vocabulary per program."""
PHRASE = 32
"""Tokens of a phrase compared per iteration."""
WARPS = 4
"""Warps per program of the bitmask kernel."""


@triton.jit(do_not_specialize=["size", "stride", "words"])
def _mask_kernel(logits, rows, masks, size, stride, words, TILE: tl.constexpr):
    """Set logits whose bit is 0 to -inf.

    Grid: (masks, tiles of the vocabulary). logits [.., size] float32, `stride` elements between
    rows; rows [masks] int64: the row of each mask; masks [masks, words] int32, 32 tokens per word.
    """
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
    """Ban the last token of each phrase whose other tokens end the output of its history.

    Grid: (phrases,). logits [rows, size] float32, `stride` elements between rows; table [slots]
    int64: tokens by KV-cache slot; rows, ends, prompts [histories] int64: row of the logits, total
    and prompt tokens; block_table [histories, table_row] int32; owners, lengths, last [phrases]
    int64 and before [phrases, longest] int64 as in BadWords.
    """
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
            tokens = load_history_tokens(table, blocks, end - back, there, BLOCK_SIZE)
            wanted = before + phrase.to(tl.int64) * longest + longest - back
            others += (tokens != tl.load(wanted, mask=there, other=-1)).to(tl.int32)
        if tl.sum(others, 0) == 0:
            at = logits + tl.load(rows + history) * stride + tl.load(last + phrase)
            tl.store(at, float("-inf"))


def apply_token_bitmask(logits: Tensor, rows: Tensor, masks: Tensor, tile: int = TILE) -> None:
    """Set the logits of tokens whose bit is 0 to -inf with a Triton kernel, in place.

    Does not synchronize. logits [rows, vocabulary] float32, rows [masks] int64, masks [masks,
    words] int32; tile: tokens of the vocabulary per program.
    """
    size = logits.shape[1]
    _mask_kernel[(len(rows), triton.cdiv(size, tile))](
        logits, rows, masks, size, logits.stride(0), masks.shape[1], TILE=tile, num_warps=WARPS
    )


def apply_bad_words(
    logits: Tensor,
    table: Tensor,
    histories: TokenHistories,
    bad_words: BadWords,
    phrase: int = PHRASE,
) -> None:
    """Ban the last token of each bad-words phrase whose other tokens end the output (Triton).

    logits [rows, vocabulary] float32, table [slots] int64: token per KV-cache slot; phrase: tokens
    compared per iteration.
    """
    blocks = histories.block_table
    _phrases_kernel[(len(bad_words.owners),)](
        logits,
        table,
        histories.rows,
        blocks,
        histories.lengths,
        histories.prompts,
        bad_words.owners,
        bad_words.lengths,
        bad_words.before,
        bad_words.last,
        logits.stride(0),
        blocks.stride(0),
        bad_words.before.shape[1],
        BLOCK_SIZE=histories.block_size,
        PHRASE=phrase,
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
KERNEL_SPECS = [
    KernelSpec(
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
