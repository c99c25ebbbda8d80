"""Sampler of a device: samples and scores tokens there, and decodes what the host reads back.

The order is that of `gllm.runtime.worker.cpu.sampler`: check for finite logits, log-probabilities,
logit edits, sampling. Nothing synchronizes: a row that fails has an error code instead of a token.
All rows of a window of draft tokens are sampled at once. Edits look back at the tokens in the slots
of the KV cache, which has the guesses before a row: if they are right they are the text, and if one
is wrong the row's sample is discarded.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.bad_words import BadWords
from gllm.kernels.history import TokenHistories
from gllm.kernels.logprobs import LogprobTensors, compute_logprobs, gather_logprobs, pack_logprobs
from gllm.kernels.masking import apply_bad_words, apply_token_bitmask
from gllm.kernels.penalties import apply_history_penalties
from gllm.kernels.sampling import find_finite_rows, sample
from gllm.kernels.sampling_plan import SamplingPlan
from gllm.messages.sampling import ALL_TOKENS_BANNED, SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.options.limits import MAX_LOGPROBS
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.logit_edits import (
    RequestLogitEdits,
    StaticLogitEdits,
    plan_static_edits,
    to_int64,
)
from gllm.runtime.worker.sampling import (
    MAX_SCORED_ROWS,
    NOT_FINITE,
    PromptChunk,
    SampleOutput,
    SamplingMetadata,
    build_logprob_details,
    build_sampling_metadata,
    create_sampling_states,
    list_discarded_rows,
    num_top_logprobs,
    to_token_logprobs,
)

NOT_FINITE_CODE, ALL_BANNED_CODE = -1, -2
"""Error codes in the place of tokens."""
ERRORS = {NOT_FINITE_CODE: NOT_FINITE, ALL_BANNED_CODE: ALL_TOKENS_BANNED}
"""Error of a row by its code."""
LARGEST_PARAMS = SequenceSamplingParams(
    top_p=0.9,
    repetition_penalty=1.1,
    allowed=(0, 1),
    bad_words=((0,), (0, 1)),
    logprobs=MAX_LOGPROBS,
)
"""Sampling parameters that take most memory: one of every kind of edit."""


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """Changes to a step's logits on the GPU: bans, biases, penalties and bad words."""

    static: StaticLogitEdits
    """Allowed tokens, bans and biases, which do not depend on the output so far."""
    histories: TokenHistories
    """Token histories of rows with penalties or with bad words of several tokens."""
    phrases: BadWords
    """Bad words of several tokens."""
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
    """Builds the tensors of bans, biases, penalties and bad words of each step, on the host."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self._vocab_size, self._block_size = vocab_size, block_size
        self._phrases: WeakKeyDictionary[RequestLogitEdits, _RequestPhrases] = WeakKeyDictionary()

    @property
    def num_requests(self) -> int:
        """Number of requests whose multi-token bad words are cached."""
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


class SamplerInputs(NamedTuple):
    """Tensors that the GPU sampler reads in one step: parameters, logit edits, rows to score."""

    plan: SamplingPlan
    """Temperature, top-k, top-p, min-p and seed of each row."""
    edits: LogitEdits | None
    """Changes to the logits before sampling; None if there are none."""
    logprob_rows: Tensor
    """[scored rows] int64: rows of logits whose sampled token is scored."""
    embedding_rows: Tensor
    """[embeddings] int64: sampling rows that return an embedding."""
    prompt_rows: Tensor
    """[prompt tokens] int64: token rows that score the next token of their prompt."""
    prompt_targets: Tensor
    """[prompt tokens] int64: those next tokens."""
    num_top_logprobs: int
    """Number of top tokens scored with each token."""


class DeviceSampler:
    """Samples tokens and computes log-probabilities on the GPU, without waiting for the host."""

    def __init__(self, vocab_size: int, block_size: int) -> None:
        self._planner = LogitEditPlanner(vocab_size, block_size)

    def plan(
        self,
        sampling: SamplingMetadata,
        prompt_chunks: Sequence[PromptChunk],
        num_tokens: Sequence[int],
        block_table: npt.NDArray[np.int64],
    ) -> SamplerInputs:
        """Build the sampler's inputs of a step, on the host.

        Args:
            sampling: the sampling rows.
            prompt_chunks: prompt tokens that the step scores.
            num_tokens: tokens of each row's sequence, prompt and output.
            block_table: [rows, blocks], block ids of each row's sequence.
        """
        prompt_rows = [row for chunk in prompt_chunks for row in chunk.rows]
        targets = [token for chunk in prompt_chunks for token in chunk.tokens]
        has_prompt_top = any(chunk.num_top_logprobs for chunk in prompt_chunks)
        return SamplerInputs(
            sampling.plan.for_gpu(),
            self._planner.plan(sampling, num_tokens, block_table),
            torch.tensor(sampling.logprob_rows, dtype=torch.int64),
            torch.tensor(sampling.embedding_rows, dtype=torch.int64),
            torch.tensor(prompt_rows, dtype=torch.int64),
            torch.tensor(targets, dtype=torch.int64),
            MAX_LOGPROBS if has_prompt_top else num_top_logprobs(sampling),
        )

    def create_example(
        self, num_rows: int, params: SequenceSamplingParams = LARGEST_PARAMS
    ) -> SamplerInputs:
        """Create inputs of rows whose sequences have one token each."""
        states = create_sampling_states(RegisterSequences(0, 1, [0], params, n=num_rows))
        sampling = build_sampling_metadata([(0, 0)] * num_rows, states, [0] * num_rows)
        blocks = np.zeros((num_rows, 1), dtype=np.int64)
        return self.plan(sampling, [], [1] * num_rows, blocks)

    def score_prompts(
        self,
        hidden: Tensor,
        inputs: SamplerInputs,
        compute_logits: Callable[[Tensor], Tensor],
    ) -> list[Tensor]:
        """Score the prompt tokens of a step.

        Args:
            hidden: [tokens, hidden] of the step.
            inputs: inputs of the step, on the device.
            compute_logits: maps rows of `hidden` to logits [rows, vocabulary]; on ranks that only
                take part in that it returns no rows.

        Returns:
            Packed scores, [rows, width] float64 each; none on such ranks.
        """
        parts = zip(
            inputs.prompt_rows.split(MAX_SCORED_ROWS),
            inputs.prompt_targets.split(MAX_SCORED_ROWS),
            strict=True,
        )
        scores = []
        for rows, targets in parts:
            if len(rows):
                logits = compute_logits(hidden.index_select(0, rows))
                if not len(logits):
                    continue
                logprobs = compute_logprobs(logits)
                scores.append(
                    pack_logprobs(gather_logprobs(logprobs, targets, inputs.num_top_logprobs))
                )
        return scores

    def sample(
        self,
        logits: Tensor,
        inputs: SamplerInputs,
        cached_tokens: Tensor,
        grammar_masks: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Sample the token of each row.

        Args:
            logits: [rows, vocabulary] float32, contiguous; overwritten.
            inputs: inputs of the step, on the device.
            cached_tokens: [slots] int64, the token of each slot of the KV cache.
            grammar_masks: rows with a grammar [n] int64 and their masks [n, words] int32.

        Returns:
            Tokens [rows] int64, with the codes of ERRORS for rows that failed, and the packed
            scores of rows with log-probabilities.
        """
        is_finite = find_finite_rows(logits)
        logits.masked_fill_(~is_finite[:, None], 0)
        logprobs = has_token = None
        if len(inputs.logprob_rows):
            logprobs = compute_logprobs(logits.index_select(0, inputs.logprob_rows))
        if grammar_masks is not None:
            apply_token_bitmask(logits, *grammar_masks)
        if inputs.edits is not None:
            inputs.edits.apply(logits, cached_tokens)
        if grammar_masks is not None or inputs.edits is not None:
            has_token = logits.amax(dim=-1) > -torch.inf
            logits.masked_fill_(~has_token[:, None], 0)
        tokens = sample(logits, inputs.plan)
        scores = []
        if logprobs is not None:
            scored = tokens.index_select(0, inputs.logprob_rows)
            scores.append(pack_logprobs(gather_logprobs(logprobs, scored, inputs.num_top_logprobs)))
        if has_token is not None:
            tokens = tokens.masked_fill(~has_token, ALL_BANNED_CODE)
        return tokens.masked_fill(~is_finite, NOT_FINITE_CODE), scores


