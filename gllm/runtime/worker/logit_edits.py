"""Logit edits that do not depend on the output so far: allowed tokens, bans and biases.

Edits of all rows of a step become a few tensors, applied on any device. Edits that look back at the
output (bad words of several tokens, penalties) are in `gllm.runtime.worker.cpu.sampler` and
`gllm.runtime.worker.cuda.sampler`: a CPU finds the output in the host's token history, a GPU in
a table on the device.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gllm.kernels.masking import (
    add_to_logits,
    apply_token_bitmask,
    build_token_bitmask,
    num_bitmask_words,
)
from gllm.messages.sampling import SequenceSamplingParams

LASTING_FIELDS = (
    "allowed",
    "bad_words",
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields of SequenceSamplingParams that change logits during the whole output."""


@dataclass(frozen=True, slots=True)
class RequestTensors:
    """Allowed tokens, bans and biases of one request as tensors.

    Token ids outside of the vocabulary are left out.
    """

    mask: Tensor | None
    """[words] int32: allowed tokens; None if all are allowed."""
    ids: Tensor
    """[n] int64: tokens with a bias or a ban."""
    values: Tensor
    """[n] float32: added to their logits; -inf bans."""
    early_ids: Tensor
    """[n] int64: as `ids`, while the output is shorter than `min_tokens`."""
    early_values: Tensor
    """[n] float32"""


class RequestLogitEdits:
    """Allowed tokens, bans, biases and `min_tokens` of one request, for all of its choices.

    Tensors are created on first use.
    """

    def __init__(self, params: SequenceSamplingParams) -> None:
        self.phrases = [word for word in params.bad_words if len(word) > 1]
        """Bad words of several tokens."""
        self.phrases_by_penultimate: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        """The same, by their last token but one."""
        for phrase in self.phrases:
            self.phrases_by_penultimate[phrase[-2]].append(phrase)
        self._params = params
        self._min_tokens = params.min_tokens if params.banned else 0
        default = SequenceSamplingParams()
        self._is_lasting = any(
            getattr(params, name) != getattr(default, name) for name in LASTING_FIELDS
        )
        self._tensors: tuple[int, RequestTensors] | None = None
        """Vocabulary size and the tensors made for it."""

    def applies_to(self, output_index: int) -> bool:
        """Return True if the edits change the logits of an output token."""
        return self._is_lasting or self.is_before_min_tokens(output_index)

    def is_before_min_tokens(self, output_index: int) -> bool:
        """Return True if an output token comes before `min_tokens`, so it must not be EOS."""
        return output_index < self._min_tokens

    def tensors(self, vocab_size: int) -> RequestTensors:
        """Return the edits as tensors; they are made once."""
        if self._tensors is None or self._tensors[0] != vocab_size:
            self._tensors = vocab_size, self._create_tensors(vocab_size)
        return self._tensors[1]

    def _create_tensors(self, vocab_size: int) -> RequestTensors:
        params = self._params
        allowed = to_int64(params.allowed)
        banned = [word[0] for word in params.bad_words if len(word) == 1]
        # Ids of EOS come from the model's files and may lie outside of its vocabulary.
        early = [*banned, *params.banned]
        return RequestTensors(
            build_token_bitmask(allowed, vocab_size) if len(allowed) else None,
            *_bans_and_biases(banned, params.logit_bias, vocab_size),
            *_bans_and_biases(early, params.logit_bias, vocab_size),
        )


def _bans_and_biases(
    banned: list[int], biases: dict[int, float], vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Return ids [n] int64 within the vocabulary and the values to add [n] float32."""
    ids = to_int64([*banned, *biases])
    bans = [-torch.inf] * len(banned)
    values = torch.tensor([*bans, *biases.values()], dtype=torch.float32)
    is_inside = ids < vocab_size
    return ids[is_inside], values[is_inside]


@dataclass(frozen=True, slots=True)
class StaticLogitEdits:
    """Allowed tokens, bans and biases of all rows of a step, as tensors on the host or a device.

    They are static because they do not depend on the output so far, unlike penalties.
    """

    masked_rows: Tensor
    """[masks] int64: rows that may sample only what their mask allows."""
    masks: Tensor
    """[masks, words] int32"""
    positions: Tensor
    """[n] int64: row * vocabulary size + token id of bans and biases."""
    values: Tensor
    """[n] float32: added to the logits at `positions`."""

    def apply(self, logits: Tensor) -> None:
        """Change logits [rows, vocabulary] float32, contiguous, in place, without a sync."""
        if len(self.masked_rows):
            apply_token_bitmask(logits, self.masked_rows, self.masks)
        if len(self.positions):
            add_to_logits(logits, self.positions, self.values)


def plan_static_edits(
    rows: Iterable[int],
    edits: Sequence[RequestLogitEdits | None],
    output_indices: Sequence[int],
    vocab_size: int,
) -> StaticLogitEdits:
    """Collect the allowed tokens, bans and biases of some rows of a step.

    Args:
        rows: indices of the rows of logits to change.
        edits: edits of each row of the step; not None for `rows`.
        output_indices: for each row, the position in the sequence's output of the token to sample.
        vocab_size: width of the logits.
    """
    masked_rows, masks, positions, values = [], [], [], []
    for row in rows:
        request = edits[row]
        assert request is not None, "a row without edits is not changed"
        tensors = request.tensors(vocab_size)
        if tensors.mask is not None:
            masked_rows.append(row)
            masks.append(tensors.mask)
        is_early = request.is_before_min_tokens(output_indices[row])
        ids = tensors.early_ids if is_early else tensors.ids
        if len(ids):
            positions.append(row * vocab_size + ids)
            values.append(tensors.early_values if is_early else tensors.values)
    no_masks = torch.empty(0, num_bitmask_words(vocab_size), dtype=torch.int32)
    return StaticLogitEdits(
        to_int64(masked_rows),
        torch.stack(masks) if masks else no_masks,
        torch.cat(positions) if positions else to_int64([]),
        torch.cat(values) if values else torch.empty(0),
    )


def to_int64(values: Sequence[int]) -> Tensor:
    """Convert integers to a tensor [n] int64."""
    return torch.tensor(values, dtype=torch.int64)
