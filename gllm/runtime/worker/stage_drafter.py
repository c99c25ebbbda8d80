"""Drafts of the last stage: after it has sampled, a draft model or head guesses what follows.

The draft computes every token of the text that the stage computes, so that its keys and values are
in the same blocks. Guesses get keys and values at the positions behind, as far as the sequence has
blocks for them; the next row of the sequence overwrites them. A draft that fails costs guesses,
never the text.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.attention_plan import AttentionPlan, PagedBatch
from gllm.kernels.attention_window import AttentionWindow
from gllm.kernels.sampling import sample
from gllm.models.attention import LayerCache
from gllm.models.draft import DraftModel
from gllm.models.stage import StageInputs
from gllm.runtime.worker.sampling import SamplingState, build_sampling_metadata
from gllm.scheduler.plan import SampledToken, ScheduledRow, count_accepted

log = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]


class DraftCache(NamedTuple):
    """KV cache of a draft, in the blocks of the served model, and the plan of its attention."""

    layers: Sequence[LayerCache]
    block_size: int
    """Tokens per block."""
    num_blocks: int
    """Usable blocks."""
    plan_attention: Callable[[PagedBatch], Mapping[AttentionWindow, AttentionPlan]]
    """Returns the attention plan of each window of the draft's layers."""


@dataclass(frozen=True, slots=True)
class DraftRows:
    """Rows of a step with what the draft needs of them, one list entry or array row per row."""

    num_drafts: int
    """Most draft tokens behind each sample."""
    rows: list[ScheduledRow]
    states: list[SamplingState]
    prompt_lens: list[int]
    """Prompt tokens of each row's sequence."""
    token_ids: Int64Array
    """[tokens] of all rows, those of guesses included."""
    block_table: Int64Array
    """[rows, blocks]."""
    capacities: list[int]
    """Positions for which each row's sequence has blocks."""


class _RowText(NamedTuple):
    """Tokens of a row that are tokens of the text, and the token behind them."""

    token_ids: list[int]
    next_token_id: int | None
    """Sampled by the step; None for a chunk that samples nothing."""
    is_end: bool
    """True if no known token follows `next_token_id`."""


class _RowInput(NamedTuple):
    """Tokens of the text that a row adds to the draft's KV cache."""

    row: int
    """Index of the row in the step."""
    start: int
    """Position of the first token's keys and values."""
    token_ids: list[int]
    hidden: Tensor | None
    """[tokens, hidden] state before each token; None if the draft needs none."""
    num_drafts: int
    """Draft tokens behind the last token."""

    @property
    def end(self) -> int:
        """Position behind the last token's keys and values."""
        return self.start + len(self.token_ids)


class _PendingState(NamedTuple):
    """Hidden state of the last token of a chunk, before the first token of the next one."""

    num_preemptions: int
    position: int
    """Position of that next token."""
    hidden: Tensor
    """[1, hidden]."""