def to_sample_output(batch: Batch, tokens: list[int], scores: LogprobTensors) -> SampleOutput:
    """Convert sampled tokens and log-probabilities, copied from the GPU, to a batch's output.

    The log-probabilities of prompts are stored in their sequences' states.

    Args:
        batch: the computed micro-batch.
        tokens: token id or negative error code (see ERRORS) of each sampling row.
        scores: log-probabilities of the batch's prompt tokens, followed by those of sampled tokens.
    """
    sampling = batch.sampling
    begin = 0
    for chunk in batch.prompt_chunks:
        end = begin + len(chunk.tokens)
        chunk.scores.append(_slice_scores(scores, begin, end, chunk.num_top_logprobs))
        chunk.store_scores()
        begin = end
    errors = [ERRORS.get(token, "") for token in tokens]
    for row in sampling.logprob_rows:
        errors[row] = errors[row] or sampling.states[row].error
    row_scores = _slice_scores(scores, begin, begin + len(sampling.logprob_rows), MAX_LOGPROBS)
    discarded = list_discarded_rows(sampling, tokens, errors)
    details = build_logprob_details(to_token_logprobs(row_scores), sampling, errors, discarded)
    kept = [0 if error else token for token, error in zip(tokens, errors, strict=True)]
    return SampleOutput(kept, errors, details)


def _slice_scores(scores: LogprobTensors, begin: int, end: int, num_top: int) -> LogprobTensors:
    """Return some rows of scores with their `num_top` top tokens."""
    return LogprobTensors(
        scores.tokens[begin:end],
        scores.logprobs[begin:end],
        scores.ranks[begin:end],
        scores.top_ids[begin:end, :num_top],
        scores.top_logprobs[begin:end, :num_top],
    )
