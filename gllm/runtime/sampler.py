"""From logits to tokens, row by row responsible.

Owns the order of drawing (log-probabilities, edits, draw) and what goes wrong in single rows: a row
that cannot be sampled gets an error, the others their tokens. The arithmetic is in gllm/kernels.
Knows nothing of steps.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from gllm.config.limits import MAX_LOGPROBS
from gllm.grammar.guide import GrammarGuide, GrammarGuideError
from gllm.kernels.logprobs import compute_logprobs, gather_logprobs
from gllm.kernels.masking import apply_token_bitmask, build_token_bitmask, num_bitmask_words
from gllm.kernels.sampling import list_finite_rows, sample
from gllm.kernels.sampling_plan import SamplingPlan, plan_sampling
from gllm.messages.sampling import SampleDetails, TokenLogprobs
from gllm.runtime.logprobs import NOT_FINITE, entries_of
from gllm.runtime.sampling_state import SamplingState, edit_logits
from gllm.scheduler.plan import SampledToken

ALL_FORBIDDEN = "every token of the vocabulary is forbidden"


@dataclass(frozen=True, slots=True)
class SampledRows:
    """The sampling rows of a batch; lists of all rows are in their order."""

    owners: list[tuple[int, int]]
    """(sequence, epoch)."""
    states: list[SamplingState]
    indices: list[int]
    """Which token of its output each row draws, counted from 0."""
    plan: SamplingPlan
    edited: list[int]
    """Rows whose logits are changed before drawing."""
    embedded: list[int]
    """Rows that tell the embedding of their prompt."""
    told: list[int]
    """Rows that tell log-probabilities."""
    guided: list[int]
    """Rows with a grammar."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """What the sampling rows of a batch brought, in their order."""

    tokens: list[int]
    errors: list[str]
    """Empty where there is a token."""
    logprobs: list[SampleDetails]
    """Of the rows that tell them."""
    forced: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By row, tokens that follow the one drawn because a grammar allows no others."""


def plan_rows(
    owners: list[tuple[int, int]], states: list[SamplingState], indices: list[int]
) -> SampledRows:
    """Columns for the sampling rows of a batch."""
    specs = [state.spec for state in states]
    plan = plan_sampling(
        temperature=np.array([spec.temperature for spec in specs], dtype=np.float32),
        top_k=np.array([spec.top_k for spec in specs], dtype=np.int64),
        top_p=np.array([spec.top_p for spec in specs], dtype=np.float32),
        min_p=np.array([spec.min_p for spec in specs], dtype=np.float32),
        seed=np.array([spec.seed for spec in specs], dtype=np.int64),
        choice=np.array([spec.choice for spec in specs], dtype=np.int64),
        index=np.array(indices, dtype=np.int64),
    )
    special = [row for row, state in enumerate(states) if not state.is_plain]
    edited, embedded, told, guided = [], [], [], []
    for row in special:
        edits, spec = states[row].edits, specs[row]
        if edits is not None and edits.concern(indices[row]):
            edited.append(row)
        if spec.logprobs is not None or (spec.prompt_logprobs is not None and not indices[row]):
            told.append(row)
        if spec.embeds and not indices[row]:
            embedded.append(row)
        if states[row].guide is not None:
            guided.append(row)
    return SampledRows(owners, states, indices, plan, edited, embedded, told, guided)


def draw(logits: Tensor, rows: SampledRows) -> SampleOutput:
    """The token of each row and, where there is none, the error.

    logits [rows, vocabulary] float32 are overwritten.
    """
    if not rows.states:
        return SampleOutput([], [], [])
    errors = _faults(logits, rows)
    failed = [row for row, error in enumerate(errors) if error]
    if failed:
        logits[failed] = 0
    changed = _changed(rows)
    raw = logits[changed] if changed else None
    try:
        drawn = _draw_all(logits, rows, errors)
    except Exception:
        if raw is not None:
            logits[changed] = raw
        drawn = _draw_each(logits, rows, errors)
    taken = take_forced(rows, drawn)
    for row in rows.edited:
        if not drawn.errors[row]:
            for token in taken.get(row, drawn.tokens[row : row + 1]):
                rows.states[row].history.append(token)
    return drawn


def results(rows: SampledRows, drawn: SampleOutput) -> list[SampledToken]:
    """What the driver hears of each row."""
    told = zip(rows.owners, drawn.tokens, drawn.errors, strict=True)
    return [
        SampledToken(seq, epoch, token, error, drawn.forced.get(row, ()), error != NOT_FINITE)
        for row, ((seq, epoch), token, error) in enumerate(told)
    ]


def _changed(rows: SampledRows) -> list[int]:
    """Rows whose logits may be changed."""
    return sorted({*rows.edited, *rows.guided}) if rows.guided else rows.edited


def take_forced(rows: SampledRows, drawn: SampleOutput) -> dict[int, tuple[int, ...]]:
    """Tell guides what was drawn. They may know the token better, where it was forced, those that
    follow, and why there is none. By guided row, the tokens that are new in its output."""
    taken = {}
    for row in rows.guided:
        guide, index = _guide(rows, row), rows.indices[row]
        try:
            if drawn.errors[row]:
                guide.fail(drawn.errors[row])
            taken[row] = guide.accept_token(index, drawn.tokens[row])
        except GrammarGuideError as error:
            drawn.tokens[row], drawn.errors[row] = 0, str(error)
        else:
            drawn.tokens[row], drawn.forced[row] = guide.settled_token(index), taken[row][1:]
    return taken


