"""Sampling of a step: its rows as columns, their outputs, and their grammars.

Shared by `gllm.runtime.worker.cpu.sampler` and `gllm.runtime.worker.cuda.sampler`, which turn
logits into tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.masking import build_token_bitmask, num_bitmask_words
from gllm.kernels.sampling_plan import SamplingPlan, plan_sampling
from gllm.messages.sampling import SampleDetails, TokenLogprobs
from gllm.options.limits import MAX_LOGPROBS
from gllm.runtime.worker.logprobs import NOT_FINITE
from gllm.runtime.worker.sampling_state import SamplingState
from gllm.scheduler.plan import SampledToken
from gllm.text.grammar.guide import GrammarGuide, GrammarGuideError

ALL_TOKENS_BANNED = "every token of the vocabulary is forbidden"
"""Error of a row whose request leaves it no token."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The sampling rows of a step as columns; each list has one entry per row."""

    sequences: list[tuple[int, int]]
    """Sequence id and number of preemptions."""
    states: list[SamplingState]
    output_indices: list[int]
    """Index of the token in its sequence's output, from 0."""
    plan: SamplingPlan
    edited_rows: list[int]
    """Rows whose logits are edited."""
    embedding_rows: list[int]
    """Rows that return the embedding of their prompt."""
    logprob_rows: list[int]
    """Rows that return log-probabilities."""
    grammar_rows: list[int]
    """Rows with a grammar."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Tokens, errors and details of the sampling rows of a step."""

    tokens: list[int]
    """Token ids; 0 for a row with an error."""
    errors: list[str]
    """Empty for a row with a token."""
    details: list[SampleDetails]
    """Details of the rows that return any."""
    forced_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By row, tokens that follow the sampled one because the grammar allows no others."""


def build_sampling_metadata(
    sequences: list[tuple[int, int]], states: list[SamplingState], output_indices: list[int]
) -> SamplingMetadata:
    """Arrange the sampling rows of a step as columns."""
    params = [state.params for state in states]
    plan = plan_sampling(
        temperature=np.array([param.temperature for param in params], dtype=np.float32),
        top_k=np.array([param.top_k for param in params], dtype=np.int64),
        top_p=np.array([param.top_p for param in params], dtype=np.float32),
        min_p=np.array([param.min_p for param in params], dtype=np.float32),
        seed=np.array([param.seed for param in params], dtype=np.int64),
        choice=np.array([param.choice for param in params], dtype=np.int64),
        index=np.array(output_indices, dtype=np.int64),
    )
    edited, embedding, logprob, grammar = [], [], [], []
    for row, state in enumerate(states):
        if state.is_plain:
            continue
        has_prompt_logprobs = state.returns_prompt_logprobs(output_indices[row])
        if state.edits is not None and state.edits.applies_to(output_indices[row]):
            edited.append(row)
        if state.params.logprobs is not None or has_prompt_logprobs:
            logprob.append(row)
        if state.params.embeds and not output_indices[row]:
            embedding.append(row)
        if state.guide is not None:
            grammar.append(row)
    return SamplingMetadata(
        sequences, states, output_indices, plan, edited, embedding, logprob, grammar
    )


def to_sampled(sampling: SamplingMetadata, output: SampleOutput) -> list[SampledToken]:
    """Return the result of each row as the scheduler takes it."""
    rows = zip(sampling.sequences, output.tokens, output.errors, strict=True)
    return [
        SampledToken(
            seq,
            num_preemptions,
            token,
            error,
            output.forced_tokens.get(row, ()),
            error != NOT_FINITE,
        )
        for row, ((seq, num_preemptions), token, error) in enumerate(rows)
    ]


def advance_guides(sampling: SamplingMetadata, output: SampleOutput) -> dict[int, tuple[int, ...]]:
    """Report the sampled tokens to the guides and complete the output by what they know.

    A guide replaces a token that was forced, adds the tokens that follow it, or the error of a row
    that it cannot continue.

    Returns:
        By row with a grammar, the tokens that are new in its output.
    """
    new_tokens = {}
    for row in sampling.grammar_rows:
        guide, index = guide_of(sampling, row), sampling.output_indices[row]
        try:
            if output.errors[row]:
                guide.fail(output.errors[row])
            new_tokens[row] = guide.accept_token(index, output.tokens[row])
        except GrammarGuideError as error:
            output.tokens[row], output.errors[row] = 0, str(error)
        else:
            output.tokens[row] = guide.settled_token(index)
            output.forced_tokens[row] = new_tokens[row][1:]
    return new_tokens


def fail_guides(states: Iterable[SamplingState], error: str) -> None:
    """Fail the guides of a failed step: the tokens that later steps wait for never arrive."""
    for state in states:
        if state.guide is not None:
            state.guide.fail(f"its step failed: {error}")


def collect_grammar_masks(sampling: SamplingMetadata, vocab_size: int) -> tuple[Tensor, set[int]]:
    """Wait for the guides and return the tokens that they allow.

    Returns:
        Masks [rows with a grammar, words] int32 and the rows whose token is already known. The mask
        of such a row allows that token alone; the mask of a row that cannot continue allows none.
    """
    masks, known_rows = [], set()
    for row in sampling.grammar_rows:
        try:
            allowed = guide_of(sampling, row).allowed_tokens(sampling.output_indices[row])
        except GrammarGuideError:
            allowed = b"\0" * 4 * num_bitmask_words(vocab_size)
        if isinstance(allowed, int):
            known_rows.add(row)
            masks.append(build_token_bitmask(torch.tensor([allowed]), vocab_size))
        else:
            words = torch.frombuffer(bytearray(allowed), dtype=torch.int32)
            masks.append(words[: num_bitmask_words(vocab_size)])
    return torch.stack(masks), known_rows


def guide_of(sampling: SamplingMetadata, row: int) -> GrammarGuide:
    """Return the guide of a row with a grammar."""
    guide = sampling.states[row].guide
    assert guide is not None, "the row has a grammar"
    return guide


def num_top_logprobs(sampling: SamplingMetadata) -> int:
    """Return the number of top tokens to score.

    It is the same for all batches that need any, so equal logits are ranked alike in each of them.
    """
    rows = sampling.logprob_rows
    return MAX_LOGPROBS if any(sampling.states[row].params.logprobs for row in rows) else 0


def build_logprob_details(
    scores: list[TokenLogprobs], sampling: SamplingMetadata, errors: list[str]
) -> list[SampleDetails]:
    """Return the details of rows with log-probabilities; rows with an error have none.

    Args:
        scores: of each of `sampling.logprob_rows`.
        sampling: the rows.
        errors: of all rows.
    """
    details = []
    for row, score in zip(sampling.logprob_rows, scores, strict=True):
        if not errors[row]:
            state = sampling.states[row]
            count = state.params.logprobs
            sampled = None if count is None else _keep_top(score, count)
            prompt = []
            if state.returns_prompt_logprobs(sampling.output_indices[row]):
                prompt = _by_position(state.prompt_logprobs)
            details.append(SampleDetails(sampling.sequences[row][0], sampled, prompt))
    return details


def _keep_top(score: TokenLogprobs, count: int) -> TokenLogprobs:
    """Return the score with its `count` top tokens."""
    top_ids, top_logprobs = score.top_ids[:count], score.top_logprobs[:count]
    return TokenLogprobs(score.token, score.logprob, score.rank, top_ids, top_logprobs)


def _by_position(scores: dict[int, TokenLogprobs]) -> list[TokenLogprobs]:
    return [scores[position] for position in sorted(scores)]


def build_embedding_details(
    sampling: SamplingMetadata, embeddings: Tensor | None, errors: list[str]
) -> list[SampleDetails]:
    """Return the details of rows with an embedding; rows with an error have none.

    embeddings: [embedding rows, hidden] float32, on the host; None if there are none.
    """
    if embeddings is None:
        return []
    return [
        SampleDetails(
            sampling.sequences[row][0], None, [], embedding.numpy().astype("<f4").tobytes()
        )
        for row, embedding in zip(sampling.embedding_rows, embeddings, strict=True)
        if not errors[row]
    ]
