"""Sampler of the CPU: converts logits to tokens; a row that cannot be sampled fails alone.

The order is log-probabilities, logit edits, sampling. The arithmetic is in gllm/kernels.
"""

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.logprobs import compute_logprobs, gather_logprobs
from gllm.kernels.masking import add_to_logits, apply_token_bitmask
from gllm.kernels.penalties import SeenTokens, apply_penalties
from gllm.kernels.sampling import list_finite_rows, sample
from gllm.messages.sampling import ALL_TOKENS_BANNED, SampleDetails
from gllm.runtime.worker.logit_edits import plan_static_edits, to_int64
from gllm.runtime.worker.sampling import (
    NOT_FINITE,
    SampleOutput,
    SamplingMetadata,
    SamplingState,
    advance_guides,
    build_logprob_details,
    build_sampling_metadata,
    collect_grammar_masks,
    is_void,
    num_top_logprobs,
    to_token_logprobs,
)


def sample_rows(logits: Tensor, sampling: SamplingMetadata) -> SampleOutput:
    """Sample one token per row on the CPU; update token histories and grammars.

    Rows with logit edits, such as penalties or bad words, have a token history. In windows of such
    sequences each row waits for the sample before it, and rows behind a wrong guess have no token.

    Args:
        logits: [rows, vocabulary] float32; overwritten.
        sampling: sampling parameters and state of each row.
    """
    windows = [
        window
        for window in sampling.windows
        if not sampling.states[window.first_row].is_plain
        and (window.draft_token_ids or window.previous_guess is not None)
    ]
    if not windows:
        return _sample_at_once(logits, sampling)
    later = {row for window in windows for row in window.rows}
    rows = [row for row in range(len(logits)) if row not in later]
    windows = [window for window in windows if not is_void(sampling, window)]
    rows += [window.first_row for window in windows]
    output = SampleOutput([0] * len(logits), [""] * len(logits), [])
    num_rows = 0
    while rows:
        part = replace(sampling.select(rows), windows=())
        output.update(rows, _sample_at_once(logits[rows], part))
        num_rows += 1
        next_rows = [window.next_row(output.tokens, output.errors, num_rows) for window in windows]
        windows = [w for w, row in zip(windows, next_rows, strict=True) if row is not None]
        rows = [row for row in next_rows if row is not None]
    return output


def _sample_at_once(logits: Tensor, sampling: SamplingMetadata) -> SampleOutput:
    """Sample all rows, of which none depends on the sample of another one; see `sample_rows`."""
    if not sampling.states:
        return SampleOutput([], [], [])
    errors = _input_errors(logits, sampling)
    failed = [row for row, error in enumerate(errors) if error]
    if failed:
        logits[failed] = 0
    changed = _changed_rows(sampling)
    original = logits[changed] if changed else None
    try:
        output = _sample_batch(logits, sampling, errors)
    except Exception:
        if original is not None:
            logits[changed] = original
        output = _sample_one_by_one(logits, sampling, errors)
    new_tokens = advance_guides(sampling, output)
    for row in sampling.edited_rows:
        if not output.errors[row]:
            for token in new_tokens.get(row, output.tokens[row : row + 1]):
                sampling.states[row].history.append(token)
    return output


def _changed_rows(sampling: SamplingMetadata) -> list[int]:
    """Return the rows whose logits sampling may change."""
    if not sampling.grammar_rows:
        return sampling.edited_rows
    return sorted({*sampling.edited_rows, *sampling.grammar_rows})


def _input_errors(logits: Tensor, sampling: SamplingMetadata) -> list[str]:
    """Return the error of each row whose logits, or those of its prompt, are not finite."""
    errors = ["" if is_finite else NOT_FINITE for is_finite in list_finite_rows(logits)]
    for row in sampling.logprob_rows:
        errors[row] = errors[row] or sampling.states[row].error
    return errors


def _sample_batch(logits: Tensor, sampling: SamplingMetadata, errors: list[str]) -> SampleOutput:
    """Sample all rows at once; `errors` has those of rows that have failed already.

    logits: finite.
    """
    errors = list(errors)
    scored = sampling.logprob_rows
    raw = compute_logprobs(logits[scored]) if scored else None
    known_rows: set[int] = set()
    if sampling.grammar_rows:
        masks, known_rows = collect_grammar_masks(sampling, logits.shape[1])
        apply_token_bitmask(logits, torch.tensor(sampling.grammar_rows), masks)
    edited = [row for row in sampling.edited_rows if not errors[row] and row not in known_rows]
    apply_logit_edits(logits, sampling.states, sampling.output_indices, edited)
    for row in _changed_rows(sampling):
        if not errors[row] and logits[row].max() == -math.inf:
            errors[row] = ALL_TOKENS_BANNED
        if errors[row]:
            logits[row] = 0
    tokens = sample(logits, sampling.plan)
    details: list[SampleDetails] = []
    if raw is not None:
        scores = gather_logprobs(raw, tokens[scored], num_top_logprobs(sampling))
        details = build_logprob_details(to_token_logprobs(scores), sampling, errors)
    kept = [0 if error else token for token, error in zip(tokens.tolist(), errors, strict=True)]
    return SampleOutput(kept, errors, details)


def _sample_one_by_one(
    logits: Tensor, sampling: SamplingMetadata, errors: list[str]
) -> SampleOutput:
    """Sample row by row, so that an exception ends its own row only."""
    output = SampleOutput([], [], [])
    for row, error in enumerate(errors):
        sequence, state = sampling.sequences[row], sampling.states[row]
        metadata = build_sampling_metadata([sequence], [state], [sampling.output_indices[row]])
        try:
            row_output = _sample_batch(logits[row : row + 1], metadata, [error])
        except Exception as cause:
            row_output = SampleOutput([0], [f"sampling failed: {cause!r}"], [])
        output.tokens.extend(row_output.tokens)
        output.errors.extend(row_output.errors)
        output.details.extend(row_output.details)
    return output


def apply_logit_edits(
    logits: Tensor, states: list[SamplingState], output_indices: list[int], rows: list[int]
) -> None:
    """Apply bans, biases, penalties and bad words of some rows to their logits, in place.

    Args:
        logits: [all rows of a step, vocabulary] float32, contiguous.
        states: sampling state of each row of the step.
        output_indices: for each row, the position in the sequence's output of the token to sample.
        rows: indices of the rows to change; each has edits.

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
