"""Buckets, padding, and trees of tensors in one piece of memory."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels.attention_plan import PagedBatch
from gllm.models.stage import StageInputs
from gllm.runtime.worker.cuda.graphs import (
    DecodeGraphs,
    find_graph_size,
    get_block_table,
    graph_sizes,
    pad_decodes,
    plan_table_attention,
)
from gllm.runtime.worker.cuda.staging import ALIGNMENT, InputStaging, TreeLayout
from tests.support.examples import num_examples
from tests.support.gpu.fake_streams import FakeQueues


@pytest.mark.parametrize("most", [1, 2, 3, 8, 9, 16, 17, 40, 256])
def test_buckets_hold_every_number_of_rows_with_little_padding(most: int) -> None:
    sizes = graph_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == most
    for rows in range(1, most + 1):
        size = find_graph_size(rows, sizes)
        assert size is not None
        assert rows <= size <= max(2 * rows, rows + 8)
    assert find_graph_size(most + 1, sizes) is None


def test_padding_writes_to_a_block_that_is_nobodys() -> None:
    """Not to the block that stays zero either; sequences keep their rows."""
    rows = PagedBatch(np.array([[3, 4], [1, 0]]), np.arange(3), np.array([6, 2]), 2, 4, 10)
    padded = pad_decodes(rows, 4, 5)
    assert (
        padded.block_table.tolist() == [[3, 4, 0, 0, 0], [1, 0, 0, 0, 0]] + [[11, 0, 0, 0, 0]] * 2
    )
    assert padded.context_len.tolist() == [6, 2, 1, 1]
    assert padded.query_start.tolist() == [0, 1, 2, 3, 4]
    assert padded.num_decodes == 4
    plan = plan_table_attention(padded, torch.float32, frozenset({None, 3}))
    assert plan[None].slots.tolist() == [4 * 4 + 1, 1 * 4 + 1, 44, 44]
    assert plan[3].window == 3


def test_plans_of_one_bucket_are_laid_out_alike() -> None:
    """Tables of all windows once, whatever the contexts; block tables at least as wide as told."""
    layouts = []
    for context in ([1], [9, 17, 3]):
        table = np.arange(len(context) * 5).reshape(len(context), 5)
        count = len(context)
        rows = PagedBatch(table, np.arange(count + 1), np.array(context), count, 4, 50)
        padded = pad_decodes(rows, 4, 8)
        plans = plan_table_attention(padded, torch.float32, frozenset({None, 7}))
        layouts.append(TreeLayout(plans))
    assert layouts[0].num_bytes == layouts[1].num_bytes == 32 + 176


def decodes(contexts: list[int], size: int, width: int, first: int) -> StageInputs:
    """Inputs of decodes padded to `size`, their blocks counting up from `first`."""
    count = len(contexts)
    blocks = -(-max(contexts, default=1) // 4)
    table = first + np.arange(count * blocks).reshape(count, blocks)
    lengths = np.array(contexts, dtype=np.int64)
    rows = PagedBatch(table, np.arange(count + 1), lengths, count, 4, 900)
    plans = plan_table_attention(
        pad_decodes(rows, size, width), torch.float32, frozenset({None, 7})
    )
    return StageInputs(torch.arange(size) + first, torch.arange(size) + 2 * first, plans)


def test_a_graph_gets_as_much_of_the_block_tables_as_a_step_uses() -> None:
    """All windows see it; what is behind stays from the steps before."""
    width, staged = 9, []
    steps = [([30, 3, 8], 100), ([5, 9], 500), ([36], 700)]
    with FakeQueues(3) as queues:
        stream, staging = queues.stream(), InputStaging(queues, 64)
        graphs = DecodeGraphs(queues, stream, get_block_table)
        # A row of every input, as the graph finds them.
        found = [queues.zeros((4, 2 * width + 4), torch.int64) for _ in range(3)]
        rounds = iter(found)

        def forward(inputs: StageInputs, hidden: Tensor | None) -> Tensor:
            columns = [inputs.token_ids, inputs.positions, inputs.attention[None].slots]
            tables = [plan.tables for plan in inputs.attention.values() if plan.tables]
            parts = [column[:, None] for column in [*columns, tables[1].context_len]]
            return torch.cat([*parts, *(table.block_table for table in tables)], dim=1)

        graphs.record(4, decodes([], 4, width, 0), None, forward)
        for contexts, first in steps:
            inputs = decodes(contexts, 4, 1, first)
            there, flat = staging.put(inputs, stream)
            staged.append(len(flat))
            with stream.current():
                graphs.fill_inputs(4, there, flat, None)
                next(rounds).copy_(graphs.replay(4))
            staging.release(stream)
        queues.synchronize()
        seen = queues.copies(found)
    assert staged[0] - staged[1] == 4 * 4 * (8 - 3)
    wide = np.zeros((4, width), dtype=np.int64)
    for table, (contexts, first) in zip(seen, steps, strict=True):
        inputs = decodes(contexts, 4, 1, first)
        plan = inputs.attention[None]
        assert plan.tables is not None
        assert table[:, 0].equal(inputs.token_ids)
        assert table[:, 1].equal(inputs.positions)
        assert table[:, 2].equal(plan.slots)
        assert table[:, 3].tolist() == [*contexts, *[1] * (4 - len(contexts))]
        wide[:, : plan.tables.block_table.shape[1]] = plan.tables.block_table
        assert table[:, 4 : 4 + width].tolist() == table[:, 4 + width :].tolist() == wide.tolist()


def test_tiles_of_prefill_go_over_with_the_inputs_once_they_were_asked_for() -> None:
    """The first step brings those that it asks for itself."""
    table = np.arange(12).reshape(2, 6)
    rows = PagedBatch(table, np.array([0, 1, 15]), np.array([9, 20]), 1, 4, 50)
    asked: set[int] = set()
    first = plan_table_attention(rows, torch.float32, frozenset({None, 7}), asked)
    of_first = first[None].tables
    assert of_first is not None
    wanted = {tokens: of_first.get_prefill_tiles(rows, tokens) for tokens in (4, 16)}
    with FakeQueues(1) as queues:
        stream, staging = queues.stream(), InputStaging(queues, 64)
        plans = plan_table_attention(rows, torch.float32, frozenset({None, 7}), asked)
        there, _ = staging.put(plans, stream)
        for plan in there.values():
            assert plan.tables is not None
            for tokens, expected in wanted.items():
                tiles = plan.tables.get_prefill_tiles(rows, tokens)
                assert queues.kind(tiles) == "device"
                assert tiles.shape == expected.shape
        queues.synchronize()
        assert plan.tables is not None
        listed = plan.tables.prefill_tiles
        copies = dict(zip(listed, queues.copies(list(listed.values())), strict=True))
    assert all(tiles.equal(wanted[n]) for n, tiles in copies.items())
    only = PagedBatch(table, np.arange(3), np.array([9, 20]), 2, 4, 50)
    decoding = plan_table_attention(only, torch.float32, frozenset({None}), asked)[None].tables
    assert decoding is not None
    assert not decoding.prefill_tiles


@dataclass(frozen=True)
class Leafy:
    parts: dict[int, Tensor]
    others: tuple[Tensor, list[Tensor]]
    number: int


DTYPES = (torch.uint8, torch.int32, torch.float32, torch.int64, torch.bool)


@settings(max_examples=num_examples(60, 2000), deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 9)), min_size=3, max_size=8))
def test_a_tree_survives_its_way_through_one_piece_of_memory(
    parts: list[tuple[torch.dtype, int]],
) -> None:
    made = [torch.randint(0, 2, (count, 3)).to(dtype) for dtype, count in parts]
    whole = torch.arange(40)
    tree = Leafy(dict(enumerate(made[2:])), (made[0], [made[1].t(), whole[3:9], whole[5:30:2]]), 7)
    layout = TreeLayout(tree)
    guard = ALIGNMENT
    memory = torch.full((layout.num_bytes + guard,), 0xA5, dtype=torch.uint8)
    layout.fill(memory[: layout.num_bytes])
    assert memory[layout.num_bytes :].unique().tolist() == [0xA5]
    there = layout.views(tree, memory)
    assert there.number == 7
    pairs = [*zip(tree.parts.values(), there.parts.values(), strict=True)]
    pairs += [(tree.others[0], there.others[0]), *zip(tree.others[1], there.others[1], strict=True)]
    for here, copy in pairs:
        assert torch.equal(here, copy)
        assert copy.stride() == here.stride()
        if copy.numel() and here.storage_offset() == 0:
            assert (copy.data_ptr() - memory.data_ptr()) % ALIGNMENT == 0
    # What shares memory still does.
    there.others[1][1][2] = -1
    assert there.others[1][2][0] == -1
