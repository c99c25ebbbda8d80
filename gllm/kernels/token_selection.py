"""Sparse attention: the keys that an indexer selects for each token, as a plan of attention.

Each token behind the first `num_selected` ones of its sequence attends to as many keys as that,
those with the highest index scores. The others attend to all keys before them. The selected keys of
a token are a row of a block table with blocks of one token, so that every attention backend of the
host computes them as a decode. What a token attends to, and the order of the sums, depend on its
sequence alone, not on chunks and other sequences.

Source: DeepSeek-AI, "DeepSeek-V3.2" (2025), section 2.1.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.attention import paged_attention
from gllm.kernels.attention_plan import AttentionPlan, Ints, PagedBatch, plan_attention
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.linear import linear, prepare
from gllm.kernels.paged_rows import gather_rows


@dataclass(slots=True)
class TokenSelection:
    """Division of a step's tokens into those that see all keys and those that see selected ones.

    An indexer sets `selected` in each layer that has one; the layers after it may use it again.
    """

    plan: AttentionPlan
    """Full attention of the step."""
    num_selected: int
    """Keys that a token attends to."""
    dense_tokens: Tensor
    """[dense] int64: indices in the step's batch of the tokens that see all keys before them."""
    dense_plan: AttentionPlan | None
    """Full attention of these tokens alone; None if there are none."""
    sparse_tokens: Tensor
    """[sparse] int64: indices in the step's batch of the tokens that see selected keys."""
    sparse_rows: list[tuple[int, range]]
    """Sequences with such tokens: row in the plan, and positions of these tokens."""
    selected: AttentionPlan | None = field(default=None, init=False)
    """Attention of the tokens that see selected keys, once an indexer has selected them."""

    def select(self, queries: Tensor, weights: Tensor, index_keys: Tensor) -> None:
        """Select the keys of the tokens that do not see all, by their index scores.

        The score of a key s for a query t is the sum over the heads h of weights[t, h] * relu(
        queries[t, h] . key[s]); equal scores are ranked by position, the first one first.

        Args:
            queries: [sparse, heads, elements], of the compute dtype.
            weights: [sparse, heads] float32, with all factors.
            index_keys: [blocks, block_size, 1, elements]: KV cache of the layer.
        """
        slots = np.empty((len(queries), self.num_selected), dtype=np.int64)
        count = 0
        for row, positions in self.sparse_rows:
            context = self.plan.rows.slots(row, 0, positions.stop)
            keys = gather_rows(index_keys, torch.from_numpy(context), torch.float32)[:, 0]
            for position in positions:
                # Of the same shape in every chunk of the sequence, so that the sums are too.
                seen = keys[: position + 1]
                scores = _index_scores(queries[count].to(torch.float32), weights[count], seen)
                slots[count] = context[select_highest(scores, self.num_selected).numpy()]
                count += 1
        self.selected = _selected_plan(slots, self.plan, queries.dtype)

    def attend(
        self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scaling: AttentionScaling
    ) -> Tensor:
        """Compute the attention of all tokens of the step.

        Args:
            query: [tokens, heads, key elements].
            key_cache: [blocks, block_size, kv_heads, key elements].
            value_cache: [blocks, block_size, kv_heads, value elements].
            scaling: scaling of the scores.

        Returns:
            [tokens, heads, value elements].
        """
        if not self.sparse_rows:
            return paged_attention(query, key_cache, value_cache, self.plan, scaling)
        assert self.selected is not None, "a layer before this one, or this one, has an indexer"
        output = query.new_empty(*query.shape[:2], value_cache.shape[3])
        if self.dense_plan is not None:
            own = query.index_select(0, self.dense_tokens)
            attended = paged_attention(own, key_cache, value_cache, self.dense_plan, scaling)
            output.index_copy_(0, self.dense_tokens, attended)
        own = query.index_select(0, self.sparse_tokens)
        keys, values = _as_blocks_of_one(key_cache), _as_blocks_of_one(value_cache)
        attended = paged_attention(own, keys, values, self.selected, scaling)
        return output.index_copy_(0, self.sparse_tokens, attended)


def divide_tokens(plan: AttentionPlan, dtype: torch.dtype, num_selected: int) -> TokenSelection:
    """Divide the tokens of a step by the number of keys before them.

    Args:
        plan: full attention of the step, of a backend of the host.
        dtype: dtype of the queries.
        num_selected: keys that a token attends to at most.
    """
    rows = plan.rows
    counts = np.diff(rows.query_start)
    starts = rows.context_len - counts
    num_dense = np.clip(num_selected - starts, 0, counts)
    sparse_rows = [
        (row, range(int(starts[row] + num_dense[row]), int(rows.context_len[row])))
        for row in np.flatnonzero(num_dense < counts).tolist()
    ]
    positions = np.arange(rows.query_start[-1]) + np.repeat(starts - rows.query_start[:-1], counts)
    is_dense = positions < num_selected
    dense_tokens = torch.from_numpy(np.flatnonzero(is_dense))
    sparse_tokens = torch.from_numpy(np.flatnonzero(~is_dense))
    dense_plan = None
    if sparse_rows and len(dense_tokens):
        own = np.flatnonzero(num_dense)
        dense_rows = PagedBatch(
            rows.block_table[own],
            np.concatenate((np.zeros(1, dtype=np.int64), num_dense[own].cumsum())),
            (starts + num_dense)[own],
            int((own < rows.num_decodes).sum()),
            rows.block_size,
            rows.num_blocks,
        )
        dense_plan = plan_attention(dense_rows, dtype, backend=plan.backend)
    return TokenSelection(plan, num_selected, dense_tokens, dense_plan, sparse_tokens, sparse_rows)


def select_highest(scores: Tensor, count: int) -> Tensor:
    """Return the indices of the `count` highest scores [n], ascending, [count] int64.

    Of equal scores the first ones are selected. Scores that are not numbers select any: what is
    computed with them is no number either.
    """
    threshold = scores.topk(count).values[-1]
    above = (scores > threshold).nonzero()[:, 0]
    equal = (scores == threshold).nonzero()[: count - len(above), 0]
    if len(above) + len(equal) < count:
        return torch.arange(count)
    return torch.cat((above, equal)).sort().values


def _index_scores(query: Tensor, weights: Tensor, keys: Tensor) -> Tensor:
    """Return the index score of each key, [keys] float32.

    Args:
        query: [heads, elements] float32.
        weights: [heads] float32.
        keys: [keys, elements] float32.
    """
    # The compiled kernel shares the keys among its threads without an effect on the sums.
    by_head = linear(keys, prepare(query), None).relu_()
    return by_head.mul_(weights).sum(dim=1)


def _selected_plan(slots: Ints, plan: AttentionPlan, dtype: torch.dtype) -> AttentionPlan:
    """Return the plan of tokens that see the keys in `slots` [tokens, selected], as decodes."""
    count, num_selected = slots.shape
    rows = PagedBatch(
        slots,
        np.arange(count + 1),
        np.full(count, num_selected),
        count,
        1,
        plan.rows.num_blocks * plan.rows.block_size,
    )
    return plan_attention(rows, dtype, backend=plan.backend)


def _as_blocks_of_one(cache: Tensor) -> Tensor:
    """Return a cache [blocks, block_size, kv_heads, elements] as [slots, 1, kv_heads, elements]."""
    blocks, size, heads, elements = cache.shape
    step = cache.stride(1)
    strides = (step, step, cache.stride(2), cache.stride(3))
    return cache.as_strided((blocks * size, 1, heads, elements), strides, cache.storage_offset())
