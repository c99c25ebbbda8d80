"""A fake model: a token is a hash of all tokens before it, computed stage by stage over KV blocks.

With recurrent layers, each row starts from a state instead of the value before it.
A token that is lost, doubled or computed from blocks of another sequence changes all that follow.
Each rank of a stage keeps some bits of each value in its blocks, so that every value needs all
ranks; the tokens do not depend on their number.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import or_

from gllm.messages.steps import RegisterSequences
from gllm.scheduler.block_table_replica import BlockTableReplica
from gllm.scheduler.plan import (
    ON_DEVICE,
    SampledToken,
    ScheduledRow,
    StateSegment,
    StepPlan,
    StepResult,
)
from gllm.scheduler.state_slots import NO_STATE_SLOT

VOCAB_SIZE = 1000
_MASK = 2**64 - 1

Values = list[list[int]]
"""Of each row of a step, the value of each position."""
Rows = list[tuple[ScheduledRow, list[int], list[int], list[StateSegment]]]
"""Rows of a step with their prompts, block tables and segments."""


def mix(first: int, second: int) -> int:
    """Return a hash of two numbers."""
    value = (first * 0x9E3779B97F4A7C15 + second * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & _MASK
    return (value ^ value >> 29) * 0xBF58476D1CE4E5B9 & _MASK


def sample(value: int, choice: int, history: Sequence[int]) -> int:
    """Return the token after a position, which also depends on the choice and its last tokens."""
    for each in (choice, len(history), *history[-2:]):
        value = mix(value, each)
    return value % VOCAB_SIZE


def generate(
    prompt: list[int], choice: int, max_tokens: int, stop_ids: Sequence[int], num_stages: int
) -> tuple[list[int], str]:
    """Return what a request generates, and the reason of its end."""
    values = [0] * num_stages
    output: list[int] = []
    for position in range(len(prompt) + max_tokens):
        if position >= len(prompt):
            token = sample(values[-1], choice, output)
            output.append(token)
            if token in stop_ids:
                return output, "stop"
        value = prompt[position] if position < len(prompt) else output[-1]
        for stage in range(num_stages):
            value = values[stage] = mix(values[stage], value)
    return output, "length"


def next_tokens(prompt: list[int], choice: int, output: list[int], num_stages: int) -> list[int]:
    """Return, for each token of an output, the one that follows the tokens before it."""
    values = [0] * num_stages
    tokens: list[int] = []
    for position, value in enumerate(prompt + output):
        if position >= len(prompt):
            tokens.append(sample(values[-1], choice, output[: position - len(prompt)]))
        for stage in range(num_stages):
            value = values[stage] = mix(values[stage], value)
    return tokens


def combine(parts: list[Values]) -> Values:
    """Return the values whose bits the ranks have."""
    return [
        [reduce(or_, each) for each in zip(*rows, strict=True)] for rows in zip(*parts, strict=True)
    ]


@dataclass
class KnownSequence:
    """State of a sequence in the sampler."""

    choice: int
    prompt_len: int
    history: list[int]


@dataclass
class Stage:
    """The arithmetic of one rank of a stage."""

    block_size: int
    has_sampler: bool
    rank: int = 0
    num_ranks: int = 1
    replica: BlockTableReplica = field(default_factory=BlockTableReplica)
    cache: dict[int, int] = field(default_factory=dict)
    """This rank's bits of the value of each slot."""
    states: dict[int, int] = field(default_factory=dict)
    """This rank's bits of the value in each state slot."""
    sequences: dict[int, KnownSequence] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)
    """Last token of each sequence, for rows that are planned before it is known."""

    def register(self, message: RegisterSequences) -> None:
        for index in range(message.n):
            seq = message.seq + index
            self.replica.register(seq, message.prompt_len, message.prompt)
            if self.has_sampler:
                choice = message.choices[index] if message.choices else index
                history = list(message.outputs[index]) if message.outputs else []
                self.sequences[seq] = KnownSequence(choice, message.prompt_len, history)

    @property
    def mask(self) -> int:
        """Bits that this rank keeps."""
        return sum(1 << bit for bit in range(self.rank, 64, self.num_ranks))

    def prepare(self, plan: StepPlan) -> Rows:
        """Return each row with its prompt, its block table and its segments."""
        views = self.replica.apply(plan)
        segments: list[list[StateSegment]] = [[] for _ in plan.rows]
        for segment in plan.state_segments:
            segments[segment.row].append(segment)
        rows = [
            (row, view.prompt_token_ids, list(view.block_ids), own)
            for row, view, own in zip(plan.rows, views, segments, strict=True)
        ]
        self.replica.release(plan.released_seqs)
        return rows

    def placeholders(self, rows: Rows) -> list[int]:
        """Return the tokens of the rows that were planned before they were known.

        Only the rank that samples knows them; on other ranks their number is right.
        """
        return [
            self.sampled.get(row.seq, 0)
            for row, _, _, _ in rows
            for token in row.token_ids
            if token == ON_DEVICE
        ]

    def previous(self, rows: Rows) -> Values:
        """Return this rank's bits of the value before each row."""
        values = []
        for row, _, blocks, segments in rows:
            value = self.cache[self._slot(blocks, row.start - 1)] if row.start else 0
            if segments:
                source = segments[0].source
                value = 0 if source == NO_STATE_SLOT else self.states[source]
            values.append([value])
        return values

    def compute(
        self, rows: Rows, previous: Values, hidden: Values | None, placeholders: list[int]
    ) -> Values:
        """Compute the values of each row and keep this rank's bits.

        Args:
            rows: of the step.
            previous: value before each row.
            hidden: of the previous stage; None on the first.
            placeholders: tokens of the rows that were planned before they were known.

        Returns:
            This rank's bits of the values.
        """
        values, told, mask = [], iter(placeholders), self.mask
        for index, (row, prompt, blocks, segments) in enumerate(rows):
            inputs = self._tokens(row, prompt, told) if hidden is None else hidden[index]
            assert len(inputs) == row.num_tokens, f"{len(inputs)} inputs of {row}"
            (value,) = previous[index]
            own = []
            for position, each in enumerate(inputs, start=row.start):
                value = mix(value, each)
                self.cache[self._slot(blocks, position)] = value & mask
                own.append(value & mask)
            end = 0
            for segment in segments:
                end += segment.num_tokens
                self.states[segment.target] = own[end - 1]
            values.append(own)
        return values

    def sample(self, plan: StepPlan, values: Values) -> StepResult:
        """Sample the tokens of a step."""
        tokens = []
        for row, own in zip(plan.rows, values, strict=True):
            if not row.should_sample:
                continue
            sequence = self.sequences[row.seq]
            # A token for each position beyond the prompt is known, and no more.
            end = row.start + row.num_tokens
            while len(sequence.history) > end - sequence.prompt_len:
                # It was sampled before, but the sequence had lost its blocks.
                sequence.history.pop()
            assert end == sequence.prompt_len + len(sequence.history), f"{row}"
            token = sample(own[-1], sequence.choice, sequence.history)
            sequence.history.append(token)
            self.sampled[row.seq] = token
            tokens.append(SampledToken(row.seq, row.num_preemptions, token))
        for seq in plan.released_seqs:
            self.sequences.pop(seq, None)
        return StepResult(plan.step, tokens)

    def _tokens(self, row: ScheduledRow, prompt: list[int], told: Iterator[int]) -> list[int]:
        own = [next(told) if t == ON_DEVICE else t for t in row.token_ids]
        num_prompt = max(0, min(row.num_tokens, len(prompt) - row.start))
        return prompt[row.start : row.start + num_prompt] + own

    def _slot(self, blocks: list[int], position: int) -> int:
        return blocks[position // self.block_size] * self.block_size + position % self.block_size