def give_up(states: Iterable[SamplingState], error: str) -> None:
    """Fail the guides of sequences whose step failed: tokens that others wait for never come."""
    for state in states:
        if state.guide is not None:
            state.guide.fail(f"its step failed: {error}")


def _faults(logits: Tensor, rows: SampledRows) -> list[str]:
    """Why each row cannot be drawn, as far as its logits and its prompt's tell."""
    errors = ["" if finite else NOT_FINITE for finite in list_finite_rows(logits)]
    for row in rows.told:
        errors[row] = errors[row] or rows.states[row].fault
    return errors


def _draw_all(logits: Tensor, rows: SampledRows, errors: list[str]) -> SampleOutput:
    """As `draw`, for rows with these errors; logits are finite."""
    errors = list(errors)
    raw = compute_logprobs(logits[rows.told]) if rows.told else None
    settled: set[int] = set()
    if rows.guided:
        masks, settled = follow_grammars(rows, logits.shape[1])
        apply_token_bitmask(logits, torch.tensor(rows.guided), masks)
    edited = [row for row in rows.edited if not errors[row] and row not in settled]
    edit_logits(logits, rows.states, rows.indices, edited)
    for row in _changed(rows):
        if not errors[row] and logits[row].max() == -math.inf:
            errors[row] = ALL_FORBIDDEN
        if errors[row]:
            logits[row] = 0
    tokens = sample(logits, rows.plan)
    told: list[SampleDetails] = []
    if raw is not None:
        scores = gather_logprobs(raw, tokens[rows.told], wanted_top(rows))
        told = tell(entries_of(scores), rows, errors)
    kept = [0 if error else token for token, error in zip(tokens.tolist(), errors, strict=True)]
    return SampleOutput(kept, errors, told)


def follow_grammars(rows: SampledRows, vocabulary: int) -> tuple[Tensor, set[int]]:
    """What guided rows may draw: masks [guided rows, words] int32, of one token where that is
    settled already, of none where a guide cannot go on; and the rows with settled tokens. Waits for
    guides."""
    masks, settled = [], set()
    for row in rows.guided:
        try:
            allowed = _guide(rows, row).allowed_tokens(rows.indices[row])
        except GrammarGuideError:
            allowed = b"\0" * 4 * num_bitmask_words(vocabulary)
        if isinstance(allowed, int):
            settled.add(row)
            masks.append(build_token_bitmask(torch.tensor([allowed]), vocabulary))
        else:
            words = torch.frombuffer(bytearray(allowed), dtype=torch.int32)
            masks.append(words[: num_bitmask_words(vocabulary)])
    return torch.stack(masks), settled


def _guide(rows: SampledRows, row: int) -> GrammarGuide:
    guide = rows.states[row].guide
    assert guide is not None, "the row has a grammar"
    return guide


def _draw_each(logits: Tensor, rows: SampledRows, errors: list[str]) -> SampleOutput:
    """Row by row, so that an exception ends its own row only."""
    drawn = SampleOutput([], [], [])
    for row, error in enumerate(errors):
        alone = plan_rows([rows.owners[row]], [rows.states[row]], [rows.indices[row]])
        try:
            one = _draw_all(logits[row : row + 1], alone, [error])
        except Exception as cause:
            one = SampleOutput([0], [f"sampling failed: {cause!r}"], [])
        drawn.tokens.extend(one.tokens)
        drawn.errors.extend(one.errors)
        drawn.logprobs.extend(one.logprobs)
    return drawn


def wanted_top(rows: SampledRows) -> int:
    """How many of the likeliest tokens to score for the telling rows: always the same number, so
    that equal logits are ranked alike in any batch."""
    return MAX_LOGPROBS if any(rows.states[row].spec.logprobs for row in rows.told) else 0


def tell(scored: list[TokenLogprobs], rows: SampledRows, errors: list[str]) -> list[SampleDetails]:
    """What the telling rows have to tell, their tokens scored; errors: of all rows."""
    made = []
    for row, entry in zip(rows.told, scored, strict=True):
        if not errors[row]:
            state = rows.states[row]
            count = state.spec.logprobs
            own = None if count is None else _cut(entry, count)
            prompt = [] if rows.indices[row] else _in_order(state.prompt_logprobs)
            made.append(SampleDetails(rows.owners[row][0], own, prompt))
    return made


def _cut(entry: TokenLogprobs, count: int) -> TokenLogprobs:
    """The entry with its `count` likeliest tokens."""
    top_ids, top_logprobs = entry.top_ids[:count], entry.top_logprobs[:count]
    return TokenLogprobs(entry.token, entry.logprob, entry.rank, top_ids, top_logprobs)


def _in_order(entries: dict[int, TokenLogprobs]) -> list[TokenLogprobs]:
    return [entries[position] for position in sorted(entries)]


def tell_embedded(
    rows: SampledRows, vectors: Tensor | None, errors: list[str]
) -> list[SampleDetails]:
    """What the rows with an embedding tell; vectors [embedded, hidden] float32, on the host."""
    if vectors is None:
        return []
    return [
        SampleDetails(rows.owners[row][0], None, [], vector.numpy().astype("<f4").tobytes())
        for row, vector in zip(rows.embedded, vectors, strict=True)
        if not errors[row]
    ]
