"""Sampling of a step: state of each sequence, rows as columns, log-probabilities, grammars.

Shared by `gllm.runtime.worker.cpu.sampler` and `gllm.runtime.worker.cuda.sampler`, which turn
logits into tokens.
"""

import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.logprobs import LogprobTensors, compute_logprobs, gather_logprobs
from gllm.kernels.masking import build_token_bitmask, num_bitmask_words
from gllm.kernels.sampling_plan import SamplingPlan, plan_sampling
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams, TokenLogprobs
from gllm.messages.steps import RegisterSequences
from gllm.options.limits import MAX_LOGPROBS
from gllm.runtime.worker.grammars import GuideFactory
from gllm.runtime.worker.logit_edits import RequestLogitEdits
from gllm.scheduler.plan import SampledToken, ScheduledRow
from gllm.text.grammar.guide import GrammarGuide, GrammarGuideError

MAX_SCORED_ROWS = 256
"""Prompt tokens scored at once: their logits are as wide as the vocabulary."""
NOT_FINITE = "the model computed logits that are not finite"
"""Error of a row with logits that are NaN or infinite."""


class TokenHistory:
    """Output tokens of one sequence and how often each occurs, for penalties and bad words.

    `ids` and `counts` are arrays of distinct tokens in the order of their first appearance. Tokens
    that occur only in the prompt have a count of 0.
    """

    def __init__(self, prompt_tokens: Sequence[int] = ()) -> None:
        self.tokens: list[int] = []
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt_tokens))}
        self._num_prompt_slots = len(self._slots)
        self._ids = np.array([*self._slots, *[0] * 64], dtype=np.int64)
        self._counts = np.zeros(len(self._ids))

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens, in the order of their first appearance."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.float64]:
        """Occurrences of each of `ids` in the output."""
        return self._counts[: len(self._slots)]

    def append(self, token: int) -> None:
        """Append an output token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[slot] = token
        self._counts[slot] += 1
        self.tokens.append(token)

    def truncate(self, length: int) -> None:
        """Remove all output tokens but the first `length`.

        Raises:
            ValueError: the output has fewer tokens.
        """
        if len(self.tokens) < length:
            raise ValueError(f"output token {length} is sampled after {len(self.tokens)} tokens")
        while len(self.tokens) > length:
            token = self.tokens.pop()
            slot = self._slots[token]
            self._counts[slot] -= 1
            # Slots are assigned in order, so the slot that becomes free is the last one.
            if slot >= self._num_prompt_slots and not self._counts[slot]:
                del self._slots[token]


class SamplingState:
    """Sampling parameters and progress of one sequence: token history, grammar, prompt scores.

    The choices of a request share `edits`.

    Args:
        params: sampling parameters of the sequence.
        edits: bans, biases and allowed tokens of its request; None if it has none.
        prompt: token ids of the prompt; empty if sampling does not need them.
        guide: computes the tokens that the sequence's grammar allows; None without a grammar.
        output: tokens that the sequence generated before it was registered.
    """

    def __init__(
        self,
        params: SequenceSamplingParams,
        edits: RequestLogitEdits | None,
        prompt: list[int],
        guide: GrammarGuide | None = None,
        output: Sequence[int] = (),
    ) -> None:
        self.params = params
        self.edits = edits
        self.guide = guide
        """Position in the grammar, for a sequence that has one."""
        self.prompt = prompt
        """Token ids; empty if sampling does not need them."""
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        """LogprobTensors computed so far, by position in the prompt."""
        self.num_planned_scores = 0
        """Prompt tokens after the first one that a micro-batch so far has scored or will score."""
        self.error = ""
        """The reason for which the sequence has to end with an error."""
        has_scores = params.logprobs is not None or params.prompt_logprobs is not None
        has_details = has_scores or params.embeds
        self.is_plain = edits is None and guide is None and not has_details
        """True if a row only samples a token: no edits, no grammar, no details."""
        self.last_sample: tuple[int, int | None] | None = None
        """With speculation: output index and token of the last sample, if all guesses up to it were
        right; a window of guesses alone has to begin with this token."""
        self.first_index = len(output)
        """Index in the output of the first token that is sampled here."""
        self._output = output
        self._history: TokenHistory | None = None

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if log-probabilities of the prompt are requested and not all planned so far.

        Known from the step plans, without results, so that all ranks of a stage compute the logits
        of the same rows.
        """
        is_requested = self.params.prompt_logprobs is not None
        return is_requested and self.num_planned_scores < len(self.prompt) - 1

    def returns_prompt_logprobs(self, output_index: int) -> bool:
        """Return True if this output token returns the log-probabilities of the prompt."""
        return output_index == self.first_index and self.params.prompt_logprobs is not None

    @property
    def has_penalties(self) -> bool:
        """True if a repetition, presence or frequency penalty is on."""
        params = self.params
        values = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        return values != (1, 0, 0)

    @property
    def history(self) -> TokenHistory:
        """The output so far, created on first use: counting a long prompt takes a while."""
        if self._history is None:
            has_repetition = self.params.repetition_penalty != 1
            self._history = TokenHistory(self.prompt if has_repetition else ())
            for token in self._output:
                self._history.append(token)
        return self._history


