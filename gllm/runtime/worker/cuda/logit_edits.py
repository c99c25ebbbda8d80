"""Logit edits of a step on a device, planned on the host and copied with the step's inputs.

Edits that look back find the output in a table on the device (gllm/kernels/history.py): with async
scheduling the host does not know the last token yet. `gllm.runtime.worker.cpu.logit_edits` is the
same for the CPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.bad_words import BadWords
from gllm.kernels.history import TokenHistories
from gllm.kernels.masking import apply_bad_words
from gllm.kernels.penalties import apply_history_penalties
from gllm.messages.sampling import SequenceSamplingParams
from gllm.runtime.worker.logit_edits import (
    RequestLogitEdits,
    StaticLogitEdits,
    plan_static_edits,
    to_int64,
)
from gllm.runtime.worker.sampling import SamplingMetadata


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to the logits of a step."""

    static: StaticLogitEdits
    histories: TokenHistories
    """Token histories of rows with penalties or with bad words of several tokens."""
    phrases: BadWords
    penalties: Tensor
    """[3, histories] float64: repetition, frequency and presence penalty."""
    has_penalties: bool
    """True if some row has a penalty."""

    def apply(self, logits: Tensor, cached_tokens: Tensor) -> None:
        """Change logits [rows, vocabulary] float32, contiguous, in place, without a sync.

        cached_tokens: [slots] int64, the token of each slot of the KV cache.
        """
        self.static.apply(logits)
        if len(self.phrases.owners):
            apply_bad_words(logits, cached_tokens, self.histories, self.phrases)
        if self.has_penalties:
            apply_history_penalties(logits, cached_tokens, self.histories, self.penalties)


class _RequestPhrases:
    """Bad words of several tokens of one request; those outside of the vocabulary are dropped."""

    def __init__(self, edits: RequestLogitEdits, vocab_size: int) -> None:
        phrases = [phrase for phrase in edits.phrases if phrase[-1] < vocab_size]
        self.prefix_lengths = to_int64([len(phrase) - 1 for phrase in phrases])
        self.max_prefix_length = max((len(phrase) - 1 for phrase in phrases), default=0)
        """Tokens before the last one, of the longest phrase."""
        width = self.max_prefix_length
        padded = [[0] * (width - len(phrase) + 1) + [*phrase[:-1]] for phrase in phrases]
        self.prefixes = torch.tensor(padded, dtype=torch.int64).reshape(len(phrases), width)
        self.last_ids = to_int64([phrase[-1] for phrase in phrases])


class LogitEditPlanner:
    """Collects the logit edits of steps, on the host."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self._vocab_size, self._block_size = vocab_size, block_size
        self._phrases: WeakKeyDictionary[RequestLogitEdits, _RequestPhrases] = WeakKeyDictionary()

    @property
    def num_requests(self) -> int:
        """Requests whose bad words of several tokens are kept."""
        return len(self._phrases)

    def plan(
        self,
        sampling: SamplingMetadata,
        num_tokens: Sequence[int],
        block_table: npt.NDArray[np.int64],
    ) -> LogitEdits | None:
        """Return the edits of all sampling rows of a step, None if there are none.

        Args:
            sampling: the rows.
            num_tokens: tokens of each row's sequence, prompt and output.
            block_table: [rows, blocks], block ids of each row's sequence.
        """
        if not sampling.edited_rows:
            return None
        edits = [state.edits for state in sampling.states]
        rows, phrases = [], []
        for row in sampling.edited_rows:
            request = edits[row]
            assert request is not None, "a row without edits is not changed"
            own = self._request_phrases(request)
            if own.max_prefix_length or sampling.states[row].has_penalties:
                rows.append(row)
                phrases.append(own)
        indices = sampling.output_indices
        return LogitEdits(
            plan_static_edits(sampling.edited_rows, edits, indices, self._vocab_size),
            TokenHistories(
                to_int64(rows),
                to_int64([num_tokens[row] for row in rows]),
                to_int64([num_tokens[row] - indices[row] for row in rows]),
                torch.from_numpy(block_table[rows].astype(np.int32)),
                self._block_size,
            ),
            _join_phrases(phrases),
            _penalties([sampling.states[row].params for row in rows]),
            any(sampling.states[row].has_penalties for row in rows),
        )

    def _request_phrases(self, edits: RequestLogitEdits) -> _RequestPhrases:
        """Return a request's phrases as tensors; they are made once."""
        phrases = self._phrases.get(edits)
        if phrases is None:
            phrases = self._phrases[edits] = _RequestPhrases(edits, self._vocab_size)
        return phrases


def _penalties(params: list[SequenceSamplingParams]) -> Tensor:
    """Return repetition, frequency and presence penalties as [3, rows] float64."""
    columns = [
        [param.repetition_penalty for param in params],
        [param.frequency_penalty for param in params],
        [param.presence_penalty for param in params],
    ]
    return torch.tensor(columns, dtype=torch.float64)


def _join_phrases(requests: list[_RequestPhrases]) -> BadWords:
    """Concatenate the phrases of all histories, padded to one width."""
    width = max((request.max_prefix_length for request in requests), default=0)
    prefixes = [
        functional.pad(request.prefixes, (width - request.max_prefix_length, 0))
        for request in requests
    ]
    none = to_int64([])
    return BadWords(
        torch.repeat_interleave(to_int64([len(request.last_ids) for request in requests])),
        torch.cat([none, *(request.prefix_lengths for request in requests)]),
        torch.cat([none.reshape(0, width), *prefixes]),
        torch.cat([none, *(request.last_ids for request in requests)]),
    )
