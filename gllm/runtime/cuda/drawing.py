"""Tokens drawn and scored on the device, and what the host makes of what comes back.

Owns the order of drawing (finite logits, log-probabilities, edits, draw), which is that of
gllm/runtime/sampler.py, without a wait: what goes wrong in a row is told in the place of its token.
Knows nothing of streams and of how tokens travel.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.config.limits import MAX_LOGPROBS
from gllm.kernels.logprobs import LogprobTensors, compute_logprobs, gather_logprobs, pack_logprobs
from gllm.kernels.masking import apply_token_bitmask
from gllm.kernels.sampling import find_finite_rows, sample
from gllm.kernels.sampling_plan import SamplingPlan
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.runtime.batch import Batch
from gllm.runtime.cuda.edits import EditPlanner, Edits
from gllm.runtime.logprobs import NOT_FINITE, SCORED_ROWS, PromptRows, entries_of
from gllm.runtime.sampler import (
    ALL_FORBIDDEN,
    SampledRows,
    SampleOutput,
    plan_rows,
    tell,
    wanted_top,
)
from gllm.runtime.sampling_state import states_of

NO_TOKEN = {-1: NOT_FINITE, -2: ALL_FORBIDDEN}
"""What stands for the token of a row that has none, and why."""
BROKEN, FORBIDDEN = NO_TOKEN
EVERYTHING = SequenceSamplingParams(
    top_p=0.9,
    repetition_penalty=1.1,
    allowed=(0, 1),
    bad_words=((0,), (0, 1)),
    logprobs=MAX_LOGPROBS,
)
"""Of everything something: what takes most memory."""


class DrawInputs(NamedTuple):
    """What drawing takes to the device."""

    plan: SamplingPlan
    edits: Edits | None
    told: Tensor
    """[told] int64: rows of logits whose tokens are scored."""
    embedded: Tensor
    """[embedded] int64: sampling rows that tell an embedding."""
    scored: Tensor
    """[scored] int64: token rows that score the next token of their prompt."""
    targets: Tensor
    """[scored] int64: those tokens."""
    top: int
    """How many of the likeliest tokens are told with each."""


class Drawing:
    """Draws the tokens of steps."""

    def __init__(self, vocabulary: int, block_size: int) -> None:
        self._planner = EditPlanner(vocabulary, block_size)

    def plan(
        self,
        rows: SampledRows,
        prompts: Sequence[PromptRows],
        lengths: Sequence[int],
        blocks: npt.NDArray[np.int64],
    ) -> DrawInputs:
        """What a step's drawing needs, on the host.

        lengths: tokens of each sampling row's sequence so far; blocks: [rows, blocks], their block
        tables; prompts: parts of prompts that the step scores.
        """
        scored = [row for part in prompts for row in part.rows]
        targets = [token for part in prompts for token in part.tokens]
        top = MAX_LOGPROBS if any(part.top for part in prompts) else wanted_top(rows)
        return DrawInputs(
            rows.plan.for_gpu(),
            self._planner.plan(rows, lengths, blocks),
            torch.tensor(rows.told, dtype=torch.int64),
            torch.tensor(rows.embedded, dtype=torch.int64),
            torch.tensor(scored, dtype=torch.int64),
            torch.tensor(targets, dtype=torch.int64),
            top,
        )

    def example(self, samples: int, sampling: SequenceSamplingParams = EVERYTHING) -> DrawInputs:
        """Return the inputs of so many rows, which look back at a token each; by default those that
        take most memory."""
        states = states_of(RegisterSequences(0, 1, [0], sampling, n=samples))
        rows = plan_rows([(0, 0)] * samples, states, [0] * samples)
        blocks = np.zeros((samples, 1), dtype=np.int64)
        return self.plan(rows, [], [1] * samples, blocks)

    def score_prompts(
        self, hidden: Tensor, inputs: DrawInputs, head: Callable[[Tensor], Tensor]
    ) -> list[Tensor]:
        """Scores of prompts, packed. hidden [tokens, hidden] of the step;
        head: from such rows to logits."""
        parts = zip(
            inputs.scored.split(SCORED_ROWS), inputs.targets.split(SCORED_ROWS), strict=True
        )
        return [
            pack_logprobs(
                gather_logprobs(
                    compute_logprobs(head(hidden.index_select(0, rows))), tokens, inputs.top
                )
            )
            for rows, tokens in parts
            if len(rows)
        ]

    def draw(
        self,
        logits: Tensor,
        inputs: DrawInputs,
        table: Tensor,
        guided: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """Tokens [rows] int64, those of NO_TOKEN among them, and the scores of told ones, packed.

        logits [rows, vocabulary] float32, contiguous, are overwritten; table: [slots] int64, the
        tokens beside the KV cache; guided: rows with grammars [guided] int64 and what those allow
        [guided, words] int32.
        """
        finite = find_finite_rows(logits)
        logits.masked_fill_(~finite[:, None], 0)
        raw = alive = None
        if len(inputs.told):
            raw = compute_logprobs(logits.index_select(0, inputs.told))
        if guided is not None:
            apply_token_bitmask(logits, *guided)
        if inputs.edits is not None:
            inputs.edits.apply(logits, table)
        if guided is not None or inputs.edits is not None:
            alive = logits.amax(dim=-1) > -torch.inf
            logits.masked_fill_(~alive[:, None], 0)
        tokens = sample(logits, inputs.plan)
        scores = []
        if raw is not None:
            scores.append(
                pack_logprobs(gather_logprobs(raw, tokens.index_select(0, inputs.told), inputs.top))
            )
        if alive is not None:
            tokens = tokens.masked_fill(~alive, FORBIDDEN)
        return tokens.masked_fill(~finite, BROKEN), scores


def drawn_of(batch: Batch, tokens: list[int], scores: LogprobTensors) -> SampleOutput:
    """What a batch's rows brought, its prompts' scores put down; scores: of its prompts' tokens,
    then of told ones."""
    rows = batch.sampled
    begin = 0
    for part in batch.prompts:
        end = begin + len(part.tokens)
        part.scores.append(_slice(scores, begin, end, part.top))
        part.record()
        begin = end
    errors = [NO_TOKEN.get(token, "") for token in tokens]
    for row in rows.told:
        errors[row] = errors[row] or rows.states[row].fault
    told = tell(entries_of(_slice(scores, begin, begin + len(rows.told))), rows, errors)
    kept = [0 if error else token for token, error in zip(tokens, errors, strict=True)]
    return SampleOutput(kept, errors, told)


def _slice(scores: LogprobTensors, begin: int, end: int, top: int = MAX_LOGPROBS) -> LogprobTensors:
    """Rows of scores, with their `top` likeliest tokens."""
    columns = (scores.tokens, scores.logprobs, scores.ranks)
    tables = (scores.top_ids, scores.top_logprobs)
    return LogprobTensors(
        *(column[begin:end] for column in columns), *(table[begin:end, :top] for table in tables)
    )