class StageDrafter:
    """Computes the drafts of all sequences, on the thread that samples.

    Args:
        model: draft model or prediction head.
        cache: its KV cache.
        vocab_size: number of tokens of the served model.
    """

    def __init__(self, model: DraftModel, cache: DraftCache, vocab_size: int) -> None:
        self._model = model
        self._cache = cache
        self._vocab_size = vocab_size
        self._pending: dict[int, _PendingState] = {}
        """By sequence."""
        self._has_failed = False

    def release(self, seqs: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for seq in seqs:
            self._pending.pop(seq, None)

    def draft(
        self, rows: DraftRows, sampled: list[SampledToken], hidden: Tensor | None
    ) -> list[SampledToken]:
        """Return the results of a step with the draft tokens of the sequences that go on.

        Args:
            rows: of the step.
            sampled: results of the step.
            hidden: states [tokens, hidden] of the step behind the final norm, if the draft needs
                them.
        """
        results = {token.seq: token for token in sampled}
        try:
            drafts = self._draft(rows, results, hidden)
        except Exception:
            level = logging.DEBUG if self._has_failed else logging.ERROR
            log.log(level, "the draft failed: texts go on without its guesses", exc_info=True)
            self._has_failed = True
            return sampled
        for seq, token_ids in drafts.items():
            results[seq] = results[seq]._replace(draft_token_ids=tuple(token_ids))
        return list(results.values())

    def _draft(
        self, rows: DraftRows, results: Mapping[int, SampledToken], hidden: Tensor | None
    ) -> dict[int, list[int]]:
        """Compute the tokens of the text, then the drafts; return the drafts by sequence."""
        inputs: list[_RowInput] = []
        begin = 0
        for index, row in enumerate(rows.rows):
            token_ids = rows.token_ids[begin : begin + row.num_tokens].tolist()
            text = _read_text(row, token_ids, results.get(row.seq))
            if text is not None:
                states = None
                if hidden is not None:
                    states = hidden[begin : begin + len(text.token_ids)]
                inputs.append(self._create_input(rows, index, text, states))
            begin += row.num_tokens
        # Rows of one token come first.
        inputs = sorted(
            (row for row in inputs if row.token_ids), key=lambda r: len(r.token_ids) > 1
        )
        if not inputs:
            return {}
        output = self._forward(rows, inputs)
        ends = np.cumsum([len(row.token_ids) for row in inputs])
        last_rows = [
            end - 1 for row, end in zip(inputs, ends.tolist(), strict=True) if row.num_drafts
        ]
        drafted = [row for row in inputs if row.num_drafts]
        return self._guess(rows, drafted, output[last_rows]) if drafted else {}

    def _create_input(
        self, rows: DraftRows, index: int, text: _RowText, hidden: Tensor | None
    ) -> _RowInput:
        """Return the tokens that a row adds.

        Args:
            rows: of the step.
            index: of the row.
            text: tokens of the row.
            hidden: states [tokens of the text, hidden], if the draft needs them.
        """
        row, lag = rows.rows[index], self._model.lag
        next_position = row.start + len(text.token_ids)
        num_drafts = 0
        if text.is_end and not rows.states[index].params.embeds:
            # The token behind the text and each draft but the last one have keys and values.
            num_drafts = min(rows.num_drafts, rows.capacities[index] - (next_position - lag))
        num_drafts = max(0, num_drafts)
        following = [] if text.next_token_id is None else [text.next_token_id]
        if hidden is None:
            token_ids = text.token_ids + (following if num_drafts else [])
            return _RowInput(index, row.start, token_ids, None, num_drafts)
        start, token_ids = row.start, text.token_ids[1:] + following
        pending = self._pending.pop(row.seq, None)
        if not following:
            last = hidden[-1:].clone()
            self._pending[row.seq] = _PendingState(row.num_preemptions, next_position, last)
            hidden = hidden[:-1]
        if pending is not None and pending[:2] == (row.num_preemptions, row.start):
            start, token_ids = start - 1, [text.token_ids[0], *token_ids]
            hidden = torch.cat((pending.hidden, hidden))
        return _RowInput(index, start, token_ids, hidden, num_drafts)

    def _forward(self, rows: DraftRows, inputs: Sequence[_RowInput]) -> Tensor:
        """Return the residual stream [tokens, hidden] of inputs; those of one token come first."""
        counts = np.array([len(row.token_ids) for row in inputs], dtype=np.int64)
        starts = np.array([row.start for row in inputs], dtype=np.int64)
        query_start = np.concatenate((np.zeros(1, dtype=np.int64), counts.cumsum()))
        positions = np.arange(query_start[-1]) + np.repeat(starts - query_start[:-1], counts)
        block_size = self._cache.block_size
        num_blocks = -(-int((starts + counts).max()) // block_size)
        batch = PagedBatch(
            np.ascontiguousarray(rows.block_table[[row.row for row in inputs], :num_blocks]),
            query_start,
            starts + counts,
            int((counts == 1).sum()),
            block_size,
            self._cache.num_blocks,
        )
        ids = torch.tensor([token for row in inputs for token in row.token_ids])
        states = [row.hidden for row in inputs if row.hidden is not None]
        return self._model.forward(
            StageInputs(
                # A model of the same tokens may have a shorter table of embeddings.
                ids.clamp_(max=self._model.vocab_size - 1),
                torch.from_numpy(positions),
                self._cache.plan_attention(batch),
            ),
            torch.cat(states) if states else None,
            self._cache.layers,
        )

    def _guess(
        self, rows: DraftRows, inputs: list[_RowInput], hidden: Tensor
    ) -> dict[int, list[int]]:
        """Return the draft tokens by sequence.

        They are sampled with the random numbers of the tokens that they guess, so that a draft with
        the distribution of the served model is always right.

        Args:
            rows: of the step.
            inputs: rows with drafts.
            hidden: residual stream [rows, hidden] of the last token of each.
        """
        drafts: dict[int, list[int]] = {rows.rows[row.row].seq: [] for row in inputs}
        while True:
            logits = self._model.compute_logits(hidden)[:, : self._vocab_size].contiguous()
            # A token is behind the one whose keys and values are the last.
            output_indices = [
                row.end + self._model.lag - rows.prompt_lens[row.row] for row in inputs
            ]
            states = [rows.states[row.row] for row in inputs]
            seqs = [rows.rows[row.row].seq for row in inputs]
            plan = build_sampling_metadata([(seq, 0) for seq in seqs], states, output_indices).plan
            tokens = sample(logits, plan).clamp_(0, self._vocab_size - 1).tolist()
            for seq, token in zip(seqs, tokens, strict=True):
                drafts[seq].append(token)
            kept = [i for i, row in enumerate(inputs) if row.num_drafts > 1]
            if not kept:
                return drafts
            states_of = hidden if self._model.needs_hidden else None
            inputs = [
                _RowInput(
                    inputs[i].row,
                    inputs[i].end,
                    [tokens[i]],
                    None if states_of is None else states_of[i : i + 1],
                    inputs[i].num_drafts - 1,
                )
                for i in kept
            ]
            # The result is valid until the next call.
            hidden = self._forward(rows, inputs).clone()


def _read_text(
    row: ScheduledRow, token_ids: list[int], result: SampledToken | None
) -> _RowText | None:
    """Return the tokens of a row that are tokens of the text; None if its sequence ends here.

    Also None for a window that continues a wrong guess.

    Args:
        row: of the step.
        token_ids: of the row.
        result: of the row, if it has one.
    """
    if not row.should_sample:
        return _RowText(token_ids, None, is_end=False)
    if result is None or result.error:
        return None
    samples = (result.token_id, *result.further_token_ids)
    num_accepted = count_accepted(row, result)
    # Samples that equal the guesses behind them, without one whose next row has failed.
    num_right = num_accepted - (row.num_draft_tokens + 1 - row.num_samples)
    num_excess = max(0, num_right + 1 - len(samples))
    num_known = row.num_tokens - row.num_draft_tokens + num_accepted - num_excess
    next_index = num_right - num_excess
    return _RowText(token_ids[:num_known], samples[next_index], len(samples) == next_index + 1)
