"""Tables that kernels on a device read, and tiles of prefill chunks."""

import numpy as np
import pytest
import torch

from gllm.kernels import attention_plan
from gllm.kernels.attention_plan import PagedBatch, plan_attention

CPU = torch.device("cpu")


def paged(rows: list[tuple[int, int]], block_size: int = 4) -> PagedBatch:
    """Rows of (cached tokens, new tokens) in blocks that count up."""
    lengths = np.array([cached + new for cached, new in rows])
    blocks = -(-int(lengths.max()) // block_size)
    table = np.arange(len(rows) * blocks).reshape(len(rows), blocks)
    starts = np.cumsum([0] + [new for _, new in rows])
    decodes = next((i for i, (_, new) in enumerate(rows) if new > 1), len(rows))
    return PagedBatch(table, starts, lengths, decodes, block_size, table.size)


def test_tables_hold_the_rows() -> None:
    rows = paged([(9, 1), (0, 1), (3, 5)])
    tables = attention_plan.build_device_tables(rows, CPU)
    assert tables.context_len.tolist() == [10, 1, 8]
    assert tables.query_start.tolist() == [0, 1, 2, 7]
    assert tables.block_table.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    parts = (tables.context_len, tables.query_start, tables.block_table)
    assert {part.dtype for part in parts} == {torch.int32}
    assert torch.cat([part.flatten() for part in parts]).equal(tables.buffer)


def test_larger_tables_are_filled_again() -> None:
    tables = attention_plan.allocate_device_tables(4, 5, CPU)
    attention_plan.write_device_tables(paged([(9, 1), (3, 1), (0, 8), (2, 2)]), tables)
    tables.block_table[:, 2:] = -7
    attention_plan.write_device_tables(paged([(4, 1), (6, 1)]), tables)
    assert tables.context_len.tolist() == [5, 7, 0, 0]
    assert tables.query_start.tolist() == [0, 1, 2, 2, 2]
    assert tables.block_table[:2].tolist() == [[0, 1, -7, -7, -7], [2, 3, -7, -7, -7]]


def test_a_plan_for_a_device_has_tables_there_and_no_gathers() -> None:
    rows, meta = paged([(9, 1), (3, 5)]), torch.device("meta")
    plan = plan_attention(rows, torch.float32, 3, meta)
    assert plan.tables is not None
    assert plan.tables.block_table.shape == (2, 3)
    assert plan.tables.buffer.device == meta
    assert plan.slots.device == meta
    assert plan.tables.get_prefill_tiles(rows, 2).shape == (3, 2)
    assert plan.tables.get_prefill_tiles(rows, 2) is plan.tables.get_prefill_tiles(rows, 2)
    assert (plan.gathers, plan.window) == (None, 3)
    assert plan_attention(rows, torch.float32, 3, CPU).tables is None


@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_tiles_cover_each_token_of_the_chunks_once(tokens: int) -> None:
    rows = paged([(40, 1), (0, 1), (7, 5), (2, 1), (0, 16), (30, 17)])
    tiles = attention_plan.list_prefill_tiles(rows, tokens)
    assert tiles.dtype == np.int32
    assert tiles.shape[1] == 2
    counts = np.diff(rows.query_start)
    found = [
        (row, token)
        for row, first in tiles.tolist()
        for token in range(first, min(first + tokens, counts[row]))
    ]
    assert sorted(found) == [(row, token) for row in range(2, 6) for token in range(counts[row])]
    seen = [rows.context_len[row] - counts[row] + first for row, first in tiles.tolist()]
    assert seen == sorted(seen, reverse=True)


def test_decodes_alone_have_no_tiles() -> None:
    assert attention_plan.list_prefill_tiles(paged([(40, 1), (0, 1)]), 16).shape == (0, 2)