def create_sampling_states(
    message: RegisterSequences, grammars: GuideFactory | None = None
) -> list[SamplingState]:
    """Create the sampling states of a request's choices; none if the message has no sampling.

    Args:
        message: request with prompt and sampling parameters, from the driver.
        grammars: creates guides for sequences with a grammar; None on ranks that do not sample.
    """
    request = message.sampling
    if request is None:
        return []
    request_edits = RequestLogitEdits(request)
    edits = request_edits if request_edits.applies_to(0) else None
    states = []
    choices = message.choices or range(request.choice, request.choice + message.n)
    outputs = message.outputs or [[]] * message.n
    for choice, output in zip(choices, outputs, strict=True):
        prompt_logprobs = request.prompt_logprobs if choice == choices[0] else None
        params = msgspec.structs.replace(request, choice=choice, prompt_logprobs=prompt_logprobs)
        prompt = message.prompt if params.needs_prompt else []
        guide = None
        if params.grammar and grammars is not None:
            guide = grammars.create_guide(params, output)
        states.append(SamplingState(params, edits, prompt, guide, output))
    return states


def create_default_states(message: RegisterSequences) -> list[SamplingState]:
    """Create sampling states without edits and grammars, for a request whose real ones failed.

    They compute the log-probabilities of the prompt if the request asks for them, because all ranks
    of a stage have to compute the same rows.

    Args:
        message: request with prompt and sampling parameters, from the driver.
    """
    request = message.sampling or SequenceSamplingParams()
    default = SequenceSamplingParams()
    first = SequenceSamplingParams(prompt_logprobs=request.prompt_logprobs)
    return [
        SamplingState(default if index else first, None, [] if index else message.prompt)
        for index in range(message.n)
    ]


