"""Logit edits of a step on the CPU; those that look back read the host's token histories.

`gllm.runtime.worker.cuda.logit_edits` is the same for a device.
"""

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.masking import add_to_logits
from gllm.kernels.penalties import SeenTokens, apply_penalties
from gllm.runtime.worker.logit_edits import plan_static_edits, to_int64
from gllm.runtime.worker.sampling_state import SamplingState


def apply_logit_edits(
    logits: Tensor, states: list[SamplingState], output_indices: list[int], rows: list[int]
) -> None:
    """Apply the edits of some rows to logits [all rows, vocabulary] float32, contiguous, in place.

    Args:
        logits: of all rows of a step.
        states: of all rows of the step.
        output_indices: index in its output of the token that each row of the step samples.
        rows: rows to change; each has edits.

    Raises:
        ValueError: the history of a row has fewer tokens than its output index.
    """
    if not rows:
        return
    for row in rows:
        states[row].history.truncate(output_indices[row])
    edits = [state.edits for state in states]
    vocab_size = logits.shape[1]
    plan_static_edits(rows, edits, output_indices, vocab_size).apply(logits)
    _ban_phrases(logits, states, rows)
    penalized = [row for row in rows if states[row].has_penalties]
    if penalized:
        _penalize(logits, states, penalized)


def _ban_phrases(logits: Tensor, states: list[SamplingState], rows: list[int]) -> None:
    """Ban the last token of bad words whose other tokens end an output."""
    vocab_size = logits.shape[1]
    positions = []
    for row in rows:
        edits, output = states[row].edits, states[row].history.tokens
        assert edits is not None, "a row without edits is not changed"
        if not output:
            continue
        for phrase in edits.phrases_by_penultimate.get(output[-1], ()):
            if tuple(output[1 - len(phrase) :]) == phrase[:-1] and phrase[-1] < vocab_size:
                positions.append(row * vocab_size + phrase[-1])
    if positions:
        add_to_logits(logits, to_int64(positions), torch.full((len(positions),), -torch.inf))


def _penalize(logits: Tensor, states: list[SamplingState], rows: list[int]) -> None:
    """Apply repetition, frequency and presence penalties to some rows."""
    histories = [states[row].history for row in rows]
    seen = SeenTokens(
        rows=torch.from_numpy(np.repeat(rows, [len(history.ids) for history in histories])),
        ids=torch.from_numpy(np.concatenate([history.ids for history in histories])),
        counts=torch.from_numpy(np.concatenate([history.counts for history in histories])),
    )
    # Repetition, frequency and presence; 1, 0 and 0 are off.
    settings = torch.tensor([[1.0], [0.0], [0.0]], dtype=torch.float64).repeat(1, len(logits))
    params = [states[row].params for row in rows]
    settings[0, rows] = settings.new_tensor([param.repetition_penalty for param in params])
    settings[1, rows] = settings.new_tensor([param.frequency_penalty for param in params])
    settings[2, rows] = settings.new_tensor([param.presence_penalty for param in params])
    apply_penalties(logits, seen, *settings)