@dataclass(slots=True)
class PromptChunk:
    """Prompt tokens of one sequence whose log-probabilities a batch computes (prompt_logprobs).

    The logits of a token's predecessor score it.
    """

    state: SamplingState
    first_row: int
    """Token row of the batch that scores the first of them."""
    position: int
    """Position of the first of them in the prompt."""
    tokens: list[int]
    scores: list[LogprobTensors] = field(default_factory=list)
    """One entry per MAX_SCORED_ROWS tokens."""

    @property
    def num_top_logprobs(self) -> int:
        """Number of top tokens returned with each prompt token."""
        return self.state.params.prompt_logprobs or 0

    @property
    def rows(self) -> range:
        """Token rows of the batch that score the tokens."""
        return range(self.first_row, self.first_row + len(self.tokens))

    def compute_scores(self, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """Score the tokens.

        Args:
            hidden: [tokens, hidden] of the batch.
            compute_logits: maps rows of `hidden` to logits [rows, vocabulary]; without any row on
                ranks that do not sample, which only help to compute them.
        """
        targets = torch.tensor(self.tokens, dtype=torch.int64)
        rows = hidden[self.first_row : self.first_row + len(targets)]
        parts = zip(rows.split(MAX_SCORED_ROWS), targets.split(MAX_SCORED_ROWS), strict=True)
        for part, tokens in parts:
            logits = compute_logits(part)
            if len(logits) < len(part):
                continue
            logprobs = compute_logprobs(logits)
            self.scores.append(gather_logprobs(logprobs, tokens, self.num_top_logprobs))

    def store_scores(self) -> None:
        """Store the scores in the sequence's state; a position computed again is replaced."""
        entries = [entry for scores in self.scores for entry in to_token_logprobs(scores)]
        if not all(math.isfinite(entry.logprob) for entry in entries):
            self.state.error = NOT_FINITE
        self.state.prompt_logprobs.update(enumerate(entries, start=self.position))


def create_prompt_chunks(
    state: SamplingState, row: ScheduledRow, first_row: int
) -> list[PromptChunk]:
    """Return the prompt tokens whose log-probabilities a row computes, as at most one chunk.

    Args:
        state: sampling state of the row's sequence.
        row: tokens of the sequence in this step.
        first_row: index of the row's first token in the batch.
    """
    tokens = state.prompt[row.start + 1 : row.start + row.num_tokens + 1]
    if not tokens or not state.needs_prompt_logprobs:
        return []
    state.num_planned_scores = max(state.num_planned_scores, row.start + len(tokens))
    return [PromptChunk(state, first_row, row.start + 1, tokens)]


def to_token_logprobs(scores: LogprobTensors) -> list[TokenLogprobs]:
    """Convert log-probability tensors to TokenLogprobs messages, one per row."""
    columns = (scores.tokens, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [TokenLogprobs(*row) for row in rows]


class SampledWindow(NamedTuple):
    """Sampling rows of one sequence in a step with speculation.

    The first row is the one before the first draft token to verify; there may be no draft tokens.
    """

    first_row: int
    """The rows are consecutive."""
    draft_token_ids: list[int]
    """Draft token behind each row but the last one."""
    previous_guess: int | None = None
    """The row's first token, if that is a guess too: of the last sample of the row before."""

    @property
    def rows(self) -> range:
        """Indices of the sampling rows."""
        return range(self.first_row, self.first_row + len(self.draft_token_ids) + 1)

    def next_row(self, tokens: list[int], errors: list[str], num_rows: int) -> int | None:
        """Return the row behind the first `num_rows`, if the draft token before it is right.

        Args:
            tokens: sampled token of each row of the step.
            errors: error of each row of the step.
            num_rows: rows of the window that are sampled and verified.
        """
        last = self.first_row + num_rows - 1
        if num_rows > len(self.draft_token_ids) or errors[last]:
            return None
        return last + 1 if tokens[last] == self.draft_token_ids[num_rows - 1] else None

    def count_rows_of_text(self, tokens: list[int], errors: list[str]) -> int:
        """Return how many leading rows sample a token of the text, or its error in the first row.

        All rows are sampled; see `next_row` for the arguments.
        """
        num_rows = 1
        while (row := self.next_row(tokens, errors, num_rows)) is not None and not errors[row]:
            num_rows += 1
        return num_rows


def create_window(row: ScheduledRow, first_row: int) -> SampledWindow:
    """Return the sampling rows of a row of a plan.

    Args:
        row: that samples, with or without draft tokens.
        first_row: index of its first sampling row in the step.
    """
    num_drafts = row.num_draft_tokens
    drafts = row.token_ids[len(row.token_ids) - num_drafts :]
    if num_drafts == row.num_tokens:
        return SampledWindow(first_row, drafts[1:], drafts[0])
    return SampledWindow(first_row, drafts)


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """Sampling parameters of a step's rows that sample a token, one list per property.

    Only rows whose last token is computed in the step sample; the lists of rows have their indices.
    """

    sequences: list[tuple[int, int]]
    """Sequence id and number of preemptions."""
    states: list[SamplingState]
    output_indices: list[int]
    """Index of the token in its sequence's output, from 0."""
    plan: SamplingPlan
    """Temperature, top-k, top-p, min-p and seed of each row."""
    edited_rows: list[int]
    """Rows whose logits are edited."""
    embedding_rows: list[int]
    """Rows that return the embedding of their prompt."""
    logprob_rows: list[int]
    """Rows that return log-probabilities."""
    grammar_rows: list[int]
    """Rows with a grammar."""
    windows: Sequence[SampledWindow] = ()
    """All rows by sequence, with speculation; empty without."""

    def select(self, rows: list[int]) -> "SamplingMetadata":
        """Return the metadata of some rows; windows whose first row is among them are whole."""
        index = {row: i for i, row in enumerate(rows)}
        selected = build_sampling_metadata(
            [self.sequences[row] for row in rows],
            [self.states[row] for row in rows],
            [self.output_indices[row] for row in rows],
        )
        windows = [
            window._replace(first_row=index[window.first_row])
            for window in self.windows
            if window.first_row in index
        ]
        return replace(selected, windows=windows)


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """Sampled tokens and errors of each sampling row of a step, and requested log-probabilities."""

    tokens: list[int]
    """Token ids; 0 for a row with an error."""
    errors: list[str]
    """Empty for a row with a token."""
    details: list[SampleDetails]
    """Log-probabilities or embeddings of the rows that request them."""
    forced_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By row, tokens that follow the sampled one because the grammar allows no others."""

    def update(self, rows: Sequence[int], output: "SampleOutput") -> None:
        """Replace the output of some rows by that of a step that has only these rows."""
        for index, row in enumerate(rows):
            self.tokens[row], self.errors[row] = output.tokens[index], output.errors[index]
            if index in output.forced_tokens:
                self.forced_tokens[row] = output.forced_tokens[index]
        self.details.extend(output.details)


def build_sampling_metadata(
    sequences: list[tuple[int, int]], states: list[SamplingState], output_indices: list[int]
) -> SamplingMetadata:
    """Collect the sampling parameters of a step's sampling rows into one list per property.

    Args:
        sequences: sequence id and number of preemptions of each row.
        states: sampling state of each row's sequence.
        output_indices: position in the sequence's output of the token that each row samples.
    """
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


def to_sampled_tokens(sampling: SamplingMetadata, output: SampleOutput) -> list[SampledToken]:
    """Convert sampled tokens and errors to one result per row, for the scheduler.

    With speculation, to one result per sequence, and to none for a window that is void.
    """
    if sampling.windows:
        results = [_verify_window(sampling, output, window) for window in sampling.windows]
        return [result for result in results if result is not None]
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


def is_void(sampling: SamplingMetadata, window: SampledWindow) -> bool:
    """Return True if a window continues one whose guesses were not all right."""
    first = window.first_row
    last_sample = (sampling.output_indices[first] - 1, window.previous_guess)
    return window.previous_guess is not None and sampling.states[first].last_sample != last_sample


def list_discarded_rows(
    sampling: SamplingMetadata, tokens: list[int], errors: list[str]
) -> set[int]:
    """Return the rows of windows whose sample is no token of the text.

    These are all rows of a void window, and in others those behind a wrong guess and those from an
    error on that is not in the first row. Has to be called before `to_sampled_tokens`, if all rows
    of windows are sampled at once.

    Args:
        sampling: sampling rows of the step.
        tokens: sampled token of each row.
        errors: error of each row.
    """
    discarded: set[int] = set()
    for window in sampling.windows:
        num_rows = 0
        if not is_void(sampling, window):
            num_rows = window.count_rows_of_text(tokens, errors)
        discarded.update(window.rows[num_rows:])
    return discarded


def _verify_window(
    sampling: SamplingMetadata, output: SampleOutput, window: SampledWindow
) -> SampledToken | None:
    """Return the result of a window, up to the first sample that differs from its guess.

    A later row that fails ends the window before it: it is computed again as a first row.
    """
    first, state = window.first_row, sampling.states[window.first_row]
    if is_void(sampling, window):
        state.last_sample = None
        return None
    tokens, errors = output.tokens, output.errors
    num_rows = window.count_rows_of_text(tokens, errors)
    last = first + num_rows - 1
    is_whole = num_rows > len(window.draft_token_ids) and not errors[last]
    state.last_sample = (sampling.output_indices[last], tokens[last]) if is_whole else None
    further = tokens[first + 1 : last + 1]
    for row in range(first, last + 1):
        # Forced tokens behind the last sample; a grammar returns each of them once.
        further += output.forced_tokens.get(row, ())[last - row :]
    seq, num_preemptions = sampling.sequences[first]
    error = errors[first]
    return SampledToken(
        seq, num_preemptions, tokens[first], error, tuple(further), error != NOT_FINITE
    )


def advance_guides(sampling: SamplingMetadata, output: SampleOutput) -> dict[int, tuple[int, ...]]:
    """Add sampled tokens to their grammars; store tokens that the grammars force, and errors.

    A grammar replaces a token that it had forced, adds the tokens that must follow, or fails the
    row.

    Args:
        sampling: sampling rows of the step.
        output: sampled tokens; changed in place.

    Returns:
        For each row with a grammar, the tokens that are new in its output.
    """
    new_tokens = {}
    for row in sampling.grammar_rows:
        guide, index = get_grammar_guide(sampling, row), sampling.output_indices[row]
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
    """Mark the grammars of a failed step's sequences as failed, so that no later step waits.

    Args:
        states: sampling states of the step's rows; those without a grammar are ignored.
        error: cause of the failure.
    """
    for state in states:
        if state.guide is not None:
            state.guide.fail(f"its step failed: {error}")


def collect_grammar_masks(sampling: SamplingMetadata, vocab_size: int) -> tuple[Tensor, set[int]]:
    """Wait for the masks of allowed tokens of all rows with a grammar, and return them.

    Args:
        sampling: sampling rows of the step.
        vocab_size: width of the logits.

    Returns:
        Bit masks [rows with a grammar, words] int32, and the rows whose token the grammar has
            already forced. The mask of such a row allows that token alone; the mask of a failed row
            allows none.
    """
    masks, known_rows = [], set()
    for row in sampling.grammar_rows:
        try:
            allowed = get_grammar_guide(sampling, row).allowed_tokens(sampling.output_indices[row])
        except GrammarGuideError:
            allowed = b"\0" * 4 * num_bitmask_words(vocab_size)
        if isinstance(allowed, int):
            known_rows.add(row)
            masks.append(build_token_bitmask(torch.tensor([allowed]), vocab_size))
        else:
            words = torch.frombuffer(bytearray(allowed), dtype=torch.int32)
            masks.append(words[: num_bitmask_words(vocab_size)])
    return torch.stack(masks), known_rows


def get_grammar_guide(sampling: SamplingMetadata, row: int) -> GrammarGuide:
    """Return the grammar guide of a sampling row, which must have one."""
    guide = sampling.states[row].guide
    assert guide is not None, "the row has a grammar"
    return guide


def num_top_logprobs(sampling: SamplingMetadata) -> int:
    """Return how many most likely tokens to score: MAX_LOGPROBS if a row needs any, else 0.

    The fixed number ranks tokens with equal logits alike in all batches.
    """
    rows = sampling.logprob_rows
    return MAX_LOGPROBS if any(sampling.states[row].params.logprobs for row in rows) else 0


def build_logprob_details(
    scores: list[TokenLogprobs],
    sampling: SamplingMetadata,
    errors: list[str],
    discarded_rows: Container[int] = (),
) -> list[SampleDetails]:
    """Return the requested log-probabilities of each row; rows with an error have none.

    Args:
        scores: log-probabilities of the rows in `sampling.logprob_rows`, in this order.
        sampling: sampling rows of the step.
        errors: error of each sampling row; empty for none.
        discarded_rows: rows whose sample is no token of the text, and which have none either.
    """
    details = []
    for row, score in zip(sampling.logprob_rows, scores, strict=True):
        if not errors[row] and row not in discarded_rows:
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
    """Return the embedding of each row that requests one; rows with an error have none.

    Args:
        sampling: sampling rows of the step.
        embeddings: [embedding rows, hidden] float32, on the host; None if there are none.
        errors: error of each sampling row; empty for none.
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
